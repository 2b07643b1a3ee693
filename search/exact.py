"""The optimum of any table, with a proof.

1. `reduction`: options that the rest of the table cannot tell apart become one class; dominated ones go.
2. `elimination`: without a binding limit, eliminating the variables gives the optimum.
3. `lagrangian`: with one, the dual over a multiplier of memory gives a bound and incumbents;
4. `labels` closes the gap exactly: labels (cost, memory) on the elimination DAG, with growing slack;
5. `branching` makes the largest buffer exact.
6. `milp`: where elimination would be too wide, or labels too many, HiGHS solves an integer program.

Costs are sums of floats in different orders, so "optimal" means: to a relative 1e-9 (`PROOF_TOLERANCE`; labels whose costs
differ by less than 1e-10 in total count as equal).  Memory is exact: whole bytes.
"""

from __future__ import annotations

import math
import time

import numpy as np

from autoddl.costmodel.table import CostTable

from .branching import Exploration, OutOfTimeError, explore, least_memory
from .forest import solve_forest
from .labels import LabelSearch, StoppedError
from .lagrangian import Dual, Instance, Interval, Point, prepare
from .progress import Progress, silent
from .reduction import Domain
from .report import check_limits, impossible, infeasible
from .result import PROOF_TOLERANCE, Result, Status

__all__ = ["exact", "smallest_memory"]

#: The first slack of the label search, relative to the dual bound.
_FIRST_SLACK = 1e-5
#: How the slack grows after a round of so many rows; rows grow like a high power of the slack.
_SLACK_GROWTH = ((2_000, 4.0), (50_000, 2.0), (math.inf, 1.5))
#: The rows that looking for an incumbent among few options may make.
_FEW_ROWS = 300_000
#: What sums of the same costs in different order may differ by, relatively.
_ROUNDING = 1e-12


def exact(
    table: CostTable,
    *,
    memory_limit: float | None = None,
    time_limit: float | None = None,
    cutoff: float = math.inf,
    progress: Progress = silent,
    instance: Instance | None = None,
) -> Result:
    """The choice of least cost within the limit on peak memory [bytes], proven.

    Where nothing costs less than ``cutoff`` [s] that is all it finds out (LIMIT_REACHED, with a bound of at least the cutoff).
    With a time limit [s] it may stop before, with the gap (LIMIT_REACHED).  ``evaluations`` counts the complete choices whose
    cost was computed; most of the work is on partial ones (``statistics``: ``labels``, ``rows``; ``buckets`` is the number of
    distinct elimination tables, ``largest_bucket`` the entries of the largest).  ``instance`` is the table as `bracket` made it
    ready, where it did.

    Raises: SearchError, for a limit that is not positive or a table that no search can treat.
    """
    start = time.perf_counter()
    check_limits(memory_limit=memory_limit, time_limit=time_limit)
    choice = solve_forest(table)
    if choice is not None and (memory_limit is None or table.peak_memory(choice) <= memory_limit):
        return _without_limit(table, choice, start, memory_limit)
    instance = instance or prepare(table)
    if instance is None:
        return impossible(table, "exact", start, memory_limit)
    if not instance.plan.exact:
        return _by_milp(instance, start, memory_limit, time_limit, progress)
    deadline = math.inf if time_limit is None else start + time_limit
    closer = _Closer(instance, memory_limit, deadline)
    found = explore(
        instance,
        memory_limit,
        closer,
        deadline=deadline,
        cutoff=cutoff,
        report=lambda cost, bound: progress(cost, bound, closer.evaluations),
    )
    return _finish(instance, found, closer, start, memory_limit)


