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
    tree = _Tree(instance, memory_limit, deadline or Deadline(), cutoff, start)
    while (node := tree.best_node()) is not None:
        report(tree.cost, node.bound)
        out_of_time = tree.deadline.is_over
        above = [point.buffer for point in node.dual.ends if point.buffer > node.interval.lowest]
        worth_splitting = close is not None or tree.nodes < _BOUND_NODES
        if above and instance.plan.exact and worth_splitting and not out_of_time:
            tree.pop()
            tree.split(node.interval, min(above), node.bound)
            continue
        if close is None or out_of_time:
            return tree.exploration(node.bound, finished=False)
        try:
            proven, point = close(node, tree.least_cost)
        except OutOfTimeError as stop:
            tree.consider(stop.point)
            tree.pop()
            tree.push(OpenNode(max(node.bound, stop.bound), node.interval, node.dual))
            return tree.exploration(tree.bound, finished=False)
        tree.pop()
        proven = max(node.bound, proven)
        if point is None:
            tree.push(OpenNode(proven, node.interval, node.dual))
            continue
        tree.consider(point)
        if point.peak > tree.limit:
            tree.split(node.interval, point.buffer, proven)
    return tree.exploration(tree.bound, finished=True)


class _Tree:
    """The open nodes, and the best choice within the limit that was met so far.

    Args:
        start: the nodes and the choice to begin with; the one node of all choices where there is none.
    """

    def __init__(
        self,
        instance: Instance,
        memory_limit: float | None,
        deadline: Deadline,
        cutoff: float,
        start: Exploration | None,
    ) -> None:
        self.deadline, self.limit = deadline, math.inf if memory_limit is None else memory_limit
        self.incumbent = start.incumbent if start else None
        self.nodes = start.nodes if start else 0
        self._instance, self._memory_limit, self._cutoff = instance, memory_limit, cutoff
        self._order = itertools.count()
        self._heap: list[tuple[float, int, OpenNode]] = []
        for node in start.open if start else ():
            self.push(node)
        if start is None:
            highest = float(instance.buffers[-1]) if len(instance.buffers) else 0.0
            self._open(Interval(instance.lowest_buffer, highest), -math.inf)

    @property
    def cost(self) -> float:
        """Of the incumbent; ``inf`` where there is none."""
        return self.incumbent.cost if self.incumbent else math.inf

    @property
    def least_cost(self) -> float:
        """What a choice has to be below to be of interest."""
        return min(self.cost, self._cutoff)

    @property
    def bound(self) -> float:
        """Of all open nodes; ``inf`` where there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def best_node(self) -> OpenNode | None:
        """The node with the least bound; None where it is of no interest."""
        return self._heap[0][2] if self.bound < self.least_cost else None

    def pop(self) -> None:
        """Take the best node away."""
        heapq.heappop(self._heap)

    def push(self, node: OpenNode) -> None:
        heapq.heappush(self._heap, (node.bound, next(self._order), node))

    def consider(self, point: Point) -> None:
        """A choice that was met: the incumbent if it fits and is the best."""
        if point.peak <= self.limit and point.cost < self.cost:
            self.incumbent = point

    def split(self, interval: Interval, buffer: float, bound: float) -> None:
        """Open the choices of an interval whose largest buffer is below ``buffer``, and the others."""
        below = int(np.searchsorted(self._instance.buffers, buffer)) - 1
        self._open(Interval(interval.lowest, float(self._instance.buffers[below])), bound)
        self._open(Interval(buffer, interval.highest), bound)

    def _open(self, interval: Interval, inherited: float) -> None:
        if interval.lowest > interval.highest:
            return
        self.nodes += 1
        dual = solve_dual(self._instance, interval, self._memory_limit, cutoff=self.least_cost, stop=self.deadline.stop)
        for point in dual.points:
            self.consider(point)
        if dual.bound < math.inf:
            self.push(OpenNode(max(dual.bound, inherited), interval, dual))

    def exploration(self, bound: float, finished: bool) -> Exploration:
        """What is known, with a bound on all choices that are left."""
        left = tuple(node for *_, node in sorted(self._heap, key=lambda entry: entry[:2]))
        return Exploration(min(bound, self.cost), self.incumbent, self.nodes, finished, left)


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
