"""Planners that are stopped from outside: the best plan until then, priced right, with a bound that holds."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.stopping import Deadline, StopRequestedError
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint import chain_of, search
from autoddl.pipelines.joint.explorer import Explorer
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.pipelines.joint.result import JointOptions, unpipelined
from autoddl.pipelines.joint.search import explore
from autoddl.planfile import plan_document
from autoddl.search import METHODS
from autoddl.search.planner import Options, make_plan
from autoddl.text.plans import plan_text
from autoddl.zoo import Transformer, gpt, resolve_model

from ..stops import StopAfter

pytestmark = pytest.mark.slow

GPT = gpt(Transformer("gpt:2x64", 2, 64, 4, 32, 256))
SMALL = load_cluster("gcp-a100").resized(2, 2)
#: A pipeline is the best plan of this model on this cluster.
UNTIED = gpt(Transformer("untied", 3, 64, 4, 8, 128, tied=False))
SLOW = load_cluster("gcp-a100").resized(1, 4).with_links(latency_s=2e-6, bandwidth=2e7)


@pytest.fixture(scope="module")
def optima() -> dict[float, float]:
    """The proven optimum for each memory limit."""
    free = make_plan(GPT, SMALL, Options(batch=8))
    limits = [2**40, *(free.assessment.memory_bytes / tightness for tightness in (1.2, 1.5))]
    found = {limit: make_plan(GPT, SMALL, Options(batch=8, memory_limit_bytes=limit)) for limit in limits}
    assert all(planned.optimal for planned in found.values())
    return {limit: planned.cost for limit, planned in found.items()}


@given(st.data(), st.integers(0, 120), st.sampled_from(sorted(METHODS)), st.booleans())
@settings(max_examples=25, deadline=None)
def test_whenever_it_is_stopped_the_plan_is_one(optima, data, asks, method, untied):
    limit = data.draw(st.sampled_from(sorted(optima)))
    stop = StopAfter(asks)
    options = Options(
        batch=8,
        memory_limit_bytes=limit,
        method=method,
        untied=untied and method == "exact",
        evaluations=None if method == "exact" else 2000,
    )
    try:
        planned = make_plan(GPT, SMALL, options, stop=stop)
    except StopRequestedError:
        assert stop.has_fired
        return
    assert planned.is_interrupted == stop.has_fired
    # The layer graph, not the search, says what the plan costs.
    truth = assess(GPT, SMALL, planned.workload, planned.strategies)
    assert planned.cost == pytest.approx(truth.step_s, rel=1e-9) and truth.memory_bytes <= limit
    assert planned.lower_bound <= planned.cost and planned.gap == pytest.approx(1 - planned.lower_bound / planned.cost)
    if not options.untied:
        assert planned.lower_bound <= optima[limit] * (1 + 1e-9) and planned.cost >= optima[limit] * (1 - 1e-9)
    if planned.optimal:
        assert planned.gap == 0
    elif planned.is_interrupted:
        assert plan_document(unpipelined(planned))["status"] == "interrupted"
        assert "interrupted" in str(plan_text(unpipelined(planned)))


def test_the_longer_it_runs_the_better_the_plan(optima):
    limit = min(optima)
    costs, gaps, asks = [], [], 1
    while not gaps or gaps[-1] > 0:
        try:
            planned = make_plan(GPT, SMALL, Options(batch=8, memory_limit_bytes=limit), stop=StopAfter(asks))
            costs.append(planned.cost)
            gaps.append(planned.gap)
        except StopRequestedError:
            assert not costs, "a plan that was known is not lost"
            gaps.append(inf)
        asks *= 2
    assert costs == sorted(costs, reverse=True) and gaps == sorted(gaps, reverse=True) and len(set(costs)) > 1
    assert costs[-1] == pytest.approx(optima[limit], rel=1e-9)


def test_a_baseline_is_the_plan_where_time_is_too_short_for_a_search(optima):
    """However short the time limit is, there is an answer, and its bound holds."""
    limit = min(optima)
    planned = make_plan(GPT, SMALL, Options(batch=8, memory_limit_bytes=limit, time_limit_s=1e-9))
    assert planned.lower_bound <= optima[limit] * (1 + 1e-9) and optima[limit] * (1 - 1e-9) <= planned.cost < inf


def joint_options(pipeline: str, limit: float) -> JointOptions:
    return JointOptions(Options(batch=8, memory_limit_bytes=limit, precision="mixed", time_limit_s=600.0), pipeline)


def test_whenever_a_joint_search_is_stopped_its_plan_holds():
    """Every place where it is stopped is a search of its own, and there are many."""
    optimum = plan_jointly(UNTIED, SLOW, joint_options("auto", 4e6))
    assert optimum.optimal and not optimum.is_interrupted and optimum.status == "optimal"
    asks, steps, stop = 1, [], StopAfter(1)
    while not steps or stop.has_fired:
        stop = StopAfter(asks)
        asks *= 4
        try:
            planned = plan_jointly(UNTIED, SLOW, joint_options("auto", 4e6), stop=stop)
        except StopRequestedError:
            assert not steps, "a plan that was known is not lost"
            continue
        steps.append(planned.evaluation.step_s)
        best = optimum.evaluation.step_s
        assert planned.lower_bound_s <= best * (1 + 1e-9) and planned.evaluation.step_s >= best * (1 - 1e-9)
        assert planned.lower_bound_s <= planned.evaluation.step_s and planned.evaluation.memory_bytes <= 4e6
        assert planned.is_interrupted == stop.has_fired
        if not planned.optimal:
            assert planned.status == plan_document(planned)["status"] == "interrupted"
            assert "not proven: interrupted, the best configuration" in str(plan_text(planned))
            assert planned.gap == pytest.approx(1 - planned.lower_bound_s / planned.evaluation.step_s)
    assert steps == sorted(steps, reverse=True) and steps[-1] == optimum.evaluation.step_s and len(set(steps)) > 1


def test_settings_that_were_not_come_to_have_no_bound():
    """A search that ends while it looks at its settings knows nothing of the others, whatever ended it."""

    def cut_short(ended):
        explorer = Explorer(chain_of(UNTIED), SLOW, Workload(8, 8, "mixed", "adam"), 4e6)
        offered = list(explorer.settings(None, False, lambda spec: spec.num_workers > 1))

        def some():
            yield from offered[:2]
            ended(explorer)
            yield from offered[2:]

        return explorer, some()

    explorer, settings_ = cut_short(lambda explorer: explorer.stop.request())
    found = explore(explorer, settings_, 1.0, Deadline(None, explorer.stop))
    assert not found.is_finished and found.lower_bound_s == 0.0 and found.num_settings == 2
    explorer, settings_ = cut_short(lambda explorer: None)
    found = explore(explorer, settings_, 1.0, Deadline(0.0))
    assert not found.is_finished and found.lower_bound_s == 0.0 and found.num_settings == 0


@pytest.mark.parametrize("looks", [1, 2, 7])
def test_settings_that_wait_for_more_time_are_in_the_bound(monkeypatch, looks):
    """A search that is stopped while it proves forgets none of those that it has put off."""
    explorer = Explorer(chain_of(UNTIED), SLOW, Workload(8, 8, "mixed", "adam"), 4e6)
    asked = []

    class Undecided(search.SettingSearch):
        def run(self):
            asked.append(self.setting)
            if len(asked) == looks:
                explorer.stop.request()
            explorer.stop.check()
            raise search.UnsettledError

    monkeypatch.setattr(search, "SettingSearch", Undecided)
    monkeypatch.setattr(search.Search, "attempt_promising", lambda self, deadline: None)
    every = list(explorer.settings(None, False, lambda spec: spec.num_workers > 1))
    bounds = []
    found = explore(explorer, every, 1e3, Deadline(None, explorer.stop), lambda best, bound, _: bounds.append(bound))
    assert len(asked) == looks and not found.is_finished and found.best is None
    assert 0 < found.lower_bound_s == bounds[-1]


@pytest.mark.parametrize("name", ["dapple", "chimera"])
def test_whenever_the_planner_of_a_paper_is_stopped_its_plan_holds(name):
    graph = resolve_model("mlp:64,768,768,32")
    whole = plan_jointly(graph, SMALL, joint_options(name, 64e6))
    asks, steps, stop = 1, [], StopAfter(1)
    while not steps or stop.has_fired:
        stop = StopAfter(asks)
        asks *= 3
        try:
            planned = plan_jointly(graph, SMALL, joint_options(name, 64e6), stop=stop)
        except StopRequestedError:
            assert not steps, "a plan that was known is not lost"
            continue
        steps.append(planned.evaluation.step_s)
        assert planned.status == ("interrupted" if stop.has_fired else "limit reached")
        assert planned.evaluation.memory_bytes <= 64e6 and planned.lower_bound_s <= whole.evaluation.step_s
    assert steps == sorted(steps, reverse=True) and steps[-1] == whole.evaluation.step_s
