"""The cut whose most loaded worker has the least to do, of whole units: a lower bound where units are few or very unequal.

A worker with the stages s(1) < s(2) < ... puts n(k) micro-batches through s(k).  Before its first task one has come through all
stages before s(1), and behind its last one a gradient goes back through them:

    load(w) = sum over t < s(1) of (F(t) + B(t))  +  sum over k of n(k) (F(s(k)) + B(s(k)))

which is how long a step takes at least (see :mod:`.bounds` for schedules where the way in or back does not count).  Both functions
build cuts stage by stage from arcs, which take what their units do, redistributions for nothing.

-   *Where each worker has one stage* the least over all cuts of the greatest load has optimal substructure: from the last stage
    back, g(s, i) = min over j of max(load of the units i to j - 1, their way + g(s + 1, j)).  Every arc counts with the price of
    memory that makes it the dearest, in the way of recomputation that is then the cheapest.
-   *Else* all beginnings of cuts are spread at once, a row of loads each.  One is dropped where a worker is above the threshold, or
    where what is left of all workers together is too little for the rest.  Loads are rounded down to a grid, so that many become
    the same.
"""

from __future__ import annotations

import numpy as np

from .bounds import loads, way_in
from .cut_graph import Bound, CutGraph
from .cut_regions import level_cut
from .unit_bounds import ROUNDING

__all__ = ["least_level"]

#: Beginnings of cuts that are held at a time before the search is given up.
_MAX_STATES = 20_000
#: Steps of the grid of loads up to the threshold.
_STEPS = 4000


def least_level(cut_graph: CutGraph, threshold: float) -> float:
    """No plan of a setting is below it [s]; where workers have several stages it is the threshold or 0."""
    if cut_graph.is_alone:
        return _of_single_stages(cut_graph, threshold)
    return threshold if _is_beyond(cut_graph, threshold) else 0.0


def _of_single_stages(cut_graph: CutGraph, threshold: float) -> float:
    spec = cut_graph.setting.schedule
    weights = np.maximum.reduce(loads(spec))
    own = cut_graph.costs(Bound(weights, cut_graph.grid(weights, threshold)))
    if not spec.synchronous:
        return level_cut(own)[0]
    through = way_in(spec)
    ways = cut_graph.costs(Bound(through, cut_graph.grid(through, threshold / spec.num_micro_batches)))
    least = own[-1][:, -1]
    for load, way in zip(own[-2::-1], ways[-2::-1]):
        least = np.maximum(load, way + least).min(axis=1)
    return float(least[0])


def _is_beyond(cut_graph: CutGraph, threshold: float) -> bool:
    """Whether every cut has a worker whose load is above a threshold; False also where that takes too long to find out."""
    spec, stages, terms = cut_graph.setting.schedule, cut_graph.num_stages, cut_graph.terms
    counts = np.array([load[terms.forward] for load in loads(spec) if load.any()])
    first_stages = (counts > 0).argmax(axis=1)
    devices = np.array(cut_graph.setting.widths, dtype=float)[first_stages]
    once = np.zeros(terms.count)
    once[terms.forward] = once[terms.recompute] = 1.0
    once[terms.backward] = [spec.backward_passes(stage) for stage in range(stages)]
    arcs = cut_graph.costs(Bound(once))
    ways = cut_graph.costs(Bound(way_in(spec))) if spec.synchronous else [np.zeros_like(arc) for arc in arcs]
    # Device seconds of the units from each one on, wherever they are.
    of_units = cut_graph.cheapest(once, np.zeros(stages))
    if of_units is None:
        return True
    least = (of_units[0] * (devices @ counts)[:, None]).min(axis=0)
    rest = np.append(np.cumsum(least[::-1])[::-1], 0.0) * ROUNDING
    grid = threshold / _STEPS
    ends, sums, way = np.zeros(1, dtype=np.intp), np.zeros((1, len(counts))), np.zeros(1)
    for stage in range(stages):
        if len(ends) > _MAX_STATES:
            return False
        holders = np.flatnonzero(counts[:, stage])
        added = arcs[stage][ends][:, :, None] * counts[holders, stage]
        added += way[:, None, None] * (first_stages[holders] == stage)
        state, stop = np.nonzero((sums[:, None, holders] + added <= threshold).all(axis=2))
        found = sums[state]
        found[:, holders] = np.floor((found[:, holders] + added[state, stop]) / grid) * grid
        way = way[state] + ways[stage][ends[state], stop] if stage < first_stages.max() else np.zeros(len(stop))
        states = np.column_stack([stop, np.round(found / grid), np.floor(way / grid)])
        states = np.unique(states[(threshold - found) @ devices >= rest[stop]].astype(np.int64), axis=0)
        if not len(states):
            return True
        ends, sums, way = states[:, 0], states[:, 1:-1] * grid, states[:, -1] * grid
    return False
