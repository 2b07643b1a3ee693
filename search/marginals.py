"""The cost of the best choice with one variable fixed to one option, and the *regret* of every alternative.

For variable i and option a,

    forced(i, a) = min { cost(x) : x_i = a, memory(x) <= M },        regret(i, a) = forced(i, a) - cost(chosen).

**Bounds for all pairs at once.**  Without the limit, ``forced(i, .)`` are the *min-marginals* of the table.  One upward and one
downward pass of an elimination give them for every variable (see `elimination`: inside + outside of the factor with i's own costs,
minimised over everything but i).  With the limit, three min-marginals give lower bounds, for resident memory m and buffers
``b = max(buffer_i[a], max_j min buffer_j)``:

* of the cost;
* of the Lagrangian score ``cost + lambda* m``, less ``lambda* (M - b)``, with the multiplier of the whole table's dual;
* of the memory: if its min-marginal + b exceeds M, nothing fits.

All options and variables are needed, so nothing is pruned.  Options with equal edges still form classes.

**Exact values for the nearest.**  Options are searched exactly in ascending order of their bounds, with the variable fixed.  When
the next bound is not below the worst of the ``count`` best, no other option can be nearer.  Every choice found fixes all
variables to some option, so its cost is an upper bound for each of these; most searches only have to prove that there is nothing
better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.table import CostTable, Edge

from .elimination import Elimination, Leaf, Node, Weights, compile_plan
from .exact import exact
from .lagrangian import MAX_ENTRIES, MAX_RELAXED_ENTRIES, Interval, prepare, solve_dual
from .reduction import Domain, Reduced, check_table
from .result import PROOF_TOLERANCE

__all__ = ["Forced", "Marginals", "marginals", "nearest"]


@dataclass(frozen=True)
class Forced:
    """The best choice with one variable fixed to one option.

    Attributes:
        variable, option: the variable and its option.
        choice, cost: the best choice found within the limit, and its cost [s]; None and inf if there is none.
        lower_bound: a valid lower bound on the cost of such choices [s].
    """

    variable: int
    option: int
    choice: tuple[int, ...] | None
    cost: float
    lower_bound: float

    @property
    def is_exact(self) -> bool:
        """Whether the cost is proven to be the least."""
        return self.lower_bound >= self.cost * (1 - PROOF_TOLERANCE)


@dataclass(frozen=True, eq=False)
class Marginals:
    """Lower bounds on ``forced(i, a)`` for every variable and option.

    Attributes:
        free: bounds [s] without the limit, shape (options,) per variable.
        within: bounds [s] within the limit, in the same shape; inf if nothing fits.
        multiplier: the multiplier of memory in the dual [s/byte], the value of a byte; 0 if the limit does not bind.
        memory_limit: the limit [bytes]; None for no limit.
        is_exact: whether ``free`` is exact.
    """

    free: tuple[np.ndarray, ...]
    within: tuple[np.ndarray, ...]
    multiplier: float
    memory_limit: float | None
    is_exact: bool


def marginals(table: CostTable, memory_limit: float | None = None) -> Marginals:
    """Compute bounds for every variable and option.

    It takes one elimination of the table without a limit, two if the limit does not bind, else three.

    Raises:
        SearchError: the table is invalid (`check_table`).
    """
    check_table(table)
    reduced = _classes(table)
    plan = compile_plan(reduced, max_entries=MAX_ENTRIES, relaxed_entries=MAX_RELAXED_ENTRIES)
    free = _scores(plan, reduced, Weights(1.0, 0.0))
    if memory_limit is None:
        return Marginals(free, free, 0.0, None, plan.exact)
    lowest = max(float(buffer.min()) for buffer in table.buffer)
    least = _scores(plan, reduced, Weights(0.0, 1.0))
    multiplier = _multiplier(table, memory_limit)
    dual = free if multiplier == 0 else _scores(plan, reduced, Weights(1.0, multiplier))
    within = []
    for i, buffer in enumerate(table.buffer):
        room = memory_limit - np.maximum(buffer, lowest)
        bound = np.maximum(free[i], dual[i] - multiplier * room)
        within.append(np.where(least[i] > room, np.inf, bound))
    return Marginals(free, tuple(within), multiplier, memory_limit, plan.exact)


def _multiplier(table: CostTable, memory_limit: float) -> float:
    """The multiplier of the whole table's dual [s/byte]; 0 if the limit does not bind or nothing fits."""
    instance = prepare(table)
    if instance is None:
        return 0.0
    highest = float(instance.buffers[-1]) if len(instance.buffers) else 0.0
    dual = solve_dual(instance, Interval(instance.lowest_buffer, highest), memory_limit)
    return dual.multiplier if math.isfinite(dual.bound) else 0.0


