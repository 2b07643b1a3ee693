"""The exact search: the optimum of any table, with a proof.

1. `reduction` merges options with equal edges into classes, and removes dominated options.
2. `elimination` of all variables gives the optimum if the memory limit does not bind.
3. `lagrangian`: otherwise, the dual over a multiplier of memory gives a bound and incumbents.
4. `labels` closes the gap: labels (cost, memory) on the elimination DAG, with growing slack.
5. `branching` treats the largest buffer exactly.
6. `milp`: if the graph is too wide for elimination, HiGHS solves an integer program.

Costs are sums of floats in different orders, so "optimal" means to a relative 1e-9 (`PROOF_TOLERANCE`; labels whose costs
differ by less than 1e-10 in total count as equal).  Memory is exact, in whole bytes.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.stopping import Deadline, Stop
from autoddl.costmodel.table import CostTable

from .branching import Bracket, Exploration, OpenNode, OutOfTimeError, explore, least_memory
from .forest import solve_forest
from .labels import LabelSearch, StoppedError
from .lagrangian import Dual, Instance, PricedAssignment, prepare
from .outcomes import check_limits, impossible, infeasible, unless_stopped, unproven
from .progress import Progress, silent
from .reduction import Domain
from .result import PROOF_TOLERANCE, Result, Status

__all__ = ["exact", "smallest_memory"]

#: The first slack of the label search, relative to the dual bound.
_FIRST_SLACK = 1e-5
#: (number of rows, growth): factor of the slack after a round with at most so many rows, which grow like a high power of it.
_SLACK_GROWTH = ((2_000, 4.0), (50_000, 2.0), (math.inf, 1.5))
#: Largest number of rows of the restricted search for an incumbent.
_FEW_ROWS = 300_000
#: First slack of the full search, relative to the slack that the restricted search reached.
_WHOLE_SLACK = 0.25
#: Relative difference of sums of the same costs in different orders.
_ROUNDING = 1e-12


def exact(
    table: CostTable,
    *,
    memory_limit: float | None = None,
    time_limit: float | None = None,
    cutoff: float = math.inf,
    progress: Progress = silent,
    known: Bracket | None = None,
    stop: Stop | None = None,
) -> Result:
    """Find the choice of least cost within a limit on peak memory, and prove it.

    Args:
        table: the cost table.
        memory_limit: bytes per device; None for no limit.
        time_limit: seconds; at the limit the search ends with a gap (LIMIT_REACHED).
        cutoff: choices that cost this much [s] or more are ignored.  If there is no cheaper one, the status is LIMIT_REACHED and
            the bound is at least the cutoff.
        progress: called with the state of the search.
        known: result of `bracket` for the same table and limit, from which the search continues.
        stop: when it is requested, the search ends with a gap (INTERRUPTED).

    Returns:
        The result.  Its ``evaluations`` counts complete choices whose cost was computed.  Most of the work is on partial choices:
        ``statistics`` has the numbers of ``labels``, ``rows`` and ``rounds``, of ``nodes`` of the branching and of distinct
        elimination tables (``buckets``), and the number of entries of the largest (``largest_bucket``).

    Raises:
        SearchError: a limit is not positive, or the table is invalid.
    """
    start = time.perf_counter()
    check_limits(memory_limit=memory_limit, time_limit=time_limit)
    deadline = Deadline(time_limit, stop)
    choice = solve_forest(table)
    if choice is not None and (memory_limit is None or table.peak_memory(choice) <= memory_limit):
        return _without_limit(table, choice, start, memory_limit)
    instance = (known.instance if known else None) or prepare(table)
    if instance is None:
        return impossible(table, "exact", start, memory_limit)
    if not instance.plan.exact:
        return _by_milp(instance, start, memory_limit, deadline, progress)
    closer = _Closer(instance, memory_limit, deadline)
    found = explore(
        instance,
        memory_limit,
        closer,
        start=known.exploration if known else None,
        deadline=deadline,
        cutoff=cutoff,
        report=lambda cost, bound: progress(cost, bound, closer.evaluations),
    )
    return _finish(instance, found, closer, start, memory_limit, deadline)


def _without_limit(table: CostTable, choice: tuple[int, ...], start: float, memory_limit: float | None) -> Result:
    """The result if the optimum without the limit fits the limit."""
    cost = table.evaluate(choice)
    return Result(
        method="exact",
        status=Status.OPTIMAL,
        choice=choice,
        cost=cost,
        lower_bound=cost,
        memory_bytes=table.peak_memory(choice),
        space_size=table.space_size,
        evaluations=1,
        seconds=time.perf_counter() - start,
        memory_limit_bytes=memory_limit,
    )


def _finish(
    instance: Instance,
    found: Exploration,
    closer: _Closer,
    start: float,
    memory_limit: float | None,
    deadline: Deadline,
) -> Result:
    statistics = {
        "nodes": found.nodes,
        "buckets": instance.plan.num_nodes,
        "largest_bucket": instance.plan.largest_bucket,
        "labels": closer.labels,
        "rows": closer.rows,
        "rounds": closer.rounds,
    }
    best = found.incumbent
    if best is None and found.bound == math.inf:
        smallest = unless_stopped(lambda stop: _least_peak(instance, stop), deadline.stop)
        return infeasible(instance.table, "exact", start, memory_limit, smallest, statistics)
    status = Status.LIMIT_REACHED if found.finished else unproven(deadline)
    return Result(
        method="exact",
        status=Status.OPTIMAL if found.finished and best and best.cost <= found.bound else status,
        choice=best.choice if best else None,
        cost=best.cost if best else math.inf,
        lower_bound=found.bound,
        memory_bytes=best.peak if best else math.nan,
        space_size=instance.table.space_size,
        evaluations=closer.evaluations,
        seconds=time.perf_counter() - start,
        memory_limit_bytes=memory_limit,
        statistics=statistics,
    )


def _least_peak(instance: Instance, stop: Stop) -> float:
    least = least_memory(instance, stop)
    return math.inf if least is None else least.peak


class _Grown(NamedTuple):
    """The outcome of a label search for choices below some cost.

    Attributes:
        best: the best choice; None if none is below the cost.
        bound: a valid lower bound on all its choices; if the search was complete, the cost of the best, or the given cost.
        stopped: whether it reached the deadline or the largest number of labels.
    """

    best: PricedAssignment | None
    bound: float
    stopped: bool


class _Closer:
    """Solves nodes of the branching by label searches, and counts the work.

    A restricted search comes first, over the few options that occur in minimisers of the dual; it finds a good choice quickly.  The
    full search over all options follows.  A choice that fits the relaxation but not the limit is returned as soon as it is found,
    since splitting the node there is better than solving it.
    """

    def __init__(self, instance: Instance, memory_limit: float | None, deadline: Deadline) -> None:
        self.instance, self.deadline = instance, deadline
        self.limit = math.inf if memory_limit is None else memory_limit
        self.labels = self.rows = self.rounds = self.evaluations = 0

    def __call__(self, node: OpenNode, incumbent: float) -> tuple[float, PricedAssignment | None]:
        dual = node.dual
        limit = self.limit - node.interval.lowest
        best = min((point for point in dual.points if point.memory <= limit), key=lambda point: point.cost)
        if best.cost <= dual.bound + _ROUNDING * abs(dual.bound):  # no limit binds, or the dual has no gap
            return best.cost, best
        # No choice of the node costs less than its bound, so smaller slacks find nothing.
        slack = max(_FIRST_SLACK * abs(dual.bound), node.bound - dual.bound)
        cost = min(incumbent, best.cost)
        few = self._grow(self._search(node, self._taken(dual)), slack, cost, most_rows=_FEW_ROWS)
        best = few.best or best
        if few.stopped:
            raise OutOfTimeError(node.bound, best)
        if few.best and few.best.peak > self.limit:
            return node.bound, few.best
        # At the same slack the full search has many times the rows of the restricted one; at a fraction of it, about as many.
        slack = max(slack, _WHOLE_SLACK * (few.bound - dual.bound))
        whole = self._grow(self._search(node), slack, min(cost, best.cost))
        best = whole.best or best
        if whole.stopped:
            raise OutOfTimeError(whole.bound, best)
        return whole.bound, best if best.cost < incumbent else None

    def _taken(self, dual: Dual) -> dict[Domain, np.ndarray]:
        """For each domain, the labels that occur in minimisers of the dual."""
        choices = np.array([point.choice for point in dual.points])
        return {
            domain: np.isin(domain.option, choices[:, variables]) for domain, variables in self.instance.reduced.members
        }

    def _search(self, node: OpenNode, only: dict[Domain, np.ndarray] | None = None) -> LabelSearch:
        limit, dual = self.limit - node.interval.lowest, node.dual
        plan = self.instance.plan
        return LabelSearch(plan, dual.multiplier, dual.bound, limit, node.interval.highest, self.deadline, only)

    def _grow(self, search: LabelSearch, slack: float, cost: float, most_rows: float = math.inf) -> _Grown:
        """Search for the cheapest choice below ``cost`` with growing slack, up to about ``most_rows`` rows."""
        best: PricedAssignment | None = None
        statistics, proven, stopped = search.statistics, 0.0, False
        while True:
            room = cost - search.bound
            if slack * 1.5 >= room:
                slack = room
            rows = statistics.rows
            try:
                labels = search.best_within(slack, room)
            except StoppedError:
                stopped = True
                break
            proven = slack
            if labels is not None:
                self.evaluations += 1
                point = self.instance.point(labels)
                if point.cost < cost:
                    best, cost = point, point.cost
            unfit = best is not None and best.peak > self.limit
            if proven >= cost - search.bound or unfit or statistics.rows > most_rows:
                break
            slack *= next(growth for most, growth in _SLACK_GROWTH if statistics.rows - rows <= most)
        self.labels += statistics.labels
        self.rows += statistics.rows
        self.rounds += statistics.rounds
        return _Grown(best, cost if proven >= cost - search.bound else search.bound + proven, stopped)


def _by_milp(
    instance: Instance, start: float, memory_limit: float | None, deadline: Deadline, progress: Progress
) -> Result:
    """Solve by integer programming; elimination gives only bounds (mini-buckets)."""
    # Imported lazily: loading SciPy's optimizers takes longer than most searches.
    from .milp import milp_least_memory, milp_optimum

    table = instance.table
    relaxed = explore(instance, memory_limit, deadline=Deadline(None, deadline.stop))
    best = relaxed.incumbent.choice if relaxed.incumbent else None
    progress(table.evaluate(best) if best else math.inf, relaxed.bound, 1)
    found = milp_optimum(table, instance.reduced, memory_limit, deadline)
    statistics = {"nodes": found.nodes, "buckets": instance.plan.num_nodes}
    if found.finished and found.choice is None:
        smallest = unless_stopped(lambda stop: milp_least_memory(table, instance.reduced, stop)[0], deadline.stop)
        return infeasible(table, "exact", start, memory_limit, smallest, statistics)
    best = min((choice for choice in (best, found.choice) if choice), key=table.evaluate, default=None)
    cost = table.evaluate(best) if best else math.inf
    bound = cost if found.finished else min(cost, max(relaxed.bound, found.bound))
    return Result(
        method="exact",
        status=Status.OPTIMAL if cost <= bound + PROOF_TOLERANCE * abs(cost) else unproven(deadline),
        choice=best,
        cost=cost,
        lower_bound=bound,
        memory_bytes=table.peak_memory(best) if best else math.nan,
        space_size=table.space_size,
        evaluations=1 + int(found.choice is not None),
        seconds=time.perf_counter() - start,
        memory_limit_bytes=memory_limit,
        statistics=statistics,
    )


def smallest_memory(table: CostTable, stop: Stop | None = None) -> tuple[float, tuple[int, ...] | None]:
    """The least peak memory [bytes] of any choice of finite cost, and such a choice; ``(inf, None)`` if there is none.

    Raises:
        StopRequestedError: the stop was requested before the memory was known.
    """
    stop = stop or Stop()
    instance = prepare(table)
    if instance is None:
        return math.inf, None
    if not instance.plan.exact:
        from .milp import milp_least_memory

        return milp_least_memory(table, instance.reduced, stop)
    point = least_memory(instance, stop)
    return (point.peak, point.choice) if point else (math.inf, None)
