"""A lower bound on the step by the numbers of units that workers can take, for workers with several stages.

The other bounds over all cuts let units be divided.  Whole units take longer where there are few of them for each worker: of 40
equal units on 7 workers, some worker takes 6.  Where each worker has one stage, :mod:`.bottleneck_bound` is sharper still.

Let a plan take T seconds at most.  Of its units count the first one, the last one, and those of the longest run (equal units that
follow each other) between these.  Worker w computes n(w) units of the run at its stages S(w), each of them at least once per
micro-batch.  Before its first task a micro-batch passes through all earlier stages, and after its last one a gradient does
(:func:`.bounds.fill_and_drain`).  So for every price mu >= 0 of a byte, with the memory limit M,

    n(w) k(w, mu)  +  f(w, mu)  +  e(w)  <=  T + mu M                                                                          (1)

    k(w, mu)   least cost of a unit of the run at a stage of S(w): its seconds, weighted by the load of the worker, + mu bytes
    f(w, mu)   least cost of the first unit if S(w) has the first stage, and of the last unit if it has the last stage
    e(w)       seconds to pass the stages before S(w): at least one unit at each of them, and the transfers behind them

The largest integer n(w) that satisfies (1) for all prices is the *capacity* of the worker.  If the capacities of all workers sum to
less than the units of the run, no plan takes T seconds.  The bound is the largest such T, which bisection finds.

Workers with the same stages (of opposite pipelines) count as one, with the mean of their loads.
"""

from __future__ import annotations

import numpy as np

from .bounds import fill_and_drain, worker_loads
from .cut_graph import CutGraph

__all__ = ["capacity_bound"]

#: Number of bisections: T is found to within 2^-30 of the known step.
_NUM_BISECTIONS = 30
#: Part of a unit by which rounding errors may lower a capacity.
_ROUNDING = 1e-6
#: Least cost of a unit [s], in place of 0.
_LEAST_S = 1e-30


def capacity_bound(cut_graph: CutGraph, step_s: float, is_memory_free: bool = False) -> float:
    """Return a lower bound on the step of all plans of a setting, by the numbers of units that its workers can take.

    Args:
        cut_graph: The cut graph of the setting.
        step_s: Seconds that a step takes, approximately, to scale the prices of memory; the bound is no greater.
        is_memory_free: Whether memory has no price, so that ways to recompute do not matter.

    Returns:
        The bound [s]; 0 if some workers have only a part of their stages in common, or if no two units are equal.
    """
    spec, stages = cut_graph.setting.schedule, cut_graph.num_stages
    loads: dict[tuple[int, ...], list[np.ndarray]] = {}  # of the workers of each set of stages
    for homes, load in zip(cut_graph.demand.homes, worker_loads(spec)):
        loads.setdefault(tuple(sorted({stage for _, stage in homes})), []).append(load)
    run = _longest_run(cut_graph)
    if sum(map(len, loads)) > stages or run is None:
        return 0.0
    unit, num_units = run
    weights = np.sum([np.mean(of_set, axis=0) for of_set in loads.values()], axis=0)
    grid = np.array(cut_graph.price_grid(weights, step_s)[: 1 if is_memory_free else None])
    for held in loads:
        grid[:, held] = grid[:, held].mean(axis=1, keepdims=True)  # one price for all stages of a worker
    costs = cut_graph.least_of_units(weights, grid)
    if costs is None:
        return 0.0
    earlier = _seconds_before(cut_graph)
    of_unit = np.maximum([costs[:, held, unit].min(axis=1) for held in loads], _LEAST_S)
    ends = {0: costs[:, 0, 0], stages - 1: costs[:, stages - 1, -1]}
    room = np.array(
        [grid[:, held[0]] * cut_graph.limit_bytes - sum(ends[s] for s in held if s in ends) for held in loads]
    )
    room -= np.array([earlier[held[0]] for held in loads])[:, None]

    def is_possible(seconds: float) -> bool:
        capacities = ((seconds + room) / of_unit).min(axis=1) + _ROUNDING
        return bool((capacities >= 0).all() and np.floor(capacities).sum() >= num_units)

    if not is_possible(step_s):
        return step_s
    low, high = 0.0, step_s
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low


def _longest_run(cut_graph: CutGraph) -> tuple[int, int] | None:
    """The first unit and the number of units of the longest run, without the first and the last unit of the chain; None if it has
    one unit at most."""
    runs = cut_graph.runs
    first = np.maximum(runs.first, 1)
    sizes = np.minimum(runs.first + runs.sizes, cut_graph.num_units - 1) - first
    longest = int(sizes.argmax())
    return None if sizes[longest] < 2 else (int(first[longest]), int(sizes[longest]))


def _seconds_before(cut_graph: CutGraph) -> np.ndarray:
    """The least seconds to pass the stages before each stage, forward and backward, at the beginning and the end of a step; shape
    (stages,)."""
    spec, stages, terms = cut_graph.setting.schedule, cut_graph.num_stages, cut_graph.terms
    before = np.zeros(stages)
    if not spec.synchronous:
        return before
    through = fill_and_drain(spec)
    of_units = cut_graph.least_of_units(through, np.zeros(stages))
    if of_units is None:
        return before
    crossing = through[terms.transfer_forward] + through[terms.transfer_backward]
    for stage in range(stages - 1):
        # The first stage has the first unit; those between the first and the last one have neither the first nor the last unit.
        least = of_units[0, 0] if stage == 0 else of_units[stage, 1:-1].min(initial=np.inf)
        transfer = cut_graph.least_transfers_at(stage)[1:-1].min(initial=np.inf)
        before[stage + 1] = before[stage] + least + crossing[stage] * transfer
    return before
