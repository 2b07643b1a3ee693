"""Longest paths equal the simulated makespan, bounds are below it, and memory demands are those of generated schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.generators import GeneratorError
from autoddl.pipelines.joint.arc_rows import load_rows
from autoddl.pipelines.joint.bottleneck_bound import bottleneck_bound
from autoddl.pipelines.joint.bounds import (
    Bound,
    balance_weights,
    homes,
    least_over_cuts,
    micro_batches_per_pipeline,
    worker_loads,
    worker_paths,
)
from autoddl.pipelines.joint.capacity_bound import capacity_bound
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.joint.cut_graph import MEMORY_PRICES, CutGraph
from autoddl.pipelines.joint.cut_regions import impossible_arcs
from autoddl.pipelines.joint.explorer import Explorer
from autoddl.pipelines.joint.memory_demand import approximate_demand_of, demand_of_schedule, memory_demand_of
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.space import schedules
from autoddl.pipelines.joint.unit_runs import UnitRuns, runs_of
from autoddl.pipelines.schedule import Kind, Schedule
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.stepgraph import StepGraph, Terms
from autoddl.pipelines.times import Times
from autoddl.zoo import Transformer, gpt

SIZES = [(2, 1), (2, 5), (3, 7), (4, 4), (4, 9), (4, 24), (8, 16)]


def every_schedule(
    depth: int, count: int, stale: bool = False, again: bool = False, widths: tuple[int, ...] | int = 2
) -> Iterator[tuple[PipelineSchedule, Schedule]]:
    """Yield every schedule that exists; with ``again``, with tasks that recompute every stage."""
    for spec in schedules(depth, count, 64, stale, isinstance(widths, int)):
        try:
            yield spec, spec.schedule(widths, (again,) * spec.num_stages)
        except GeneratorError:
            continue


def random_times(dice: np.random.Generator, num_stages: int, again: bool) -> np.ndarray:
    """Return random seconds of every term, some of them 0, in the order of `Terms`."""
    times = dice.exponential(1.0, Terms(num_stages).count) * dice.integers(0, 4, Terms(num_stages).count)
    if not again:
        times[Terms(num_stages).recompute] = 0.0
    return times


def makespan(spec: PipelineSchedule, schedule: Schedule, times: np.ndarray) -> float:
    """Return the makespan by the simulator."""
    terms, num_stages = Terms(spec.num_stages), spec.num_stages
    backward = times[terms.backward]
    return simulate(
        schedule,
        Times.of(
            num_stages,
            forward=times[terms.forward].tolist(),
            backward=[spec.backward_passes(s) * one for s, one in enumerate(backward.tolist())],
            backward_input=[spec.input_passes(s) * one for s, one in enumerate(backward.tolist())],
            recompute=times[terms.recompute].tolist(),
            all_reduce=times[terms.all_reduce].tolist(),
            transfer=times[terms.transfer_forward].tolist(),
            transfer_backward=times[terms.transfer_backward].tolist(),
        ),
    ).makespan


def graph_of(spec: PipelineSchedule, schedule: Schedule) -> StepGraph:
    stages = range(spec.num_stages)
    return StepGraph(schedule, [spec.backward_passes(s) for s in stages], [spec.input_passes(s) for s in stages])


# ---- Long paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "count"), SIZES)
@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_step_is_its_longest_path(depth: int, count: int, again: bool, seed: int) -> None:
    """The makespan is the path's counts times its times; at other times the path is a lower bound."""
    dice, compared = np.random.default_rng(seed), 0
    for spec, schedule in every_schedule(depth, count, again=again):
        graph = graph_of(spec, schedule)
        times = np.array([random_times(dice, spec.num_stages, again) for _ in range(3)])
        truth = np.array([makespan(spec, schedule, one) for one in times])
        assert graph.steps(times.T) == pytest.approx(truth, rel=1e-9), spec
        paths = []
        for one, expected in zip(times, truth.tolist()):
            step, path = graph.step(one)
            assert step == pytest.approx(expected, rel=1e-9) and path @ one == pytest.approx(expected, rel=1e-9), spec
            assert (path >= 0).all()
            paths.append(path)
            graph._is_wide = not graph._is_wide  # node by node, or level by level
            assert graph.step(one)[0] == step and (graph.step(one)[1] == path).all(), spec
        for together in (times, np.tile(times, (20, 1))):  # one after the other, or at once
            for number, (step, path) in enumerate(graph.longest_paths(together)):
                assert step == graph.step(together[number])[0] and (path == paths[number % len(paths)]).all(), spec
        assert (np.array(paths) @ times.T <= truth * (1 + 1e-9) + 1e-12).all(), spec
        compared += 1
    assert compared >= 5