def _classes(table: CostTable) -> Reduced:
    """The table with options in classes and parallel edges merged; no option is removed, and every variable has its own domain."""
    known: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def rows(array: np.ndarray, side: int) -> np.ndarray:
        if id(array) not in known:
            known[id(array)] = _equal_rows(array), _equal_rows(array.T)
        return known[id(array)][side]

    keys: list[list[np.ndarray]] = [[] for _ in table.names]
    merged: dict[tuple[int, int], list[tuple[np.ndarray, bool]]] = {}
    for edge in table.edges:
        keys[edge.source].append(rows(edge.cost, 0))
        keys[edge.target].append(rows(edge.cost, 1))
        flipped = edge.source > edge.target
        pair = (edge.target, edge.source) if flipped else (edge.source, edge.target)
        merged.setdefault(pair, []).append((edge.cost, flipped))
    domains, representatives = [], []
    for i, of_one in enumerate(keys):
        number = _equal_rows(np.stack(of_one, axis=1)) if of_one else np.zeros(len(table.cost[i]), dtype=np.intp)
        order = np.argsort(number, kind="stable")
        first = np.searchsorted(number[order], np.arange(int(number.max()) + 2))
        domains.append(Domain(first, table.cost[i][order], table.memory[i][order], table.buffer[i][order], order))
        representatives.append(order[first[:-1]])
    edges = []
    for (i, j), parts in merged.items():
        index = np.ix_(representatives[i], representatives[j])
        edges.append((i, j, np.sum([a.T[index] if flipped else a[index] for a, flipped in parts], axis=0)))
    return Reduced(tuple(domains), tuple(edges))


def _equal_rows(array: np.ndarray) -> np.ndarray:
    """The index of each row among the distinct rows."""
    return np.unique(array, axis=0, return_inverse=True)[1].ravel()


def _scores(plan: Elimination, reduced: Reduced, weights: Weights) -> tuple[np.ndarray, ...]:
    """For every variable and option the least score of the choices with this option (a lower bound, if the plan is inexact)."""
    tables = plan.upward(weights)
    outside = plan.downward(tables)
    of_domain: dict[int, np.ndarray] = {}
    for number, node in enumerate(plan.factors):
        if not isinstance(node, Node):
            continue
        held = [(leaf, axes) for child, axes in node.inputs if (leaf := _own_costs(plan, child)) is not None]
        if held:
            whole = plan.join(node, tables) + outside[number]
            for domain, axes in held:
                of_domain[id(domain)] = node.reduce(whole, axes)
    result = []
    for domain in reduced.domains:
        own = weights.score(domain)
        best = np.minimum.reduceat(own, domain.first[:-1])
        sizes = np.diff(domain.first)
        with np.errstate(invalid="ignore"):
            excess = np.where(np.isfinite(own), own - np.repeat(best, sizes), np.inf)
        scores = np.empty(len(own))
        scores[domain.option] = np.repeat(of_domain[id(domain)], sizes) + excess
        result.append(scores)
    return tuple(result)


def _own_costs(plan: Elimination, factor: int) -> Domain | None:
    leaf = plan.factors[factor]
    return leaf.domain if isinstance(leaf, Leaf) else None