def _without_limit(table: CostTable, choice: tuple[int, ...], start: float, memory_limit: float | None) -> Result:
    """The optimum without the limit fits it."""
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
    instance: Instance, found: Exploration, closer: _Closer, start: float, memory_limit: float | None
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
        least = least_memory(instance)
        return infeasible(
            instance.table, "exact", start, memory_limit, math.inf if least is None else least.peak, statistics
        )
    return Result(
        method="exact",
        status=Status.OPTIMAL if found.finished and best and best.cost <= found.bound else Status.LIMIT_REACHED,
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


class _Closer:
    """Solves a node of the branching by labels, and counts."""

    def __init__(self, instance: Instance, memory_limit: float | None, deadline: float) -> None:
        self.instance, self.memory_limit, self.deadline = instance, memory_limit, deadline
        self.labels = self.rows = self.rounds = self.evaluations = 0
        self.usual_slack = 0.0  # a part of what the nodes before needed

    def __call__(self, interval: Interval, dual: Dual, incumbent: float) -> tuple[float, Point | None]:
        limit = math.inf if self.memory_limit is None else self.memory_limit - interval.lowest
        within = [point for point in dual.points if point.memory <= limit]
        best = min(within, key=lambda point: point.cost)
        if best.cost <= dual.bound + _ROUNDING * abs(dual.bound):  # no limit binds, or the dual has no gap
            return best.cost, best
        try:
            best = self._among_few(interval, dual, limit, min(incumbent, best.cost)) or best
            return self._prove(interval, dual, limit, incumbent, best)
        except StoppedError:
            raise OutOfTimeError(dual.bound, best) from None

    def _search(self, interval: Interval, dual: Dual, limit: float, only: dict | None = None) -> LabelSearch:
        plan = self.instance.plan
        return LabelSearch(plan, dual.multiplier, dual.bound, limit, interval.highest, self.deadline, only)

    def _among_few(self, interval: Interval, dual: Dual, limit: float, cost: float) -> Point | None:
        """A good choice among the options that the dual's minimisers take anywhere: of those there are few, so this is quick."""
        taken: dict[Domain, set[int]] = {}
        for point in dual.points:
            for domain, option in zip(self.instance.reduced.domains, point.choice):
                taken.setdefault(domain, set()).add(option)
        only = {domain: np.isin(domain.option, list(options)) for domain, options in taken.items()}
        search = self._search(interval, dual, limit, only)
        slack = max(_FIRST_SLACK * abs(dual.bound), 1e-6 * (cost - dual.bound))
        best = None
        while dual.bound + slack < cost and search.statistics.rows < _FEW_ROWS:
            labels = search.best_within(slack, cost - dual.bound)
            if labels is not None:
                self.evaluations += 1
                point = self.instance.point(labels)
                if point.cost < cost:
                    best, cost = point, point.cost
            slack *= 2.0
        self._count(search)
        return best

    def _prove(
        self, interval: Interval, dual: Dual, limit: float, incumbent: float, best: Point
    ) -> tuple[float, Point | None]:
        """The optimum of a node, by growing slack."""
        search = self._search(interval, dual, limit)
        room = min(incumbent, best.cost) - dual.bound
        slack, proven = max(_FIRST_SLACK * abs(dual.bound), self.usual_slack, 1e-6 * room), 0.0
        try:
            while True:
                room = min(incumbent, best.cost) - dual.bound
                if slack * 1.5 >= room:
                    slack = room
                rows = search.statistics.rows
                labels = search.best_within(slack, room)
                proven = slack
                if labels is not None:
                    self.evaluations += 1
                    best = min(best, self.instance.point(labels), key=lambda point: point.cost)
                if min(best.cost, incumbent) <= dual.bound + slack:
                    break
                rows = search.statistics.rows - rows
                slack *= next(growth for most, growth in _SLACK_GROWTH if rows <= most)
            self.usual_slack = slack / 4
        except StoppedError:
            raise OutOfTimeError(dual.bound + proven, best) from None
        finally:
            self._count(search)
        return min(best.cost, incumbent), best if best.cost < incumbent else None

    def _count(self, search: LabelSearch) -> None:
        self.labels += search.statistics.labels
        self.rows += search.statistics.rows
        self.rounds += search.statistics.rounds


def _by_milp(
    instance: Instance, start: float, memory_limit: float | None, time_limit: float | None, progress: Progress
) -> Result:
    """Elimination gives no more than bounds (mini-buckets): HiGHS does the rest."""
    # Only here: loading SciPy's optimizers takes longer than most searches.
    from .milp import milp_least_memory, milp_optimum

    table = instance.table
    relaxed = explore(instance, memory_limit)
    best = relaxed.incumbent.choice if relaxed.incumbent else None
    progress(table.evaluate(best) if best else math.inf, relaxed.bound, 1)
    left = None if time_limit is None else max(1e-3, time_limit - (time.perf_counter() - start))
    found = milp_optimum(table, instance.reduced, memory_limit, left)
    statistics = {"nodes": found.nodes, "buckets": instance.plan.num_nodes}
    if found.finished and found.choice is None:
        smallest, _ = milp_least_memory(table, instance.reduced)
        return infeasible(table, "exact", start, memory_limit, smallest, statistics)
    best = min((choice for choice in (best, found.choice) if choice), key=table.evaluate, default=None)
    cost = table.evaluate(best) if best else math.inf
    bound = cost if found.finished else min(cost, max(relaxed.bound, found.bound))
    return Result(
        method="exact",
        status=Status.OPTIMAL if cost <= bound + PROOF_TOLERANCE * abs(cost) else Status.LIMIT_REACHED,
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


def smallest_memory(table: CostTable) -> tuple[float, tuple[int, ...] | None]:
    """The least peak memory [bytes] of any choice of finite cost, and such a choice; ``(inf, None)`` if there is none."""
    instance = prepare(table)
    if instance is None:
        return math.inf, None
    if not instance.plan.exact:
        from .milp import milp_least_memory

        return milp_least_memory(table, instance.reduced)
    point = least_memory(instance)
    return (point.peak, point.choice) if point else (math.inf, None)