def test_tasks_that_recompute_change_nothing_where_they_take_no_time() -> None:
    """Searches keep one graph for stages that are recomputed and others."""
    dice = np.random.default_rng(0)
    for (spec, plain), (_, again) in zip(every_schedule(4, 9), every_schedule(4, 9, again=True), strict=True):
        times = random_times(dice, spec.num_stages, again=False)
        assert graph_of(spec, again).step(times)[0] == pytest.approx(makespan(spec, plain, times), rel=1e-9), spec


@pytest.mark.parametrize(("depth", "count"), SIZES)
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_reductions_on_all_workers_take_no_longer_than_updates(depth: int, count: int, seed: int) -> None:
    """Searches use the graph of equal workers for workers of unequal widths, some of which reduce no gradients."""
    dice, compared = np.random.default_rng(seed), 0
    widths = tuple(dice.integers(1, 3, depth).tolist())
    for spec, schedule in every_schedule(depth, count, widths=widths):
        own, simpler = graph_of(spec, schedule), graph_of(spec, spec.schedule(max(widths), (False,) * spec.num_stages))
        times = np.array([random_times(dice, spec.num_stages, again=False) for _ in range(5)])
        assert (simpler.steps(times.T) <= own.steps(times.T) * (1 + 1e-9)).all(), spec
        compared += 1
    assert compared >= 5


def test_the_longest_path_of_even_1f1b_by_hand() -> None:
    """Each worker: N F + N B; the first stage's fill and drain are those of the D - 1 others: (6 + 3)(1 + 2) = 27."""
    spec = next(spec for spec, _ in every_schedule(4, 6) if spec.label == "1f1b (A)")
    terms, times = Terms(4), np.zeros(Terms(4).count)
    times[terms.forward], times[terms.backward] = 1.0, 2.0
    step, path = graph_of(spec, spec.schedule(1, (False,) * 4)).step(times)
    assert step == 27.0 and path[terms.forward].sum() == path[terms.backward].sum() == 9.0
    # The all-reduce of the first stage, which goes back last, is hidden by nothing.
    times[terms.all_reduce.start] = 5.0
    assert graph_of(spec, spec.schedule(2, (False,) * 4)).step(times)[0] == 32.0


# ---- Bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "count"), SIZES)
@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@settings(max_examples=4, deadline=None)
@example(seed=361069, equal=True)  # a worker's last task is half a backward pass, and so is what follows it
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_first_bounds_are_below_the_simulation(depth: int, count: int, again: bool, seed: int, equal: bool) -> None:
    dice = np.random.default_rng(seed)
    devices = (2,) * depth if equal else tuple(dice.integers(1, 5, depth).tolist())
    compared = 0
    for spec, schedule in every_schedule(depth, count, again=again, widths=2 if equal else devices):
        widths = [devices[spec.worker_of(stage)] for stage in range(spec.num_stages)]
        for _ in range(3):
            times = random_times(dice, spec.num_stages, again)
            most = makespan(spec, schedule, times) * (1 + 1e-9)
            for bound in (balance_weights(spec, widths), *worker_loads(spec), *worker_paths(spec)):
                assert (bound >= 0).all() and bound @ times <= most, spec
        compared += 1
    assert compared >= 5


