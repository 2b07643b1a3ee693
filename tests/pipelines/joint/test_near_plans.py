"""Better plans near a good one: settings near its own, and cuts with steps."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint import cut_times, cut_trials, near_plans
from autoddl.pipelines.joint.cut_regions import Cut, cut_at
from autoddl.pipelines.joint.cut_times import locally_improved
from autoddl.pipelines.joint.cut_trials import CutTrials
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.explorer import Explorer, Setting, setting_of
from autoddl.pipelines.joint.incumbent import Incumbent
from autoddl.pipelines.joint.near_plans import improve_near, near_settings, regrouped_settings
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.search import explore
from autoddl.pipelines.joint.setting_bounds import SettingBounds
from autoddl.pipelines.joint.setting_search import SettingSearch
from autoddl.pipelines.joint.stepped_cuts import best_stepped_cut, stepped_sizes
from autoddl.pipelines.planners import Clock
from autoddl.zoo import mlp

CLUSTER = load_cluster("gcp-a100").resized(2, 2)


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    chain = chain_of(mlp((256, 64, 256, 64, 128, 64, 64)))
    return Explorer(chain, CLUSTER, Workload(16, 1, "mixed", "adam"), limit_bytes=800_000)


def best_of(explorer: Explorer, setting: Setting) -> Evaluation:
    best = explore(explorer, [setting]).best
    assert best is not None
    return best


# ---- Settings ----------------------------------------------------------------------------------------------------------


def named(setting: Setting) -> tuple[str, str, int]:
    return setting.schedule.name, "".join(str(value) for _, value in setting.schedule.options), setting.micro_batch


def test_near_settings_by_hand(explorer: Explorer) -> None:
    """Four workers of a device each, 16 samples; an interleaved schedule needs a multiple of 4 micro-batches."""
    of_four = [one for one in explorer.settings(None, False, lambda spec: spec.num_workers == 4)]
    by_name = {named(one): one for one in of_four}
    near = partial(near_settings, explorer, True)
    assert {named(one) for one in near(by_name["1f1b", "A", 4])} == {
        *(("gpipe", "", 4), ("1f1b", "B", 4), ("zero-bubble", "H1", 4), ("zero-bubble", "H2", 4)),
        *(("1f1b", "A", 2), ("1f1b", "A", 8)),
    }
    chimera = [one for one in by_name.values() if named(one) == ("chimera", "direct4", 1)]
    # No half of a sample, and only the same number of pipelines.
    assert all(one.schedule.num_pipelines == 4 for setting in chimera for one in near(setting))
    assert all(one.micro_batch in (1, 2) for setting in chimera for one in near(setting)) and chimera
    # The whole batch has no double; a fixed micro-batch stays.
    assert {one.micro_batch for one in near(by_name["gpipe", "", 16])} == {8, 16}
    assert {one.micro_batch for one in near_settings(explorer, False, by_name["gpipe", "", 16])} == {16}


def test_near_settings_are_in_the_space_and_near_is_mutual(explorer: Explorer) -> None:
    space = list(explorer.settings(None, False, lambda spec: spec.num_workers > 1))
    near = {setting: set(near_settings(explorer, True, setting)) for setting in space}
    for setting, others in near.items():
        assert others <= set(space) and setting not in others
        assert all(other.mesh == setting.mesh and setting in near[other] for other in others)


def test_regrouped_settings_by_hand(explorer: Explorer) -> None:
    """Two workers of two devices each, and 6 layers, which are too few for 4 groups."""
    of_two = [one for one in explorer.settings(4, False, lambda spec: spec.num_workers == 2) if one.mesh.nodes == 1]
    by_name = {named(one): one for one in of_two if one.mesh.devices_per_node == 2}
    groups = {("grouped-gpipe", "2", 4), ("interleaved-1f1b", "2", 4)}
    assert {named(one) for one in regrouped_settings(explorer, by_name["gpipe", "", 4])} == groups
    alone = {("gpipe", "", 4), ("1f1b", "A", 4), ("1f1b", "B", 4), ("zero-bubble", "H1", 4), ("zero-bubble", "H2", 4)}
    for name in groups:
        others = set(regrouped_settings(explorer, by_name[name]))
        assert {named(one) for one in others} == alone and others <= set(by_name.values())
    assert not list(regrouped_settings(explorer, by_name["chimera", "direct2", 4]))


def test_settings_of_other_stages_come_last(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are searched to their end, as the cut of the plan is of no use there; of near ones only promising cuts are tried."""
    own = next(iter(explorer.settings(4, False, lambda spec: spec.name == "zero-bubble" and spec.num_workers == 2)))
    plan, improved, searched = best_of(explorer, own), list[Setting](), list[Setting]()
    monkeypatch.setattr(near_plans, "estimate_by_simulation", lambda explorer, setting, step_s, best_s: step_s)
    monkeypatch.setattr(SettingSearch, "improve", lambda self, sizes: improved.append(self.setting))
    monkeypatch.setattr(SettingSearch, "run", lambda self: searched.append(self.setting))
    near, far = partial(near_settings, explorer, True), partial(regrouped_settings, explorer)
    assert improve_near(explorer, plan, Clock(), math.inf, math.inf, nearby=near, farther=far) is plan
    num_near = len(list(near(own)))
    assert improved[0] == own and set(improved[1 : num_near + 1]) == set(near(own))
    assert improved[num_near + 1 :] == searched and set(searched) == set(far(own)) != set()


