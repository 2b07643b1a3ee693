"""What every choice of a plan is worth: the alternatives of each layer, and what they would cost.

The *regret* of an alternative is how much longer the best plan that has it is than this plan: the layer (with all that are tied to
it) is held there, everything else is chosen anew, under the same memory limit, at the plan's micro-batch and recomputation
(:mod:`autoddl.search.marginals`).  So it is exact, not the price of changing one layer and leaving its neighbours in the wrong
layout; where time runs out it is an interval, and says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import Problem, Variable
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.search.marginals import Forced, Marginals, marginals, nearest

from .resources import ResourceBook

__all__ = [
    "Alternative",
    "Choice",
    "MemoryPrice",
    "answers_to",
    "explain_choices",
    "matching",
    "memory_price",
    "problem_of",
]

#: Regrets below this part of the cost are differences of rounding.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Alternative:
    """A strategy that a layer could have had.

    Attributes:
        strategy: of the first of the layers that are tied together.
        regret_s: how much more the best plan with it costs [s] (of what the plan minimises); less than 0 where the plan is not
            optimal.
        least_regret_s: a proven lower bound; equal where ``is_exact``; None where none is known.
        deltas_s: what the step spends more on each resource [s].
        memory_bytes: of that plan, on each device.
        moved: the choices, by name, that change along with it.
        limit: what speaks against it: the resource that grows the most; ``memory`` where it would be as good without the memory
            limit; empty where nothing does.
    """

    strategy: Strategy
    regret_s: float
    least_regret_s: float | None
    is_exact: bool
    deltas_s: Mapping[str, float]
    memory_bytes: float
    moved: tuple[str, ...]
    limit: str


@dataclass(frozen=True)
class Choice:
    """One choice of the plan: layers that are tied together, or equal ones of which one stands for all.

    Attributes:
        name: of the block and role, or of the first layer.
        layers: all of them, by name.
        held: those that an alternative moves (one, where every repetition has a choice of its own).
        strategy: of the first.
        resources_s: seconds per step of each resource, of all layers.
        num_options, num_fitting: strategies on offer, and those with which anything fits the memory limit.
        alternatives: the nearest ones, ascending.
    """

    name: str
    layers: tuple[str, ...]
    held: tuple[str, ...]
    strategy: Strategy
    resources_s: Mapping[str, float]
    num_options: int
    num_fitting: int
    alternatives: tuple[Alternative, ...]

    @property
    def seconds(self) -> float:
        """Of all its layers, per step."""
        return sum(self.resources_s.values())

    @property
    def limit(self) -> str:
        """The resource that takes the largest part of its time; empty where it takes none."""
        return max(self.resources_s, key=self.resources_s.__getitem__) if self.seconds else ""


@dataclass(frozen=True)
class MemoryPrice:
    """What the memory limit costs, at the plan's micro-batch and recomputation.

    Attributes:
        unlimited_s: a lower bound on the cost [s] without the limit; the optimum then where ``is_exact``.
        seconds_per_byte: how much a byte more would save, to first order; 0 where the limit does not bind.
    """

    unlimited_s: float
    is_exact: bool
    seconds_per_byte: float


def problem_of(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    strategies: Mapping[str, Strategy],
    objective: str,
    space_size: int | None = None,
) -> tuple[Problem, tuple[int, ...]]:
    """The table that a plan was found on, and the plan in it.

    A plan does not say whether its layers were tied, or Summa was on offer; but the size of its space does, where it is known.

    Raises:
        UserError: no table has these strategies.
    """
    found: list[tuple[Problem, tuple[int, ...]]] = []
    fault: UserError | None = None
    for untied, summa in ((False, False), (False, True), (True, False), (True, True)):
        try:
            problem = PriceBook(graph, cluster, workload, untied, summa).problem(
                workload.batch, workload.micro_batch, objective
            )
            found.append((problem, problem.choice(strategies)))
        except UserError as error:
            fault = error
            continue
        if space_size is None or problem.table.space_size == space_size:
            return found[-1]
    if not found:
        assert fault is not None
        raise fault
    return found[0]


def answers_to(variable: Variable, name: str) -> bool:
    """Whether a choice is called so: by its own name, or by that of one of its layers."""
    return name in (variable.name, *variable.layers, *variable.name.split(" = "))


def matching(problem: Problem, name: str) -> list[int]:
    """The variables that answer to a name.

    Raises:
        UserError: there is none.
    """
    found = [i for i, variable in enumerate(problem.variables) if answers_to(variable, name)]
    if not found:
        names = [variable.name for variable in problem.variables]
        known = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise UserError(f"{problem.graph.name} has no layer {name!r}; its choices are {known}")
    return found


def memory_price(bounds: Marginals) -> MemoryPrice:
    """What the limit costs, from the marginals."""
    return MemoryPrice(float(bounds.free[0].min()), bounds.is_exact, bounds.multiplier)


def explain_choices(
    problem: Problem,
    chosen: tuple[int, ...],
    memory_limit_bytes: float,
    *,
    count: int = 3,
    variables: Sequence[int] | None = None,
    time_limit_s: float = math.inf,
    is_optimal: bool = False,
) -> tuple[tuple[Choice, ...], MemoryPrice]:
    """The choices of a plan, in the order of the graph, each with its ``count`` nearest alternatives; and the price of memory.

    Args:
        variables: only those of the problem; by default one of each set of equal ones.
        time_limit_s: for all searches; what has not been proven by then is given as an interval.
        is_optimal: whether the plan is known to be the optimum: then no regret is below 0.
    """
    deadline = time.perf_counter() + time_limit_s
    bounds = marginals(problem.table, memory_limit_bytes)
    groups = _groups(problem, chosen) if variables is None else [(i,) for i in variables]
    middle = [group[len(group) // 2] for group in groups]
    floor = problem.table.evaluate(chosen) if is_optimal else -math.inf
    searched = nearest(problem.table, bounds, chosen, count, variables=middle, floor=floor, deadline=deadline)
    context = _Context(problem, chosen, bounds)
    choices = tuple(context.choice(group, i, found) for group, i, found in zip(groups, middle, searched))
    return choices, memory_price(bounds)


def _groups(problem: Problem, chosen: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Variables of equal place in their blocks and equal strategy, together; in the order of the graph."""
    groups: dict[object, list[int]] = {}
    position = {layer.name: k for k, layer in enumerate(problem.graph.layers)}
    for i in sorted(range(len(problem.variables)), key=lambda i: position[problem.variables[i].layers[0]]):
        variable = problem.variables[i]
        first = problem.graph[variable.layers[0]]
        alone = len(variable.layers) == 1 and first.block
        key = (first.block, first.role, variable.options[chosen[i]]) if alone else i
        groups.setdefault(key, []).append(i)
    return [tuple(group) for group in groups.values()]


