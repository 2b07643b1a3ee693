"""Plans whose gradients' all-reduces overlap the backward pass.

What such an all-reduce A adds to the step is the greater of two sums over layers (:mod:`autoddl.costmodel.overlap`), so that no
search for the least sum minimises it.  But every mean of the two is a lower bound on the step.  So the least of a mean over all
plans bounds all steps, and the plan at which it is least is a candidate.  The means of :data:`_SHARES` are tried until the step of
a candidate reaches the best bound:

- the first argument alone, A / k, gives the best plan if its all-reduce is hidden but for the last bucket;
- the second alone, A - (1 - 1/k) B, gives it if the all-reduce is longer than the backward pass;
- in between neither needs to, and half of both gives a better bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.overlap import Exposure
from autoddl.costmodel.recomputation import contains, without
from autoddl.costmodel.stopping import StopRequestedError

from . import Status
from .options import Options
from .pricebooks import PriceBooks
from .sweep import NOT_BETTER, NOT_FITTING, SAME, BestPlan, Candidate

__all__ = ["Found", "best_overlapped"]

#: Shares of the first argument; all-reduces are usually shorter than the backward pass.
_SHARES = (1.0, 0.0, 0.5)


@dataclass(frozen=True)
class Found:
    """What a sweep found.

    Attributes:
        best: the best plan.
        others: plans of the space that the search began with.
        lower_bound: a lower bound on all plans [s].
        candidates: how each setting was settled.
        start_fault: why the plan of the user is not in the space; empty if it is.
        evaluations, search_s: number of evaluated assignments, and duration of the searches.
    """

    best: BestPlan
    others: tuple[BestPlan, ...]
    lower_bound: float
    candidates: tuple[Candidate, ...]
    start_fault: str
    evaluations: int
    search_s: float


def best_overlapped(
    graph: LayerGraph, cluster: Cluster, options: Options, sweep: Callable[[PriceBooks], Found]
) -> Found:
    """Find the plan of the shortest step, with all-reduces that overlap the backward pass.

    Args:
        graph, cluster, options: what is planned.
        sweep: sweeps over all settings, with costs that count a linear part of the all-reduces.

    Raises:
        UserError: as ``sweep``.
    """
    # For communication alone the bound with the backward pass would count computation.
    shares = _SHARES if options.objective == "step" else _SHARES[:1]
    sweeps: list[Found] = []
    best, cost, lower = None, math.inf, -math.inf
    for share in shares:
        try:
            found = sweep(PriceBooks(graph, cluster, Exposure.at(share), options.choices))
        except StopRequestedError:
            if best is None:
                raise
            break
        sweeps.append(found)
        for plan in (found.best, *found.others):
            problem, choice = plan.problem, plan.result.choice
            assert choice is not None
            own = assess(graph, cluster, problem.workload, problem.strategies(choice)).cost(options.objective)
            if own < cost:
                best, cost = plan, own
        lower = max(lower, found.lower_bound)
        if lower >= cost * (1 - SAME):
            break
    assert best is not None
    lower = min(lower, cost)
    tightest = max(sweeps, key=lambda one: one.lower_bound)
    is_proven = lower >= cost * (1 - SAME)
    result = replace(
        best.result,
        cost=cost,
        lower_bound=lower,
        status=Status.OPTIMAL if is_proven else Status.LIMIT_REACHED,
    )
    return Found(
        best=replace(best, result=result),
        others=(),
        lower_bound=lower,
        candidates=_settled(tightest.candidates, best, cost),
        start_fault=min((one.start_fault for one in sweeps), key=bool),
        evaluations=sum(one.evaluations for one in sweeps),
        search_s=sum(one.search_s for one in sweeps),
    )


def _settled(candidates: Sequence[Candidate], best: BestPlan, cost: float) -> tuple[Candidate, ...]:
    """The candidates of a sweep with their bounds, and with the cost of the best plan alone: other plans were not assessed."""
    workload = best.problem.workload
    settled = []
    for one in candidates:
        bound = min(one.lower_bound, cost)
        outcome = str(Status.LIMIT_REACHED) if bound < cost * (1 - SAME) else NOT_BETTER
        other = one if one.outcome == NOT_FITTING else replace(one, outcome=outcome, cost=math.inf, lower_bound=bound)
        if one.micro_batch != workload.micro_batch or not contains(one.recompute, workload.recompute):
            settled.append(other)
            continue
        settled += [replace(other, recompute=way) for way in without(one.recompute, workload.recompute)]
        reached = str(Status.LIMIT_REACHED if bound < cost * (1 - SAME) else Status.OPTIMAL)
        settled.append(Candidate(workload.micro_batch, workload.recompute, reached, cost, bound))
    return tuple(settled)