def test_the_balance_of_even_1f1b_by_hand() -> None:
    """Every stage counts 1 / (1 - (5/6)^4) = 1296/671 times: of 4 stages of 1 + 2 that makes 12 * 1296/671 = 23.18 of 27."""
    spec = next(spec for spec, _ in every_schedule(4, 6) if spec.label == "1f1b (A)")
    terms, times = Terms(4), np.zeros(Terms(4).count)
    times[terms.forward], times[terms.backward] = 1.0, 2.0
    assert balance_weights(spec, (2,) * 4) @ times == pytest.approx(12 * 1296 / 671)
    assert balance_weights(spec, (2,) * 4)[terms.forward].tolist() == pytest.approx([1296 / 671] * 4)
    assert [load @ times for load in worker_loads(spec)] == [18.0] * 4
    # Devices 1, 3, 2, 2: shares of 2/6, (2 - 1/3)/6 = 5/18 and (3 - 11/18)/6 = 43/108 from the last one on, where (1 - 109/108)/6
    # is below 0; the first stage counts where it is on the way alone.  Of 109/108 in all.
    assert balance_weights(spec, (1, 3, 2, 2))[terms.forward].tolist() == pytest.approx(
        [1, 324 / 109, 216 / 109, 216 / 109]
    )


class _Units:
    """A cut graph whose units only have forward passes, of given seconds at each stage; shape (stages, units)."""

    limit_bytes = 1.0

    def __init__(self, spec: PipelineSchedule, forward: np.ndarray):
        self.forward = forward
        self.num_stages, self.num_units = forward.shape
        self.terms = Terms(self.num_stages)
        self.setting = SimpleNamespace(schedule=spec, widths=(1,) * self.num_stages)
        self.demand = SimpleNamespace(homes=homes(spec.num_workers, spec.groups, spec.num_pipelines))
        self.has_one_stage_per_worker = spec.num_workers == spec.num_stages and spec.num_pipelines == 1

    @property
    def runs(self) -> UnitRuns:
        kinds = np.unique(self.forward, axis=1, return_inverse=True)[1].ravel().tolist()
        return runs_of(kinds, np.zeros((self.num_stages - 1, self.num_units + 1)))

    def price_grid(self, weights: np.ndarray, step_s: float) -> tuple[np.ndarray, ...]:
        return (np.zeros(self.num_stages),)

    def least_of_units(self, weights: np.ndarray, price: np.ndarray) -> np.ndarray:
        least = weights[self.terms.forward][:, None] * self.forward
        return np.broadcast_to(least, (*price.shape, self.num_units))

    def least_transfers_at(self, boundary: int) -> np.ndarray:
        return np.zeros(self.num_units + 1)

    def least_load(self) -> float:
        """Return the least over all cuts, enumerated, of the largest load of a worker with fill and drain."""
        paths = [path[self.terms.forward] for path in worker_paths(self.setting.schedule)]
        loads = []
        for inner in combinations(range(1, self.num_units), self.num_stages - 1):
            ends = (0, *inner, self.num_units)
            times = np.array([self.forward[s, ends[s] : ends[s + 1]].sum() for s in range(self.num_stages)])
            loads.append(max(float(path @ times) for path in paths))
        return min(loads)

    def arc_costs(self, bound: Bound) -> list[np.ndarray]:
        sums = np.concatenate([np.zeros((self.num_stages, 1)), np.cumsum(self.forward, axis=1)], axis=1)
        found = []
        for stage, (weight, line) in enumerate(zip(bound.weights[self.terms.forward], sums)):
            arc = weight * (line[None, :] - line[:, None])
            arc[impossible_arcs(stage, self.num_stages, self.num_units)] = np.inf
            found.append(arc)
        return found


@pytest.mark.parametrize(("depth", "count"), [(2, 1), (2, 5), (3, 4), (4, 8)])
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_the_level_of_all_cuts(depth: int, count: int, seed: int, further: int) -> None:
    """It is the least over all cuts, enumerated, of the largest load of a worker with fill and drain."""
    dice, compared = np.random.default_rng(seed), 0
    for spec, _ in every_schedule(depth, count):
        forward = dice.integers(1, 9, (spec.num_stages, spec.num_stages + further)).astype(float)
        cut_graph = _Units(spec, forward)
        if not cut_graph.has_one_stage_per_worker:
            continue
        least = cut_graph.least_load()
        assert bottleneck_bound(cut_graph, least) == pytest.approx(least, rel=1e-12), spec
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize(("depth", "count"), [(2, 1), (2, 5), (3, 4), (4, 8)])
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_capacities_are_below_all_cuts(depth: int, count: int, seed: int, further: int) -> None:
    """No cut, of all enumerated, has a largest load of a worker, with fill and drain, below the bound."""
    dice, compared = np.random.default_rng(seed), 0
    for spec, _ in every_schedule(depth, count):
        num_units = min(spec.num_stages + further, 12)
        if num_units < spec.num_stages + 2:
            continue
        forward = dice.integers(1, 9, (spec.num_stages, num_units)).astype(float)
        forward[:, 2:-1] = forward[:, 1:2]  # equal units between the first and the last one
        cut_graph = _Units(spec, forward)
        if cut_graph.has_one_stage_per_worker:
            continue
        least = cut_graph.least_load()
        assert capacity_bound(cut_graph, 2 * least) <= least * (1 + 1e-9), spec
        compared += 1
    assert compared