class _Context:
    """What choices are described by."""

    def __init__(self, problem: Problem, chosen: tuple[int, ...], bounds: Marginals):
        self.problem, self.chosen, self.bounds = problem, chosen, bounds
        self.book = ResourceBook(problem.graph, problem.cluster, problem.workload)
        strategies = problem.strategies(chosen)
        self.by_layer = self.book.seconds(strategies)
        self.total = np.sum(list(self.by_layer.values()), axis=0)
        self.cost = problem.table.evaluate(chosen)

    def choice(self, group: tuple[int, ...], held: int, found: Sequence[Forced]) -> Choice:
        variables = [self.problem.variables[i] for i in group]
        layers = tuple(name for variable in variables for name in variable.layers)
        first = self.problem.graph[layers[0]]
        name = f"{first.block}.*.{first.role}" if len(group) > 1 else variables[0].name
        seconds = np.sum([self.by_layer[layer] for layer in layers], axis=0)
        return Choice(
            name=name,
            layers=layers,
            held=self.problem.variables[held].layers,
            strategy=variables[0].options[self.chosen[group[0]]],
            resources_s=self._named(seconds),
            num_options=len(variables[0].options),
            num_fitting=int(np.isfinite(self.bounds.within[held]).sum()),
            alternatives=tuple(self._alternative(one) for one in found),
        )

    def _alternative(self, found: Forced) -> Alternative:
        assert found.choice is not None
        problem, variable = self.problem, self.problem.variables[found.variable]
        deltas = self._named(self.book.total(problem.strategies(found.choice)) - self.total)
        moved = (
            other.name
            for i, other in enumerate(problem.variables)
            if found.choice[i] != self.chosen[i] and i != found.variable
        )
        return Alternative(
            strategy=variable.options[found.option],
            regret_s=self._rounded(found.cost - self.cost),
            least_regret_s=self._rounded(found.lower_bound - self.cost),
            is_exact=found.is_exact,
            deltas_s=deltas,
            memory_bytes=problem.table.peak_memory(found.choice),
            moved=tuple(moved),
            limit=self._limit(found, deltas),
        )

    def _limit(self, found: Forced, deltas: Mapping[str, float]) -> str:
        free = self.bounds.free[found.variable]
        if self.bounds.multiplier and free[found.option] <= free[self.chosen[found.variable]] * (1 + _EQUAL):
            return "memory"
        largest = max(deltas, key=deltas.__getitem__)
        return largest if deltas[largest] > _EQUAL * self.cost and found.cost > self.cost * (1 + _EQUAL) else ""

    def _rounded(self, difference: float) -> float:
        return 0.0 if abs(difference) <= _EQUAL * self.cost else difference

    def _named(self, seconds: np.ndarray) -> dict[str, float]:
        return dict(zip(self.book.names, map(float, seconds)))
