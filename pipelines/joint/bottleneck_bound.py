"""A lower bound on the step by the most loaded worker: the least over all cuts of the largest load of a worker.

The cuts have whole units, so this bound is sharp where units are few or very unequal.  It is for schedules in which each worker has
one stage.  Let worker s run n micro-batches through stage s, and let F(s) and B(s) be the seconds of one forward and one backward
pass.  Before the worker's first task a micro-batch passes forward through all stages before s, and after its last task a gradient
passes backward through them.  So a step takes at least

    load(s)  =  sum over t < s of (F(t) + B(t))  +  n (F(s) + B(s))

:mod:`.bounds` says for which schedules the first sum counts.  The costs of arcs are those of their units (:mod:`.cut_graph`), each
at the price of memory at which it costs the most.  Consider all cuts of the units i, i + 1, ... into the stages s, s + 1, ..., and
the loads of these stages' workers without fill and drain through earlier stages.  Let g(s, i) be the least largest load.  Then

    g(s, i)  =  min over j of max( n (F + B) of stage s with the units i to j - 1,  F + B of this stage + g(s + 1, j) )

Where workers have several stages, the integer program of a setting has their loads among its bounds (:mod:`.cut_program`).
"""

from __future__ import annotations

import numpy as np

from .bounds import Bound, fill_and_drain, worker_loads
from .cut_graph import CutGraph
from .cut_regions import bottleneck_cut

__all__ = ["bottleneck_bound"]


def bottleneck_bound(cut_graph: CutGraph, step_s: float, is_memory_free: bool = False) -> float:
    """Return a lower bound on the step of all plans of a setting, by the largest load of a worker.

    Args:
        cut_graph: The cut graph of the setting, in which each worker has one stage.
        step_s: Seconds that a step takes, approximately, to scale the prices of memory.
        is_memory_free: Whether memory has no price, so that ways to recompute do not matter.

    Returns:
        The bound [s].
    """
    spec = cut_graph.setting.schedule
    num_prices = 1 if is_memory_free else None
    weights = np.maximum.reduce(worker_loads(spec))
    own = cut_graph.arc_costs(Bound(weights, cut_graph.price_grid(weights, step_s)[:num_prices]))
    if not spec.synchronous:
        return bottleneck_cut(own)[0]
    through = fill_and_drain(spec)
    grid = cut_graph.price_grid(through, step_s / spec.num_micro_batches)
    passing = cut_graph.arc_costs(Bound(through, grid[:num_prices]))
    # g(s, .), from the last stage to the first.
    least = own[-1][:, -1]
    for own_cost, passing_cost in zip(own[-2::-1], passing[-2::-1]):
        least = np.maximum(own_cost, passing_cost + least).min(axis=1)
    return float(least[0])