def test_a_better_plan_is_found_in_another_schedule(explorer: Explorer) -> None:
    """With a fixed micro-batch: there are better plans in other schedules of the same stages."""
    own = next(iter(explorer.settings(4, False, lambda spec: spec.name == "zero-bubble" and spec.num_workers == 3)))
    first = best_of(explorer, own)
    nearby = partial(near_settings, explorer, False)
    best_s = min(best_of(explorer, setting).step_s for setting in nearby(own))
    assert best_s < 0.95 * first.step_s
    told: list[float] = []
    found = improve_near(explorer, first, Clock(), math.inf, math.inf, told.append, nearby=nearby)
    assert best_s * (1 - 1e-9) <= found.step_s < 0.95 * first.step_s and told == sorted(told, reverse=True)
    assert setting_of(found.configuration) in set(nearby(own))
    # Without other settings, and without time, it is the first plan.
    assert improve_near(explorer, first, Clock(), math.inf, math.inf) is first
    assert improve_near(explorer, first, Clock(0.0), math.inf, math.inf, nearby=nearby) is first


def test_the_time_in_other_settings_is_that_of_the_first_one(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first setting is searched for 5 s without success; each other one gets 5 s of the rest, and what a better plan adds."""
    own = next(iter(explorer.settings(4, False, lambda spec: spec.name == "zero-bubble" and spec.num_workers == 3)))
    nearby, plan, now, given = partial(near_settings, explorer, False), best_of(explorer, own), 0.0, list[float]()
    monkeypatch.setattr("time.process_time", lambda: now)
    monkeypatch.setattr(near_plans, "estimate_by_simulation", lambda explorer, setting, step_s, best_s: step_s)

    def improve(self: SettingSearch, sizes: object) -> None:
        nonlocal now
        given.append(self.deadline.left_s)
        now += 5.0 if self.setting == own else 4.0

    monkeypatch.setattr(SettingSearch, "improve", improve)
    assert improve_near(explorer, plan, Clock(12.0), 1.0, 60.0, nearby=nearby) is plan
    assert given == [60.0, 5.0, 5.0]  # 13 s are over
    # If the first one takes longer than the limit, it is the only one.
    given.clear()
    assert improve_near(explorer, plan, Clock(4.0), 1.0, 60.0, nearby=nearby) is plan and given == [60.0]


def test_better_plans_lead_to_the_settings_near_them(explorer: Explorer) -> None:
    """From 16 micro-batches to one, in steps of 2, each from a better plan."""
    own = next(iter(explorer.settings(1, False, lambda spec: spec.name == "gpipe" and spec.num_workers == 3)))
    found = improve_near(
        explorer, best_of(explorer, own), Clock(), math.inf, math.inf, nearby=partial(near_settings, explorer, True)
    )
    assert found.configuration.schedule.num_micro_batches == 1


# ---- Cuts --------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 64), st.integers(0, 200), st.integers(0, 300))
def test_stepped_sizes(num_stages: int, further: int, max_count: int) -> None:
    found = stepped_sizes(num_stages, num_units := num_stages + further, max_count)
    assert len(found) == len(set(found)) <= max_count
    few, rest = divmod(num_units, num_stages)
    assert rest or not found
    for sizes in found:
        assert len(sizes) == num_stages and sum(sizes) == num_units and set(sizes) <= {few, few + 1}
        # Each of 8 blocks ends in a step at most, and one has another step inside.
        assert sum(a != b for a, b in zip(sizes, sizes[1:])) <= 8


def test_all_patterns_of_equal_blocks_are_stepped() -> None:
    """12 stages with 18 units: two of four blocks of three stages have two units each."""
    patterns = {tuple(np.repeat(blocks, 3).tolist()) for blocks in product((1, 2), repeat=4) if sum(blocks) == 6}
    assert patterns == set(stepped_sizes(12, 18, 100)) and len(patterns) == math.comb(4, 2)


def bounds_of(explorer: Explorer, setting: Setting) -> tuple[SettingBounds, np.ndarray]:
    """The bounds of a setting, and the vectors of its best fractional cut."""
    bounds = SettingBounds(explorer, setting, Incumbent(1.0))
    assert bounds.initialise()
    bounds.use_whole_schedule()
    return bounds, bounds.of_region(bounds.whole_region, 10).vectors


@pytest.fixture(scope="module")
def many_stages() -> tuple[SettingBounds, np.ndarray]:
    """Twelve equal layers in eight stages of four workers."""
    chain = chain_of(mlp((64,) * 13))
    explorer = Explorer(chain, CLUSTER, Workload(16, 2, "mixed", "adam"), limit_bytes=1e12)
    settings = explorer.settings(
        2, False, lambda spec: spec.name == "interleaved-1f1b" and (spec.num_workers, spec.groups) == (4, 2)
    )
    return bounds_of(explorer, next(iter(settings)))


def step_s(bounds: SettingBounds, cut: Cut, vectors: np.ndarray) -> float:
    """The step of a cut, whose units are run as the vectors say, by one path search of its own."""
    times = np.zeros(bounds.cut_graph.terms.count)
    for number, part in enumerate(bounds.cut_graph.terms.of_stages):
        times[part] = [vectors[stage, first:stop, number].sum() for stage, (first, stop) in enumerate(cut)]
    crossing = [bounds.cut_graph.least_transfer(stage, stop) for stage, (_, stop) in enumerate(cut[:-1])]
    times[bounds.cut_graph.terms.transfer_forward] = times[bounds.cut_graph.terms.transfer_backward] = crossing
    return bounds.graph.step(times)[0]


def test_the_best_stepped_cut_has_the_shortest_step(many_stages: tuple[SettingBounds, np.ndarray]) -> None:
    bounds, vectors = many_stages
    best = best_stepped_cut(bounds.cut_graph, bounds.graph, vectors)
    assert best is not None
    all_sizes = stepped_sizes(8, 12, 1000)
    steps = [step_s(bounds, cut_at(np.cumsum(sizes).tolist()[:-1], 12), vectors) for sizes in all_sizes]
    assert step_s(bounds, best, vectors) == pytest.approx(min(steps), rel=1e-9) and len(all_sizes) == 70
    assert max(steps) > 1.05 * min(steps)


def test_the_best_stepped_cut_is_tried(
    many_stages: tuple[SettingBounds, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds, vectors = many_stages
    monkeypatch.setattr(cut_trials, "locally_improved", lambda cut_graph, graph, cut, vectors: cut)
    trials = CutTrials(bounds)
    trials.try_promising_cuts(bounds.of_region(bounds.whole_region, 10))
    best = best_stepped_cut(bounds.cut_graph, bounds.graph, vectors)
    assert best is not None and tuple(stop for _, stop in best) in trials.tried


def test_there_is_no_stepped_cut_for_unequal_workers_or_even_units(explorer: Explorer) -> None:
    unequal = next(iter(explorer.settings(4, False, lambda spec: spec.num_workers == 3)))
    assert len(set(unequal.widths)) > 1
    even = next(iter(explorer.settings(4, False, lambda spec: spec.num_workers == 2)))
    assert explorer.chain.num_units == 6
    for setting in (unequal, even):
        bounds, vectors = bounds_of(explorer, setting)
        assert best_stepped_cut(bounds.cut_graph, bounds.graph, vectors) is None


def test_units_move_between_the_stages_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many stages: beside a step if there are few of them, else between neighbours."""
    assert len(cut_times._pairs(np.ones(8), 1)) == 8 * 7
    monkeypatch.setattr(cut_times, "MAX_NODES", 1)
    ends_of_runs = {0, 3, 4, 7}
    assert set(cut_times._pairs(np.array([1] * 4 + [2] * 4), 1)) == {
        (a, b) for a in ends_of_runs for b in ends_of_runs if a != b
    }
    assert set(cut_times._pairs(np.array([1, 2] * 4), 1)) == {
        (a, b) for a in range(8) for b in (a - 1, a + 1) if 0 <= b < 8
    }


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 69))
def test_a_local_search_makes_no_cut_worse(many_stages: tuple[SettingBounds, np.ndarray], number: int) -> None:
    bounds, vectors = many_stages
    cut = cut_at(np.cumsum(stepped_sizes(8, 12, 1000)[number]).tolist()[:-1], 12)
    with pytest.MonkeyPatch.context() as patched:
        few_s = step_s(bounds, locally_improved(bounds.cut_graph, bounds.graph, cut, vectors), vectors)
        patched.setattr(cut_times, "MAX_NODES", 1)
        few_pairs_s = step_s(bounds, locally_improved(bounds.cut_graph, bounds.graph, cut, vectors), vectors)
    own_s = step_s(bounds, cut, vectors) * (1 + 1e-9)
    assert few_s <= own_s and few_pairs_s <= own_s
