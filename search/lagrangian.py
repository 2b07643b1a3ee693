"""Bounds under a memory limit: the Lagrangian dual on eliminated instances.

For a limit M on the resident memory, and options whose buffer is at most b, the dual function

    L(lambda) = min_x  cost(x) + lambda (memory(x) - M),      lambda >= 0 [seconds per byte]

is a lower bound for every lambda; it is concave and piecewise linear, each minimiser x giving the line
``cost(x) + lambda (memory(x) - M)``.  Its maximum is found by the secant method: a minimiser over the limit and one under it
give two lines; at their crossing either L meets them (then it is the maximum) or a new minimiser replaces one of the two
(Handler and Zang 1980, for constrained shortest paths).  Finitely many lines, so finitely many steps; mostly 5 to 15.

*Buffers.*  The peak is ``memory(x) + max_i buffer_i[x_i]``.  With b the largest buffer, ``max_i min buffer_i <= b`` always, so
``M - lowest`` bounds the resident memory; and an option whose buffer exceeds ``M - min memory`` is never used.  `Interval` says
which buffers are meant; `exact` splits it where the relaxation is not tight.

*Wide graphs.*  Where elimination is too wide, its mini-bucket relaxation gives the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.table import CostTable

from .elimination import Plan, Weights, compile_plan
from .reduction import Reduced, check_table, reduce_table

__all__ = ["Dual", "Instance", "Interval", "Point", "minimise", "prepare", "solve_dual"]

#: The largest elimination table of an exact plan, in entries (8 bytes each, a few of them alive at a time).
MAX_ENTRIES = 2**22
#: The largest table of a mini-bucket relaxation.
MAX_RELAXED_ENTRIES = 2**17


@dataclass(frozen=True, eq=False)
class Instance:
    """A table made ready: reduced, compiled, and its distinct buffers. ``plan.exact`` is False where it is too wide."""

    table: CostTable
    reduced: Reduced
    plan: Plan
    buffers: np.ndarray  #: distinct buffers of the labels, ascending [bytes]
    lowest_buffer: float  #: the largest of the variables' smallest buffers [bytes]: every choice has one as large

    def point(self, labels: np.ndarray) -> Point:
        """The assignment with these labels, one per variable."""
        choice = np.zeros(len(labels), dtype=np.intp)
        memory = buffer = 0.0
        for domain, variables in self.reduced.members:
            label = labels[variables]
            choice[variables] = domain.option[label]
            memory += float(domain.memory[label].sum())
            buffer = max(buffer, float(domain.buffer[label].max()))
        chosen = tuple(choice.tolist())
        return Point(chosen, self.table.evaluate(chosen), memory, buffer)


@dataclass(frozen=True)
class Point:
    """An assignment: cost [s], resident memory and largest buffer [bytes]."""

    choice: tuple[int, ...]
    cost: float
    memory: float
    buffer: float

    @property
    def peak(self) -> float:
        return self.memory + self.buffer


@dataclass(frozen=True)
class Interval:
    """Choices whose largest buffer lies in ``[lowest, highest]`` bytes."""

    lowest: float
    highest: float


@dataclass(frozen=True)
class Dual:
    """The dual's maximum over an interval of buffers.

    ``bound`` is valid for every choice of the interval within the limit (``inf``: there is none).  ``points`` are minimisers
    met on the way, fit or not (of an inexact plan they may have any cost); ``ends`` are the two whose lines cross at the
    maximum (one, where no limit binds): the maximum is a mixture of them.
    """

    bound: float
    multiplier: float
    points: tuple[Point, ...]
    ends: tuple[Point, ...]


def prepare(table: CostTable) -> Instance | None:
    """Check, reduce and compile; ``None`` where some variable has no option of finite cost left.

    Raises: SearchError, for a table that no search can treat.
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


def minimise(instance: Instance, weights: Weights) -> tuple[float, Point | None]:
    """The least score (over the relaxation, if the plan is inexact) and a minimiser; ``None`` where all scores are inf."""
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
    """Maximise the dual for choices whose largest buffer is in the interval, under the limit on peak memory.

    Once the bound is at least ``cutoff`` it is good enough.  A stop ends it with the bound until then; there may be no point that
    fits.
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
    # Any assignment gives a line above the dual function, of an inexact plan as well; one of infinite cost gives none.
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
