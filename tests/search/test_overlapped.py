"""Plans whose all-reduces overlap the backward pass, beside all assignments of strategies."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.overlap import OVERLAPS, Exposure, exposed_s
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.strategy import enumerate_strategies
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.result import unpipelined
from autoddl.planfile import load_plan, plan_document, save_plan
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import mlp

GRAPH = mlp([64, 256, 64])
SECONDS = st.floats(0.0, 1e3)


def cluster(bandwidth: float) -> Cluster:
    return load_cluster("gcp-a100").resized(1, 4).with_links(latency_s=1e-7, bandwidth=bandwidth)


def best_of_all(machine: Cluster, batch: int, micro_batch: int) -> float:
    """The shortest step of all assignments, with eight buckets, from times without overlap."""
    workload, best = Workload(batch, micro_batch, "mixed"), math.inf
    names = [layer.name for layer in GRAPH.layers]
    for choice in itertools.product(*(enumerate_strategies(layer, machine.level_sizes) for layer in GRAPH.layers)):
        try:
            layers = assess(GRAPH, machine, workload, dict(zip(names, choice))).layers
        except UserError:
            continue
        forward = sum(one.forward_compute_s + one.forward_communication_s for one in layers)
        backward = sum(one.backward_compute_s + one.backward_communication_s for one in layers)
        all_reduce = sum(one.gradient_communication_s for one in layers)
        exposed = max(all_reduce / 8, all_reduce - backward * 7 / 8)
        update = sum(one.update_s for one in layers)
        best = min(best, batch // micro_batch * (forward + backward) + exposed + update)
    return best


@pytest.mark.parametrize("bandwidth", [2e8, 1e9, 3e9, 1e10, 1e12])
@pytest.mark.parametrize(("batch", "micro_batch"), [(64, 64), (1024, 256)])
def test_the_plan_is_the_best_of_all_or_tells_its_gap(bandwidth: float, batch: int, micro_batch: int, tmp_path) -> None:
    """From links on which no all-reduce is hidden to those on which all are."""
    machine = cluster(bandwidth)
    options = Options(
        batch=batch, micro_batch=micro_batch, precision="mixed", recompute="none", summa=False, overlap="gradients"
    )
    planned, best = make_plan(GRAPH, machine, options), best_of_all(machine, batch, micro_batch)
    assert planned.lower_bound <= best * (1 + 1e-9) and best <= planned.cost * (1 + 1e-9)
    if planned.optimal:
        assert planned.cost == pytest.approx(best, rel=1e-9)
    else:
        assert planned.gap == pytest.approx(1 - planned.lower_bound / planned.cost)
    for row in planned.baselines:
        if row.assessment is not None and row.name != "summa":
            assert row.assessment.step_s >= planned.cost * (1 - 1e-9)
    # The figures are those of a pipeline of one stage, and nothing of the document contradicts itself.
    result = unpipelined(planned)
    assert result.cost == pytest.approx(planned.cost, rel=1e-12)
    save_plan(tmp_path / "plan.json", plan_document(result))
    assert load_plan(tmp_path / "plan.json").evaluation.step_s == pytest.approx(planned.cost, rel=1e-12)


@pytest.mark.parametrize("bandwidth", [1e9, 1e10, 1e12])
def test_what_an_executor_costs_is_counted_with_overlap(bandwidth: float) -> None:
    """The best plan of all strategies is that of a search without the executor, and so is its bound."""
    machine, options = cluster(bandwidth), Options(batch=64, precision="mixed", overlap="gradients", recompute="none")
    restricted = make_plan(GRAPH, machine, replace(options, executor="graph"))
    everything = make_plan(GRAPH, machine, options)
    found = restricted.all_strategies
    assert found is not None and found.cost == pytest.approx(min(everything.cost, restricted.cost), rel=1e-9)
    assert found.lower_bound <= everything.cost * (1 + 1e-9)


def test_most_plans_are_proven() -> None:
    bandwidths = (2e8, 1e9, 3e9, 1e10, 1e12)
    options = Options(batch=64, precision="mixed", overlap="gradients")
    assert sum(make_plan(GRAPH, cluster(bandwidth), options).optimal for bandwidth in bandwidths) >= 3


@given(SECONDS, SECONDS, st.floats(0.0, 1.0), st.sampled_from(OVERLAPS[1:]))
def test_every_mean_bounds_what_is_exposed(all_reduce: float, backward: float, share: float, overlap: str) -> None:
    exposed, mean = exposed_s(all_reduce, backward, overlap), Exposure.at(share)
    assert all_reduce / 8 <= exposed <= all_reduce
    assert mean.gradient * all_reduce - mean.backward * backward <= exposed * (1 + 1e-9) + 1e-9
    exact = Exposure.at(1.0 if all_reduce <= backward else 0.0)
    assert exact.gradient * all_reduce - exact.backward * backward == pytest.approx(exposed)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_table_counts_a_linear_part_of_the_all_reduces(share: float) -> None:
    machine, exposure = cluster(1e9), Exposure.at(share)
    problem = PriceBook(GRAPH, machine, Workload(1, 1, "mixed"), exposure=exposure).problem(64, 16)
    for choice in itertools.product(*(range(0, len(costs), 3) for costs in problem.table.cost)):
        cost = problem.table.evaluate(choice)
        if not math.isfinite(cost):
            continue
        layers = assess(GRAPH, machine, problem.workload, problem.strategies(choice)).layers
        whole = sum(one.communication_s + one.compute_s - one.gradient_communication_s for one in layers)
        all_reduce = sum(one.gradient_communication_s for one in layers)
        backward = sum(one.backward_compute_s + one.backward_communication_s for one in layers)
        assert cost == pytest.approx(whole + exposure.gradient * all_reduce - exposure.backward * backward, rel=1e-9)