def nearest(
    table: CostTable,
    bounds: Marginals,
    chosen: tuple[int, ...],
    count: int,
    *,
    variables: Sequence[int] | None = None,
    floor: float = -math.inf,
    deadline: float = math.inf,
) -> tuple[tuple[Forced, ...], ...]:
    """The options of least regret of each variable, in ascending order, without the chosen option.

    Args:
        table: the cost table.
        bounds: its :func:`marginals`.
        chosen: the choice to compare with.
        count: number of options per variable; fewer are returned if fewer fit.
        variables: the variables to examine; None for all.
        floor: a valid lower bound on the cost of all choices [s].
        deadline: end time on the clock ``time.perf_counter``, shared evenly by the variables.  After it an option counts with
            the best choice found so far that has it (at least ``chosen`` with this option changed, if that fits), which is an
            upper bound.

    Raises:
        SearchError: the table is invalid (`check_table`).
    """
    searches = _Searches(table, bounds, chosen, floor)
    wanted = range(len(table.names)) if variables is None else variables
    found = []
    for number, variable in enumerate(wanted):
        # Share the remaining time evenly, so that no variable uses up that of later ones.
        now = time.perf_counter()
        share = deadline if deadline == math.inf else now + (deadline - now) / (len(wanted) - number)
        found.append(searches.nearest(variable, count, share))
    return tuple(found)


class _Searches:
    """Searches with one variable fixed, and the choices that they have found."""

    def __init__(self, table: CostTable, bounds: Marginals, chosen: tuple[int, ...], floor: float) -> None:
        self.table, self.bounds, self.chosen, self.floor = table, bounds, chosen, floor
        self.limit = math.inf if bounds.memory_limit is None else bounds.memory_limit
        # The cheapest choice found within the limit, by variable and option.
        self.found: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        self._consider(chosen)

    def nearest(self, variable: int, count: int, deadline: float) -> tuple[Forced, ...]:
        """The ``count`` nearest options of one variable."""
        if count == 0:
            return ()
        within = self.bounds.within[variable]
        found: list[Forced] = []
        for option in map(int, np.argsort(within, kind="stable")):
            worst = found[count - 1].cost if len(found) >= count else math.inf
            if within[option] >= worst or within[option] == math.inf:
                break
            if option == self.chosen[variable]:
                continue
            one = self._forced(variable, option, worst, deadline)
            if one.choice is not None:
                found = sorted((*found, one), key=lambda one: one.cost)
        return tuple(found[:count])

    def _forced(self, variable: int, option: int, worst: float, deadline: float) -> Forced:
        """The best choice with the variable fixed, or a proof that it costs ``worst`` or more (then there may be no choice)."""
        self._consider((*self.chosen[:variable], option, *self.chosen[variable + 1 :]))
        bound = max(float(self.bounds.within[variable][option]), self.floor)
        cutoff = min(self._best(variable, option)[0], worst)
        left = deadline - time.perf_counter()
        if left > 0 and cutoff > bound * (1 + PROOF_TOLERANCE):
            result = exact(
                _fixed(self.table, variable, option),
                memory_limit=self.bounds.memory_limit,
                time_limit=None if left == math.inf else left,
                cutoff=cutoff * (1 + PROOF_TOLERANCE),
            )
            bound = max(bound, result.lower_bound)
            if result.choice is not None:
                self._consider((*result.choice[:variable], option, *result.choice[variable + 1 :]))
        cost, choice = self._best(variable, option)
        return Forced(variable, option, choice, cost, min(bound, cost))

    def _best(self, variable: int, option: int) -> tuple[float, tuple[int, ...] | None]:
        return self.found.get((variable, option), (math.inf, None))

    def _consider(self, choice: tuple[int, ...]) -> None:
        cost = self.table.evaluate(choice)
        if not math.isfinite(cost) or self.table.peak_memory(choice) > self.limit:
            return
        for key in enumerate(choice):
            if cost < self._best(*key)[0]:
                self.found[key] = (cost, choice)


def _fixed(table: CostTable, variable: int, option: int) -> CostTable:
    """The table in which the variable has only this option."""

    def of_one(columns: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return (*columns[:variable], columns[variable][option : option + 1], *columns[variable + 1 :])

    edges = tuple(
        Edge(e.source, e.target, e.cost[option : option + 1])
        if e.source == variable
        else Edge(e.source, e.target, e.cost[:, option : option + 1])
        if e.target == variable
        else e
        for e in table.edges
    )
    return CostTable(table.names, of_one(table.cost), of_one(table.memory), of_one(table.buffer), edges)
