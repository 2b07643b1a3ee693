"""Branching on the largest buffer, and the lower bound that all methods share.

The peak memory ``memory(x) + max_i buffer_i[x_i] <= M`` has a maximum in it.  A node of the branching stands for the choices
whose largest buffer lies in ``[lowest, highest]``; its relaxation forbids larger buffers and allows ``M - lowest`` bytes of
resident memory.  Where a minimiser of the relaxation fits M itself, the relaxation is tight; where it does not, its own largest
buffer b is above ``lowest``, and the node is split into the choices below b (where b's options are forbidden) and those from
b on (where only ``M - b`` is allowed): the minimiser is in neither.  Nodes are taken best bound first.  Mostly there are 1 to 3.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoddl.costmodel.stopping import Deadline, Stop
from autoddl.costmodel.table import CostTable

from .elimination import Weights
from .forest import solve_forest
from .lagrangian import Dual, Instance, Interval, Point, minimise, prepare, solve_dual

__all__ = ["Bracket", "Exploration", "OpenNode", "OutOfTimeError", "bracket", "explore", "least_memory", "lower_bound"]

#: Nodes that the shared bound spends on buffers.
_BOUND_NODES = 12

#: Works on a node's relaxation: (node, the incumbent's cost) -> (a valid bound, and the optimum, or a choice that the relaxation
#: allows and the limit does not, or None where nothing costs less than the incumbent).
CloseNode = Callable[["OpenNode", float], "tuple[float, Point | None]"]


class OutOfTimeError(Exception):
    """The work on a node was cut off: what has been proven of it, and the best point of its relaxation so far."""

    def __init__(self, bound: float, point: Point) -> None:
        super().__init__()
        self.bound, self.point = bound, point


@dataclass(frozen=True, eq=False)
class OpenNode:
    """The choices whose largest buffer lies in the interval: a valid bound on their relaxation, and its dual."""

    bound: float
    interval: Interval
    dual: Dual


@dataclass(frozen=True, eq=False)
class Exploration:
    """``bound`` is valid for all choices within the limit; ``incumbent`` the best of them that was met; ``nodes`` opened; and those
    that are left ``open``, whence it can go on."""

    bound: float
    incumbent: Point | None
    nodes: int
    finished: bool
    open: tuple[OpenNode, ...]


@dataclass(frozen=True)
class Bracket:
    """What is cheaply known of a table's optimum within a memory limit, in seconds.

    Attributes:
        free: a valid lower bound without the limit; the optimum then, where the graph is narrow.
        bound: a valid lower bound within the limit; ``inf`` shows that nothing fits.
        cost: of the best choice within the limit that was met on the way; ``inf`` where none was.
        choice: that choice.
        instance, exploration: the table made ready, and what was found on it within the limit, for who goes on from here; None
            where that was not needed.
    """

    free: float
    bound: float
    cost: float
    choice: tuple[int, ...] | None = None
    instance: Instance | None = field(default=None, repr=False, compare=False)
    exploration: Exploration | None = field(default=None, repr=False, compare=False)


def lower_bound(table: CostTable, memory_limit: float | None = None, stop: Stop | None = None) -> float:
    """A cheap valid lower bound [s] on the cost of every choice within the limit; ``inf`` shows that there is none.

    The elimination / Lagrangian bound of `lagrangian` with some branching on buffers.  It is the optimum where no memory
    limit binds and the graph is narrow, and nobody requests a stop.

    Raises: SearchError, for a table that no search can treat.
    """
    return bracket(table, memory_limit, stop=stop).bound


def bracket(
    table: CostTable, memory_limit: float | None = None, cutoff: float = math.inf, stop: Stop | None = None
) -> Bracket:
    """Bounds on the optimum; once the lower bound is known to be at least ``cutoff``, or a stop is requested, no more work is put
    into it.

    Raises: SearchError, for a table that no search can treat.
    """
    choice = solve_forest(table)
    free = math.inf if choice is None else table.evaluate(choice)
    if choice is not None and (memory_limit is None or table.peak_memory(choice) <= memory_limit):
        return Bracket(free, free, free, choice)
    instance = prepare(table)
    if instance is None:
        return Bracket(math.inf, math.inf, math.inf)
    if choice is None:
        free, _ = minimise(instance, Weights(1.0, 0.0))
    if free >= cutoff:
        return Bracket(free, free, math.inf, None, instance)
    deadline = Deadline(None, stop)
    found = explore(instance, memory_limit, deadline=deadline, cutoff=cutoff)
    best = found.incumbent
    cost, chosen = (best.cost, best.choice) if best else (math.inf, None)
    if deadline.stop.is_requested:  # the work on some node may have been cut short: nobody goes on from there
        return Bracket(free, found.bound, cost, chosen)
    return Bracket(free, found.bound, cost, chosen, instance, found)


def explore(
    instance: Instance,
    memory_limit: float | None,
    close: CloseNode | None = None,
    *,
    start: Exploration | None = None,
    deadline: Deadline | None = None,
    cutoff: float = math.inf,
    report: Callable[[float, float], None] = lambda cost, bound: None,
) -> Exploration:
    """Branch on buffers until the best node cannot be improved; with ``close`` that is when the optimum is proven.

    Choices that cost ``cutoff`` or more are of no interest: where it finishes with such an incumbent, or with none and a finite
    bound, the bound says that all are.  It goes on from where ``start``, of the same instance and limit, ended.
    """
    deadline = deadline or Deadline()
    limit = math.inf if memory_limit is None else memory_limit
    order = itertools.count()
    incumbent = start.incumbent if start else None
    heap = [(node.bound, next(order), node) for node in (start.open if start else ())]
    heapq.heapify(heap)
    nodes = start.nodes if start else 0

    def best() -> float:
        return min(incumbent.cost if incumbent else math.inf, cutoff)

    def consider(point: Point) -> None:
        nonlocal incumbent
        if point.peak <= limit and point.cost < (incumbent.cost if incumbent else math.inf):
            incumbent = point

    def push(bound: float, interval: Interval, dual: Dual) -> None:
        heapq.heappush(heap, (bound, next(order), OpenNode(bound, interval, dual)))

    def open_node(interval: Interval, inherited: float) -> None:
        nonlocal nodes
        if interval.lowest > interval.highest:
            return
        nodes += 1
        dual = solve_dual(instance, interval, memory_limit, cutoff=best(), stop=deadline.stop)
        for point in dual.points:
            consider(point)
        if dual.bound < math.inf:
            push(max(dual.bound, inherited), interval, dual)

    def split(interval: Interval, buffer: float, bound: float) -> None:
        below = int(np.searchsorted(instance.buffers, buffer)) - 1
        open_node(Interval(interval.lowest, float(instance.buffers[below])), bound)
        open_node(Interval(buffer, interval.highest), bound)

    def ended(bound: float, finished: bool) -> Exploration:
        cost = incumbent.cost if incumbent else math.inf
        return Exploration(min(bound, cost), incumbent, nodes, finished, tuple(node for *_, node in sorted(heap)))

    if start is None:
        highest = float(instance.buffers[-1]) if len(instance.buffers) else 0.0
        open_node(Interval(instance.lowest_buffer, highest), -math.inf)
    while heap and heap[0][0] < best():
        bound, _, node = heap[0]
        report(incumbent.cost if incumbent else math.inf, bound)
        interval, dual = node.interval, node.dual
        out_of_time = deadline.is_over
        above = [point.buffer for point in dual.ends if point.buffer > interval.lowest]
        if above and instance.plan.exact and (close is not None or nodes < _BOUND_NODES) and not out_of_time:
            heapq.heappop(heap)
            split(interval, min(above), bound)
            continue
        if close is None or out_of_time:
            return ended(bound, finished=False)
        try:
            proven, point = close(node, best())
        except OutOfTimeError as stop:
            consider(stop.point)
            others = min((entry[0] for entry in heap[1:]), default=math.inf)
            return ended(min(max(bound, stop.bound), others), finished=False)
        heapq.heappop(heap)
        proven = max(bound, proven)
        if point is None:
            push(proven, interval, dual)
        else:
            consider(point)
            if point.peak > limit:
                split(interval, point.buffer, proven)
    return ended(heap[0][0] if heap else math.inf, finished=True)


def least_memory(instance: Instance, stop: Stop) -> Point | None:
    """The choice of finite cost with the least peak memory; ``None`` if no choice has finite cost. Needs an exact plan.

    For a threshold b on buffers, let m(b) be the least resident memory; a minimiser whose largest buffer is b' <= b shows
    that m is constant on [b', b], where ``m + b'`` is the least peak.  So thresholds go down, each time just below b', until
    the smallest buffer possible shows that nothing better follows.

    Raises: StopRequestedError
    """
    assert instance.plan.exact
    best: Point | None = None
    threshold = math.inf
    while True:
        stop.check()
        least, point = minimise(instance, Weights(0.0, 1.0, threshold))
        if point is None:
            return best
        if best is None or point.peak < best.peak:
            best = point
        if point.buffer <= instance.lowest_buffer or instance.lowest_buffer + least >= best.peak:
            return best
        threshold = float(np.nextafter(point.buffer, -math.inf))
