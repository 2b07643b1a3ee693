"""A lower bound on the step by the most loaded worker: the least over all cuts of the largest load of a worker.

The cuts have whole units, so this bound is sharp where units are few or very unequal.  Let worker w hold the stages s(1) < s(2) <
... and run n(k) micro-batches through s(k), and let F(s) and B(s) be the seconds of one forward and one backward pass through stage
s.  Before the worker's first task a micro-batch passes forward through all stages before s(1), and after its last task a gradient
passes backward through them.  So a step takes at least

    load(w)  =  sum over t < s(1) of (F(t) + B(t))  +  sum over k of n(k) (F(s(k)) + B(s(k)))

:mod:`.bounds` says for which schedules the first sum counts.  The costs of arcs are those of their units (:mod:`.cut_graph`).
There are two methods:

-   *Each worker has one stage.*  Consider all cuts of the units i, i + 1, ... into the stages s, s + 1, ..., and the loads of these
    stages' workers without fill and drain through earlier stages.  Let g(s, i) be the least largest load.  Then

        g(s, i)  =  min over j of max( n (F + B) of stage s with the units i to j - 1,  F + B of this stage + g(s + 1, j) )

    Each arc counts with the price of memory at which it costs the most.
-   *Workers have several stages.*  Partial cuts are extended by a stage at a time, all of them together, each with the loads of all
    workers.  A partial cut is dropped if a load is above the threshold, or if the remaining time of all workers together is too
    little for the remaining units.  Loads are rounded down to a grid, so that many partial cuts become equal.
"""

from __future__ import annotations

import math

import numpy as np

from .bounds import fill_and_drain, worker_loads
from .cut_graph import Bound, CutGraph
from .cut_regions import bottleneck_cut
from .unit_bounds import ROUNDING

__all__ = ["bottleneck_bound"]

#: Largest number of partial cuts of a stage; with more the search is given up.
_MAX_PARTIAL_CUTS = 20_000
#: Number of grid steps between 0 and the threshold to which loads are rounded down.
_GRID_STEPS = 4000


def bottleneck_bound(cut_graph: CutGraph, threshold: float) -> float:
    """Return a lower bound on the step of all plans of a setting, by the largest load of a worker.

    Args:
        cut_graph: The cut graph of the setting.
        threshold: The bound is of use if it reaches this many seconds.

    Returns:
        The bound [s]; 0 if the threshold is infinite.  If workers have several stages, it is either ``threshold`` or 0.
    """
    if math.isinf(threshold):
        return 0.0
    if cut_graph.has_one_stage_per_worker:
        return _least_largest_load(cut_graph, threshold)
    return threshold if _exceeds_on_all_cuts(cut_graph, threshold) else 0.0


def _least_largest_load(cut_graph: CutGraph, step_s: float) -> float:
    """Return the least over all cuts of the largest load, if each worker has one stage; ``step_s`` scales the prices of memory."""
    spec = cut_graph.setting.schedule
    weights = np.maximum.reduce(worker_loads(spec))
    own = cut_graph.arc_costs(Bound(weights, cut_graph.price_grid(weights, step_s)))
    if not spec.synchronous:
        return bottleneck_cut(own)[0]
    through = fill_and_drain(spec)
    passing = cut_graph.arc_costs(Bound(through, cut_graph.price_grid(through, step_s / spec.num_micro_batches)))
    # g(s, .), from the last stage to the first.
    least = own[-1][:, -1]
    for own_cost, passing_cost in zip(own[-2::-1], passing[-2::-1]):
        least = np.maximum(own_cost, passing_cost + least).min(axis=1)
    return float(least[0])


def _exceeds_on_all_cuts(cut_graph: CutGraph, threshold: float) -> bool:
    """Return whether every cut has a worker whose load is above the threshold; False also if there are too many partial cuts."""
    spec, stages, terms = cut_graph.setting.schedule, cut_graph.num_stages, cut_graph.terms
    # Micro-batches of each worker at each stage; the first stage and the devices of each worker.
    counts = np.array([load[terms.forward] for load in worker_loads(spec) if load.any()])
    first_stages = (counts > 0).argmax(axis=1)
    devices = np.array(cut_graph.setting.widths, dtype=float)[first_stages]
    # Seconds of all passes of one micro-batch through a stage, and those of fill and drain.
    once = np.zeros(terms.count)
    once[terms.forward] = once[terms.recompute] = 1.0
    once[terms.backward] = [spec.backward_passes(stage) for stage in range(stages)]
    arcs = cut_graph.arc_costs(Bound(once))
    passing = [np.zeros_like(arc) for arc in arcs]
    if spec.synchronous:
        passing = cut_graph.arc_costs(Bound(fill_and_drain(spec)))
    # Least seconds times devices of the units from each one on, at any stages.
    units = cut_graph.cheapest_units(once, np.zeros(stages))
    if units is None:
        return True
    least = (units[0] * (devices @ counts)[:, None]).min(axis=0)
    rest = np.append(np.cumsum(least[::-1])[::-1], 0.0) * ROUNDING
    grid = threshold / _GRID_STEPS
    # Partial cuts: the unit behind the last one, the load of each worker, and the seconds of fill and drain.
    ends, loads, passed = np.zeros(1, dtype=np.intp), np.zeros((1, len(counts))), np.zeros(1)
    for stage in range(stages):
        if len(ends) > _MAX_PARTIAL_CUTS:
            return False
        # Extend each partial cut by each arc, as long as no load of the stage's workers is above the threshold.
        holders = np.flatnonzero(counts[:, stage])
        added = arcs[stage][ends][:, :, None] * counts[holders, stage]
        added += passed[:, None, None] * (first_stages[holders] == stage)
        partial, stop = np.nonzero((loads[:, None, holders] + added <= threshold).all(axis=2))
        extended = loads[partial]
        extended[:, holders] = np.floor((extended[:, holders] + added[partial, stop]) / grid) * grid
        # Behind the last worker's first stage fill and drain do not matter any more.
        is_filling = stage < first_stages.max()
        passed = passed[partial] + passing[stage][ends[partial], stop] if is_filling else np.zeros(len(stop))
        # Drop those that leave too little time for the remaining units; merge equal ones.
        on_grid = np.column_stack([stop, np.round(extended / grid), np.floor(passed / grid)])
        on_grid = np.unique(on_grid[(threshold - extended) @ devices >= rest[stop]].astype(np.int64), axis=0)
        if not len(on_grid):
            return True
        ends, loads, passed = on_grid[:, 0], on_grid[:, 1:-1] * grid, on_grid[:, -1] * grid
    return False
