"""Branch and bound on the largest buffer, and the lower bound that all methods share.

The limit on peak memory, ``memory(x) + max_i buffer_i[x_i] <= M``, contains a maximum.  A node of the search tree stands for the
choices whose largest buffer is in ``[lowest, highest]``.  Its relaxation forbids larger buffers and allows ``M - lowest`` bytes
of resident memory.  If a minimiser of the relaxation fits M, the relaxation is tight.  Otherwise its largest buffer b exceeds
``lowest``, and the node is split: choices with buffers below b (options of buffer b are forbidden), and choices with a buffer of b
or more (only ``M - b`` is allowed).  The minimiser belongs to neither.  Nodes are processed best bound first; there are mostly 1
to 3.
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
from .lagrangian import Dual, Instance, Interval, PricedAssignment, minimise, prepare, solve_dual

__all__ = ["Bracket", "Exploration", "OpenNode", "OutOfTimeError", "bracket", "explore", "least_memory", "lower_bound"]

#: Nodes that :func:`lower_bound` opens.
_BOUND_NODES = 12

#: Solves a node's relaxation: (node, cost of the incumbent) -> (valid bound, point).  The point is the optimum, or a choice that
#: fits the relaxation but not the limit, or None if no choice costs less than the incumbent.
CloseNode = Callable[["OpenNode", float], "tuple[float, PricedAssignment | None]"]


class OutOfTimeError(Exception):
    """The work on a node reached the deadline.

    Attributes:
        bound: a valid lower bound on the node.
        point: the best point of the relaxation so far.
    """

    def __init__(self, bound: float, point: PricedAssignment) -> None:
        super().__init__()
        self.bound, self.point = bound, point


@dataclass(frozen=True, eq=False)
class OpenNode:
    """A node of the search tree that is not settled.

    Attributes:
        bound: a valid lower bound on the cost of its choices [s].
        interval: the interval of largest buffers that defines its choices.
        dual: the Lagrangian dual of its relaxation.
    """

    bound: float
    interval: Interval
    dual: Dual


@dataclass(frozen=True, eq=False)
class Exploration:
    """The state of a branch and bound, from which it can continue.

    Attributes:
        bound: a valid lower bound on all choices within the limit [s].
        incumbent: the best choice within the limit so far; None if there is none.
        nodes: number of nodes opened.
        finished: whether the incumbent is proven optimal, or all choices cost the cutoff or more.
        open: the open nodes.
    """

    bound: float
    incumbent: PricedAssignment | None
    nodes: int
    finished: bool
    open: tuple[OpenNode, ...]


@dataclass(frozen=True)
class Bracket:
    """Cheap bounds on a table's optimum within a memory limit, in seconds.

    Attributes:
        free: a valid lower bound without the limit; equal to the optimum without the limit if the graph is narrow.
        bound: a valid lower bound within the limit; ``inf`` if nothing fits.
        cost: cost of the best choice found within the limit; ``inf`` if none was found.
        choice: that choice.
        instance, exploration: the compiled table and the state of the branch and bound, from which :func:`exact` can continue; None
            if they were not needed.
    """

    free: float
    bound: float
    cost: float
    choice: tuple[int, ...] | None = None
    instance: Instance | None = field(default=None, repr=False, compare=False)
    exploration: Exploration | None = field(default=None, repr=False, compare=False)


def lower_bound(table: CostTable, memory_limit: float | None = None, stop: Stop | None = None) -> float:
    """A cheap valid lower bound [s] on the cost of every choice within the limit; ``inf`` if no choice fits.

    It is the Lagrangian bound of `lagrangian` with some branching on buffers.  It equals the optimum if the memory limit does not
    bind, the graph is narrow, and no stop is requested.

    Raises:
        SearchError: the table is invalid (`check_table`).
    """
    return bracket(table, memory_limit, stop=stop).bound


def bracket(
    table: CostTable, memory_limit: float | None = None, cutoff: float = math.inf, stop: Stop | None = None
) -> Bracket:
    """Compute bounds on the optimum, until the lower bound is at least ``cutoff`` [s] or a stop is requested.

    Raises:
        SearchError: the table is invalid (`check_table`).
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
    if deadline.stop.is_requested:  # some node may be incomplete, so the state is not returned for continuation
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
    """Run the branch and bound.

    Args:
        instance: the compiled table.
        memory_limit: bytes per device; None for no limit.
        close: solves a node's relaxation; without it the search ends when splitting does not improve the best node.
        start: an earlier state for the same instance and limit, from which to continue.
        deadline: when to end without a proof.
        cutoff: choices that cost this much [s] or more are ignored.  If the search finishes with such an incumbent, or without one
            and with a finite bound, then the bound is at least the cutoff.
        report: called with the incumbent's cost and the bound before each node.
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
    """The open nodes, and the best choice within the limit so far.

    Args:
        start: the state to continue from; without it the tree is one node with all choices.
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
        """Cost of the incumbent; ``inf`` without one."""
        return self.incumbent.cost if self.incumbent else math.inf

    @property
    def least_cost(self) -> float:
        """The cost that a choice must be below to improve on the incumbent and the cutoff."""
        return min(self.cost, self._cutoff)

    @property
    def bound(self) -> float:
        """The least bound of the open nodes; ``inf`` without any."""
        return self._heap[0][0] if self._heap else math.inf

    def best_node(self) -> OpenNode | None:
        """The node with the least bound; None if it cannot improve on the incumbent and the cutoff."""
        return self._heap[0][2] if self.bound < self.least_cost else None

    def pop(self) -> None:
        """Remove the best node."""
        heapq.heappop(self._heap)

    def push(self, node: OpenNode) -> None:
        heapq.heappush(self._heap, (node.bound, next(self._order), node))

    def consider(self, point: PricedAssignment) -> None:
        """Make a choice the incumbent if it fits the limit and costs less."""
        if point.peak <= self.limit and point.cost < self.cost:
            self.incumbent = point

    def split(self, interval: Interval, buffer: float, bound: float) -> None:
        """Open two nodes: the choices of an interval whose largest buffer is below ``buffer``, and the others."""
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
        """The state of the search; ``bound`` is a valid bound on the open nodes."""
        left = tuple(node for *_, node in sorted(self._heap, key=lambda entry: entry[:2]))
        return Exploration(min(bound, self.cost), self.incumbent, self.nodes, finished, left)


def least_memory(instance: Instance, stop: Stop) -> PricedAssignment | None:
    """The choice of finite cost with the least peak memory; None if no choice has finite cost.  The plan must be exact.

    For a threshold b on buffers, let m(b) be the least resident memory.  If the largest buffer of a minimiser is b' <= b, then m
    is constant on [b', b], and ``m + b'`` is the least peak there.  So the threshold decreases, each time to just below b', until
    the smallest possible buffer proves that no better choice follows.

    Raises:
        StopRequestedError: the stop was requested.
    """
    assert instance.plan.exact
    best: PricedAssignment | None = None
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
