"""Bounds under a memory limit: the Lagrangian dual, evaluated by elimination.

For a limit M on the resident memory, and options whose buffer is at most b, the dual function

    L(lambda) = min_x  cost(x) + lambda (memory(x) - M),      lambda >= 0 [seconds per byte]

is a lower bound for every lambda.  It is concave and piecewise linear; each minimiser x gives the line
``cost(x) + lambda (memory(x) - M)``.  The secant method finds its maximum: a minimiser over the limit and one under it give two
lines.  At their intersection either L equals them (then it is the maximum), or a new minimiser replaces one of the two (Handler and
Zang 1980, for constrained shortest paths).  There are finitely many lines, so finitely many steps; mostly 5 to 15.

*Buffers.*  The peak is ``memory(x) + max_i buffer_i[x_i]``.  The largest buffer of a choice is at least ``lowest``, so
``M - lowest`` bounds the resident memory.  `Interval` restricts the largest buffer; `branching` splits it if the relaxation is not
tight.

*Wide graphs.*  If the graph is too wide for elimination, the mini-bucket relaxation gives the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.table import CostTable

from .elimination import Elimination, Weights, compile_plan
from .reduction import Reduced, check_table, reduce_table

__all__ = ["Dual", "Instance", "Interval", "PricedAssignment", "minimise", "prepare", "solve_dual"]

#: Largest elimination table of an exact plan, in entries of 8 bytes; a few tables are alive at a time.
MAX_ENTRIES = 2**22
#: Largest table of a mini-bucket relaxation, in entries.
MAX_RELAXED_ENTRIES = 2**17


@dataclass(frozen=True, eq=False)
class Instance:
    """A table, reduced and compiled.

    Attributes:
        table: the cost table.
        reduced: the reduced table.
        plan: the elimination plan; ``plan.exact`` is False if the graph is too wide.
        buffers: distinct buffers of the labels, ascending [bytes].
        lowest_buffer: the largest of the variables' smallest buffers [bytes]; the largest buffer of a choice is at least this.
    """

    table: CostTable
    reduced: Reduced
    plan: Elimination
    buffers: np.ndarray
    lowest_buffer: float

    def point(self, labels: np.ndarray) -> PricedAssignment:
        """The assignment with these labels, one per variable."""
        choice = np.zeros(len(labels), dtype=np.intp)
        memory = buffer = 0.0
        for domain, variables in self.reduced.members:
            label = labels[variables]
            choice[variables] = domain.option[label]
            memory += float(domain.memory[label].sum())
            buffer = max(buffer, float(domain.buffer[label].max()))
        chosen = tuple(choice.tolist())
        return PricedAssignment(chosen, self.table.evaluate(chosen), memory, buffer)


@dataclass(frozen=True)
class PricedAssignment:
    """An assignment with its cost.

    Attributes:
        choice: the option of each variable.
        cost: seconds.
        memory: resident bytes.
        buffer: bytes of the largest buffer.
    """

    choice: tuple[int, ...]
    cost: float
    memory: float
    buffer: float

    @property
    def peak(self) -> float:
        """Peak memory [bytes]."""
        return self.memory + self.buffer


@dataclass(frozen=True)
class Interval:
    """An interval of the largest buffer of a choice.

    Attributes:
        lowest, highest: its ends [bytes], inclusive.
    """

    lowest: float
    highest: float


@dataclass(frozen=True)
class Dual:
    """The maximum of the dual over an interval of buffers.

    Attributes:
        bound: a valid lower bound [s] for every choice of the interval within the limit; ``inf`` if there is none.
        multiplier: the maximiser lambda* [s/byte].
        points: the minimisers found, within the limit or not; for an inexact plan they may have any cost.
        ends: the two points whose lines intersect at the maximum; one point if the limit does not bind.
    """

    bound: float
    multiplier: float
    points: tuple[PricedAssignment, ...]
    ends: tuple[PricedAssignment, ...]


def prepare(table: CostTable) -> Instance | None:
    """Check, reduce and compile a table; None if some variable has no option of finite cost.

    Raises:
        SearchError: the table is invalid (`check_table`).
    """
    check_table(table)
    reduced = reduce_table(table)
    if reduced.empty:
        return None
    plan = compile_plan(reduced, max_entries=MAX_ENTRIES, relaxed_entries=MAX_RELAXED_ENTRIES)
    domains = [domain for domain, _ in reduced.members]
    buffers = np.unique(np.concatenate([np.zeros(0), *(domain.buffer for domain in domains)]))
    lowest = max((float(domain.buffer.min()) for domain in domains), default=0.0)
    return Instance(table, reduced, plan, buffers, lowest)


def minimise(instance: Instance, weights: Weights) -> tuple[float, PricedAssignment | None]:
    """The least score (of the relaxation, if the plan is inexact) and a minimiser; None if all scores are inf."""
    tables = instance.plan.upward(weights)
    value = float(tables[-1])
    if value == math.inf:
        return value, None
    return value, instance.point(instance.plan.decode(weights, tables))


def solve_dual(
    instance: Instance,
    interval: Interval,
    memory_limit: float | None,
    *,
    cutoff: float = math.inf,
    stop: Stop | None = None,
    max_steps: int = 60,
) -> Dual:
    """Maximise the dual for choices whose largest buffer is in the interval, under a limit on peak memory [bytes].

    The iteration ends early when the bound is at least ``cutoff`` [s], when a stop is requested (then there may be no point within
    the limit), or after ``max_steps``.  The bound is valid in all cases.
    """
    stop, highest = stop or Stop(), interval.highest
    cost, point = minimise(instance, Weights(1.0, 0.0, highest))
    if point is None:
        return Dual(math.inf, 0.0, (), ())
    limit = math.inf if memory_limit is None else memory_limit - interval.lowest
    if point.memory <= limit:
        return Dual(cost, 0.0, (point,), (point,))
    points = [point]
    over, over_point = (cost, point.memory), point
    least, point = minimise(instance, Weights(0.0, 1.0, highest))
    assert point is not None
    if least > limit:
        return Dual(math.inf, 0.0, (), ())
    points.append(point)
    # Find a line under the limit.  Any assignment of finite cost gives a line above the dual function, also for inexact plans.
    multiplier = abs(cost) / limit if limit > 0 and cost else 1.0
    while not math.isfinite(point.cost) or point.memory > limit:
        if stop.is_requested:
            return Dual(cost, 0.0, tuple(points), (over_point,))
        score, point = minimise(instance, Weights(1.0, multiplier, highest))
        assert point is not None
        if point.memory <= limit:
            under = (score - multiplier * point.memory, point.memory)
            break
        multiplier *= 8
    else:
        under = (point.cost, point.memory)
    under_point = point
    bound, best = cost, 0.0
    # Secant method on the two lines.
    for _ in range(max_steps):
        if bound >= cutoff or stop.is_requested:
            break
        multiplier = (under[0] - over[0]) / (over[1] - under[1])
        if not multiplier > best and not multiplier > 0:
            break
        crossing = over[0] + multiplier * (over[1] - limit)
        weights = Weights(1.0, multiplier, highest)
        score, point = minimise(instance, weights)
        assert point is not None
        value = score - multiplier * limit
        points.append(point)
        if value > bound:
            bound, best = value, multiplier
        line = (score - multiplier * point.memory, point.memory)
        if value >= crossing - 1e-12 * (abs(crossing) + abs(multiplier * limit)) or line in (over, under):
            break
        if point.memory > limit:
            over, over_point = line, point
        else:
            under, under_point = line, point
    return Dual(bound, best, tuple(points), (over_point, under_point))
