"""Trust on cases that can be worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from autoddl.calib.clusterfile import calibrated_document, fit_samples
from autoddl.calib.stageusage import usage_of_step
from autoddl.calib.trust import RivalPlan, Usage, drawn_cluster, outside_notes, trust
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.calibration import Calibration, Coverage, Replicates
from autoddl.costmodel.cluster import Cluster, from_document, load_cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import data_parallel
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint import JointOptions
from autoddl.pipelines.joint.evaluation import evaluate_unpipelined
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.pipelines.joint.result import unpipelined
from autoddl.plandocument import sealed
from autoddl.planfile import plan_document, plan_from_document
from autoddl.search.planner import Options, make_plan
from autoddl.text.plans import plan_text
from autoddl.text.trust import trust_section
from autoddl.trusting import trust_document, trust_of
from autoddl.zoo.feedforward import mlp

from .drawn_costs import costs_of
from .synthetic import ring, samples_of

GATHER, REDUCE = Collective.ALL_GATHER, Collective.ALL_REDUCE


def cluster_with(**slowness: list[float]) -> Cluster:
    """local-cpu, 4 ranks, with draws of the slowness of each collective (no latency)."""
    names = {"gather": "all-gather", "reduce": "all-reduce"}
    replicates = tuple(Replicates("intra-node", names[n], 0, "slowness", tuple(v)) for n, v in slowness.items())
    covered = tuple(Coverage("intra-node", names[n], (4,), 1000, 100_000) for n in slowness)
    calibration = Calibration("2026-01-02", "here", "1", 10, covered, (), (), replicates)
    return replace(load_cluster("local-cpu"), calibration=calibration)


def candidate(name: str, **sent: float) -> RivalPlan:
    """A plan that sends so many bytes with each collective over 4 ranks."""
    which = {"gather": GATHER, "reduce": REDUCE}
    rings = {("intra-node", which[n], 4): (3.0, nbytes, nbytes) for n, nbytes in sent.items()}
    return RivalPlan(name, Usage(rings, {key: {value[2]: 1.0} for key, value in rings.items()}))


def test_probability_and_regret_by_hand():
    """Gathering costs 1, 1, 1 or 4 ns/byte, reducing always 2: a plan that gathers 1 KB costs 1, 1, 1, 4 us, one that reduces it
    2 us.  The first is best in 3 of 4 draws; in the fourth it costs twice the other: regret (0 + 0 + 0 + 1) / 4."""
    cluster = cluster_with(gather=[1e-9, 1e-9, 1e-9, 4e-9], reduce=[2e-9] * 4)
    gathers, reduces = candidate("gathers", gather=1000.0), candidate("reduces", reduce=1000.0)
    assert costs_of(gathers.usage, cluster, True) == pytest.approx([1e-6, 1e-6, 1e-6, 4e-6])
    found = trust([gathers, reduces], cluster, True)
    assert found.probability == 0.75 and found.expected_regret == pytest.approx(0.25)
    assert found.rivals == (("reduces", 0.25),) and found.num_draws == 4
    other = trust([reduces, gathers], cluster, True)
    assert other.probability == 0.25 and other.expected_regret == pytest.approx(0.75)


def test_the_most_uncertain_measurement_is_named():
    """All of the doubt about the difference is about the all-gather."""
    cluster = cluster_with(gather=[1e-9, 1e-9, 1e-9, 4e-9], reduce=[2e-9] * 4)
    found = trust([candidate("a", gather=5000.0), candidate("b", reduce=5000.0)], cluster, True)
    assert found.measurement is not None
    assert (found.measurement.collective, found.measurement.ranks, found.measurement.rival) == ("all-gather", 4, "b")
    assert found.measurement.share == pytest.approx(1.0) and found.measurement.num_bytes == 5000.0
    assert str(found.measurement) == "all-gather over 4 intra-node ranks, around 4.88 KiB"


def test_uncertainty_that_plans_share_does_not_count():
    """Both gather as much, and what they gather is very uncertain; they differ by what they reduce."""
    cluster = cluster_with(gather=[1e-9, 9e-9, 3e-9], reduce=[1e-9, 1.1e-9, 1.2e-9])
    a, b = candidate("a", gather=1e6, reduce=1e3), candidate("b", gather=1e6, reduce=2e3)
    found = trust([a, b], cluster, True)
    assert found.probability == 1.0 and found.expected_regret == 0.0 and found.measurement is None


def test_equal_plans_leave_the_first_certain():
    cluster = cluster_with(gather=[1e-9, 2e-9])
    found = trust([candidate("a", gather=1e3), candidate("b", gather=1e3)], cluster, True)
    assert found.probability == 1.0 and found.rivals == (("b", 0.0),)


def test_notes_outside_of_what_was_measured():
    cluster = cluster_with(gather=[1e-9])
    usage = Usage(
        {
            ("intra-node", GATHER, 4): (1, 1, 1),
            ("intra-node", GATHER, 2): (1, 1, 1),
            ("intra-node", REDUCE, 4): (1, 1, 1),
        },
        {
            ("intra-node", GATHER, 4): {500.0: 1, 50_000.0: 2},
            ("intra-node", GATHER, 2): {2**20: 1},
            ("intra-node", REDUCE, 4): {5000.0: 1},
        },
    )
    assert outside_notes(usage, cluster) == [
        "all-gather over 2 intra-node ranks is outside the calibrated group sizes (4)",
        "all-gather of 500 B to 1 MiB (intra-node) is outside the calibrated sizes (1000 B to 97.7 KiB)",
        "all-reduce on the intra-node level was not calibrated",
    ]
    assert outside_notes(candidate("a", gather=5000.0).usage, cluster) == []


# ---- On real fits and plans ------------------------------------------------------------------------------------------------------


def odd(collective: Collective, group: int, nbytes: int, job: int) -> float:
    factor = {2: 1.0, 4: 5.0, 8: 2.0}[group] * (1 + list(Collective).index(collective)) * (job / 2)
    return factor * ring(50e-6, 1e-9)(collective, group, nbytes, job)


def exchanged(collective: Collective, group: int, nbytes: int, job: int) -> float:
    factor = 1.5 if group == 2 or collective == Collective.ALL_TO_ALL else 1.0
    return factor * ring(50e-6, 1e-9)(collective, group, nbytes, job)


@pytest.fixture(scope="module", params=["level", "level + exchange", "group + crowding"])
def calibrated(request) -> Cluster:
    seconds = {"level": ring(50e-6, 1e-9), "level + exchange": exchanged, "group + crowding": odd}[request.param]
    fit = fit_samples(samples_of(seconds, noise=0.1, jobs=(2, 4), cores=2, repetitions=10))
    assert request.param == fit.levels[0].form.name or (request.param == "level" and not fit.levels[0].form.by_group)
    return from_document(calibrated_document(fit, load_cluster("local-cpu"), "mine"), "mine").resized(1, 4)


GRAPH = mlp([64, 256, 128, 32])


@pytest.mark.slow
def test_draws_price_plans_as_the_cluster_of_the_draw_does(calibrated):
    """Sums of terms times draws, and the plan assessed anew on the k-th cluster, are the same."""
    workload = Workload(64, 16)
    strategies = {layer.name: data_parallel([4]) for layer in GRAPH.layers}
    usage = usage_of_step(evaluate_unpipelined(chain_of(GRAPH), calibrated, workload, strategies))
    costs = costs_of(usage, calibrated, True)
    for k in (0, 17, 99):
        again = assess(GRAPH, drawn_cluster(calibrated, k), workload, strategies)
        assert costs[k] == pytest.approx(again.communication_s, rel=1e-9)


@pytest.mark.parametrize("size", [2, 4])
def test_draws_scatter_around_the_fit(calibrated, size):
    for collective in Collective:
        step = Step(collective, Axis(size, 1), 2**20)
        drawn = [drawn_cluster(calibrated, k).time(step) for k in range(100)]
        assert np.median(drawn) == pytest.approx(calibrated.time(step), rel=0.05)
        assert np.std(drawn) < 0.2 * calibrated.time(step)


@pytest.mark.parametrize("objective", ["step", "communication"])
def test_a_plan_says_how_sure_it_is(calibrated, objective):
    planned = make_plan(GRAPH, calibrated, Options(batch=64, objective=objective))
    known = trust_of(unpipelined(planned))
    assert known is not None
    names = [name for name, _ in known.trust.rivals]
    assert {"data parallel", "megatron"} <= set(names)
    assert 0 <= known.trust.probability <= 1 and known.trust.expected_regret >= 0
    assert known.trust.probability + sum(p for _, p in known.trust.rivals) == pytest.approx(1)
    # Well measured: the chosen plan loses next to nothing.
    assert known.trust.expected_regret < 0.02
    document = trust_document(known)
    assert document is not None and document["draws"] == 100
    assert trust_section(known)[0] == "Trust" and "10 samples" not in trust_section(known)[1]


def test_a_pipeline_says_how_sure_it_is_beside_the_families(calibrated):
    """Its rivals are the best plans of the families that have one; what a plan says is as in its text."""
    options = JointOptions(Options(batch=8, micro_batch=1, time_limit_s=5.0))
    found = plan_jointly(mlp([256, 256, 256, 256]), calibrated, options)
    known = trust_of(found)
    assert known is not None and found.evaluation.has_pipeline
    assert {name for name, _ in known.trust.rivals} == {one.name for one in found.rivals if one.infeasible is None}
    assert known.trust.probability + sum(p for _, p in known.trust.rivals) == pytest.approx(1)
    assert "\nTrust\n" in str(plan_text(found, known))
    document = json.loads(json.dumps(plan_document(found, known)))
    assert document["trust"]["probability"] == known.trust.probability
    assert plan_from_document(Fields(document, "plan"), "plan").is_claimed
    with pytest.raises(UserError, match="trust is null, but its cluster is calibrated"):
        plan_from_document(Fields(sealed({**document, "trust": None}), "plan"), "plan")


def test_after_a_stop_the_plan_is_compared_with_its_baselines_alone(calibrated):
    found, stop = unpipelined(make_plan(GRAPH, calibrated, Options(batch=64))), Stop()
    stop.request()
    known = trust_of(found, stop)
    assert known is not None
    assert {name for name, _ in known.trust.rivals} == {one.name for one in found.rivals if one.infeasible is None}


def test_no_trust_without_calibration():
    planned = make_plan(GRAPH, load_cluster("local-cpu"), Options(batch=64))
    assert trust_of(unpipelined(planned)) is None and trust_document(None) is None
