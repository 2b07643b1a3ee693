"""What the optimum becomes when one variable is held at one option: the *regret* of every alternative.

For variable i and option a,

    forced(i, a) = min { cost(x) : x_i = a, memory(x) <= M },        regret(i, a) = forced(i, a) - cost(chosen).

**Bounds for all pairs at once.**  Without the limit, ``forced(i, .)`` are the *min-marginals* of the table.  One pass up and one
pass down an elimination give them for every variable (see `elimination`: inside + outside of the factor that holds i's own costs,
minimised over everything but i).  With the limit, three of them bound it from below, for resident memory m and buffers
``b = max(buffer_i[a], max_j min buffer_j)``:

* the cost alone;
* the Lagrangian score ``cost + lambda* m`` less ``lambda* (M - b)``, at the multiplier of the whole table's dual;
* the memory alone: where its min-marginal + b is over M nothing fits.

The options must be all there, and so must the variables: nothing is pruned, nothing is shared.  Options that all edges treat alike
still form classes.

**Exact values for the nearest.**  Options are taken by ascending bound and searched exactly, the variable held; once the next
bound is not below the worst of the ``count`` best, the rest cannot be nearer.  Every choice that is met holds all its variables at
some option, so it is an upper bound for each of them: most searches have only to show that there is nothing better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.table import CostTable, Edge

from .elimination import Leaf, Node, Plan, Weights, compile_plan
from .exact import exact
from .lagrangian import MAX_ENTRIES, MAX_RELAXED_ENTRIES, Interval, prepare, solve_dual
from .reduction import Domain, Reduced, check_table
from .result import PROOF_TOLERANCE

__all__ = ["Forced", "Marginals", "marginals", "nearest"]


@dataclass(frozen=True)
class Forced:
    """The best choice that holds one variable at one option.

    Attributes:
        variable, option: what is held.
        choice, cost: the best choice within the limit that was found, and its cost [s]; None and inf where there is none.
        lower_bound: no such choice costs less [s].
    """

    variable: int
    option: int
    choice: tuple[int, ...] | None
    cost: float
    lower_bound: float

    @property
    def is_exact(self) -> bool:
        """Whether the cost is proven the least."""
        return self.lower_bound >= self.cost * (1 - PROOF_TOLERANCE)


@dataclass(frozen=True, eq=False)
class Marginals:
    """Lower bounds on ``forced(i, a)`` [s] for every variable and option, without and within the memory limit.

    ``free[i]`` is exact where ``is_exact``; ``within[i]`` is inf where nothing fits.  ``multiplier`` [s/byte] is what a byte of
    memory is worth (the dual's, 0 where the limit does not bind).
    """

    free: tuple[np.ndarray, ...]
    within: tuple[np.ndarray, ...]
    multiplier: float
    memory_limit: float | None
    is_exact: bool


def marginals(table: CostTable, memory_limit: float | None = None) -> Marginals:
    """Bounds for every variable and option; three eliminations of the table, two where the limit does not bind.

    Raises: SearchError, for a table that no search can treat.
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
    """The dual's, of the whole table; 0 where no limit binds or nothing fits."""
    instance = prepare(table)
    if instance is None:
        return 0.0
    highest = float(instance.buffers[-1]) if len(instance.buffers) else 0.0
    dual = solve_dual(instance, Interval(instance.lowest_buffer, highest), memory_limit)
    return dual.multiplier if math.isfinite(dual.bound) else 0.0


def _classes(table: CostTable) -> Reduced:
    """The table with equal options in classes, parallel edges merged, nothing dropped, and a domain for every variable."""
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
    """The number of the set of equal rows that each row belongs to."""
    return np.unique(array, axis=0, return_inverse=True)[1].ravel()


def _scores(plan: Plan, reduced: Reduced, weights: Weights) -> tuple[np.ndarray, ...]:
    """For every variable and option the least score of all choices with it (a lower bound, if the plan is inexact)."""
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


def _own_costs(plan: Plan, factor: int) -> Domain | None:
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
    """For each of the variables (all of them) the ``count`` options of least regret, but the chosen one, ascending.

    There are fewer where fewer fit.  No choice is known to cost less than ``floor`` [s] (the optimum, where it is known).  After
    the deadline (of ``time.perf_counter``; each variable may use its share of what is left) an option counts with the best choice
    met so far that has it, which may be the chosen one with this alone changed: an upper bound; the marginals give the lower one.

    Raises: SearchError, for a table that no search can treat.
    """
    searches = _Searches(table, bounds, chosen, floor)
    wanted = range(len(table.names)) if variables is None else variables
    found = []
    for number, variable in enumerate(wanted):
        # No variable may use up the time of those behind it.
        now = time.perf_counter()
        share = deadline if deadline == math.inf else now + (deadline - now) / (len(wanted) - number)
        found.append(searches.nearest(variable, count, share))
    return tuple(found)


class _Searches:
    """Searches with one variable held, and the choices that they have met."""

    def __init__(self, table: CostTable, bounds: Marginals, chosen: tuple[int, ...], floor: float) -> None:
        self.table, self.bounds, self.chosen, self.floor = table, bounds, chosen, floor
        self.limit = math.inf if bounds.memory_limit is None else bounds.memory_limit
        #: The cheapest choice within the limit that was met, by variable and option.
        self.met: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        self._meet(chosen)

    def nearest(self, variable: int, count: int, deadline: float) -> tuple[Forced, ...]:
        """Of one variable."""
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
        """The least cost with the variable held, or that it is not below ``worst`` (then there may be no choice)."""
        self._meet((*self.chosen[:variable], option, *self.chosen[variable + 1 :]))
        bound = max(float(self.bounds.within[variable][option]), self.floor)
        cutoff = min(self._met(variable, option)[0], worst)
        left = deadline - time.perf_counter()
        if left > 0 and cutoff > bound * (1 + PROOF_TOLERANCE):
            result = exact(
                _hold(self.table, variable, option),
                memory_limit=self.bounds.memory_limit,
                time_limit=None if left == math.inf else left,
                cutoff=cutoff * (1 + PROOF_TOLERANCE),
            )
            bound = max(bound, result.lower_bound)
            if result.choice is not None:
                self._meet((*result.choice[:variable], option, *result.choice[variable + 1 :]))
        cost, choice = self._met(variable, option)
        return Forced(variable, option, choice, cost, min(bound, cost))

    def _met(self, variable: int, option: int) -> tuple[float, tuple[int, ...] | None]:
        return self.met.get((variable, option), (math.inf, None))

    def _meet(self, choice: tuple[int, ...]) -> None:
        cost = self.table.evaluate(choice)
        if not math.isfinite(cost) or self.table.peak_memory(choice) > self.limit:
            return
        for key in enumerate(choice):
            if cost < self._met(*key)[0]:
                self.met[key] = (cost, choice)


def _hold(table: CostTable, variable: int, option: int) -> CostTable:
    """The table with one option left to the variable."""

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