def test_the_capacities_of_two_workers_by_hand() -> None:
    """9 units of 1 s and 4 micro-batches; worker 0 has the stages 0 and 2, and so the first unit, worker 1 has the last one.

    Of the 7 units between them, 4 on worker 0 take it 4 (1 + 4) = 20 s; the 3 others, the last one, and the unit that the first
    micro-batch passes before, take worker 1 4 (1 + 3) + 1 = 17 s.  3 and 4 take 16 and 21 s.  So a step takes 20 s at least.
    Divided units would take 18.5 s: 3.625 on worker 0, and 3.375 on worker 1.
    """
    spec = PipelineSchedule("grouped-gpipe", 2, 4, (("groups", 2),), groups=2)
    assert spec.num_stages == 4
    cut_graph = _Units(spec, np.ones((4, 9)))
    assert capacity_bound(cut_graph, 100.0) == pytest.approx(20.0, rel=1e-5)
    assert capacity_bound(cut_graph, 19.0) == 19.0
    # Chimera: both workers compute all stages, so that the bound is the work of all: (4 / 2) 9.
    chimera = PipelineSchedule("chimera", 2, 4, (("concatenation", "direct"), ("num_pipelines", 2)), num_pipelines=2)
    both = _Units(chimera, np.ones((2, 9)))
    assert capacity_bound(both, 100.0) == pytest.approx(18.0, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 4))
def test_the_least_of_all_cuts(seed: int, stages: int, further: int) -> None:
    dice, units = np.random.default_rng(seed), stages + further
    # Units that need less than their share of memory have negative costs.
    of_units = dice.normal(1.0, 1.0, (stages, units))
    after = dice.exponential(1.0, (stages - 1, units + 1))
    costs = []
    for places in combinations(range(1, units), stages - 1):
        ends = [0, *places, units]
        inside = sum(of_units[s, ends[s] : ends[s + 1]].sum() for s in range(stages))
        costs.append(inside + sum(after[s, place] for s, place in enumerate(places)))
    assert least_over_cuts(of_units, after) == pytest.approx(min(costs), rel=1e-9, abs=1e-12)


# ---- What schedules ask of their stages --------------------------------------------------------------------------------


def most_running(spec: PipelineSchedule) -> tuple[float, ...]:
    """Per stage the most micro-batches whose activations are alive at a time, if all stages are recomputed as a whole."""
    found = [0.0] * spec.num_stages
    for tasks in spec.schedule(2, (True,) * spec.num_stages).workers:
        alive = dict.fromkeys(((task.pipeline, task.stage) for task in tasks), 0.0)
        for task in tasks:
            key, size = (task.pipeline, task.stage), task.part.size
            if task.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                found[task.stage] = max(found[task.stage], alive[key] + size)
            alive[key] += size * (task.kind is Kind.RECOMPUTE)
            alive[key] -= size * (task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
    return tuple(found)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_needs_are_those_of_the_generated_schedule(depth: int) -> None:
    compared = 0
    for count in (1, 5, 24, 70):
        for spec, schedule in every_schedule(depth, count, stale=True):
            expected = replace(demand_of_schedule(schedule), running=most_running(spec))
            assert memory_demand_of(spec) == expected, spec
            compared += 1
    assert compared > 25


@pytest.mark.parametrize("depth", [6, 8, 12])
def test_needs_of_chimera_with_many_stages(depth: int) -> None:
    compared = 0
    for count in (1, depth - 1, depth, 2 * depth + 1, 5 * depth + 3):
        for spec, schedule in every_schedule(depth, count):
            if spec.name == "chimera":
                assert memory_demand_of(spec) == demand_of_schedule(schedule), spec
                compared += 1
    assert compared > 7


@pytest.mark.parametrize("depth", [2, 3, 4, 8])
def test_approximate_needs_are_near_the_exact_ones(depth: int) -> None:
    """Without generating a schedule; those with a formula are exact."""
    for count in (1, 5, 24, 70):
        for spec, _ in every_schedule(depth, count):
            near, exact = approximate_demand_of(spec), memory_demand_of(spec)
            assert near.homes == exact.homes, spec
            assert 0.5 <= sum(near.in_flight) / sum(exact.in_flight) < 2, spec
            if spec.name != "interleaved-1f1b":
                assert near == exact, spec


def test_pipelines_get_the_micro_batches_of_the_generated_schedule() -> None:
    for depth, count in ((2, 3), (4, 6), (4, 9), (8, 21)):
        for spec, schedule in every_schedule(depth, count):
            of_workers = homes(depth, spec.groups, spec.num_pipelines)
            assert list(of_workers) == [schedule.stages_on(worker) for worker in range(depth)], spec
            if spec.num_pipelines > 1:
                forwards = [
                    task for tasks in schedule.workers for task in tasks if task.kind.letter == "F" and task.stage == 0
                ]
                done = [sum(t.part.size for t in forwards if t.pipeline == p) for p in range(spec.num_pipelines)]
                assert done == list(micro_batches_per_pipeline(depth, count, spec.num_pipelines)), spec


@pytest.mark.parametrize("is_tight", (False, True))
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_an_arc_costs_no_more_than_any_way_to_run_its_stage(is_tight: bool, seed: int) -> None:
    """For a bound with several prices of memory and all ways of recomputation, where each worker has one stage."""
    dice = np.random.default_rng(seed)
    chain, cluster = chain_of(gpt(Transformer("small", 4, 64, 4, 8, 128))), load_cluster("dgx-a100").resized(1, 4)
    explorer = Explorer(chain, cluster, Workload(8, 8, "mixed", "adam"), np.inf)
    offered = [one for one in explorer.settings(None, False, lambda spec: spec.name == "1f1b" and spec.num_workers > 1)]
    setting = offered[dice.integers(len(offered))]
    demand = explorer.memory_demand(setting.schedule)
    assert demand is not None
    # The limit is between one and three times what the neediest unit needs at least.
    graph = CutGraph(explorer, setting, explorer.recomputations, demand)
    least_bytes = [
        min(one.least_memory(first, first + 1, recompute, passes, demand) for recompute in graph.recomputations)
        for one, passes, demand in zip(graph.stage_searches, graph.passes, graph.stage_demands)
        for first in range(chain.num_units)
    ]
    # Fewer samples than devices do not divide over any strategy of some layer.
    assume(np.isfinite(max(least_bytes)))
    explorer.limit_bytes = max(least_bytes) * float(dice.uniform(1.0, 3.0))
    graph = CutGraph(explorer, setting, explorer.recomputations, demand)
    graph.is_tight = is_tight
    weights = dice.exponential(1.0, graph.terms.count)
    price = dice.exponential(1.0, graph.num_stages) / graph.limit_bytes
    bound = Bound(weights, tuple(part * price for part in (0.0, *MEMORY_PRICES)))
    compared = 0
    for stage, costs in enumerate(graph.arc_costs(bound)):
        for first, stop in zip(*np.nonzero(np.isfinite(costs))):
            arc = load_rows(graph, stage, int(first), int(stop), (), has_sides=False)
            own = np.column_stack([weights[part] for part in graph.terms.of_stages])[stage]
            seconds = arc.rows.times @ own
            if arc.rows.shared.shape[1]:  # of the embeddings, which the first and the last stage share
                seconds = seconds + own[3] * graph.exchange[1] * arc.rows.shared.sum(axis=1)
            least = float(seconds.min(initial=np.inf))
            after = weights[graph.terms.transfer_forward] + weights[graph.terms.transfer_backward]
            if stage < graph.num_stages - 1:
                least += float(after[stage]) * graph.least_transfer(stage, int(stop))
            assert costs[first, stop] <= least * (1 + 1e-9)
            compared += len(arc.rows) > 0
    assert compared
