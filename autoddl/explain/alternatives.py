"""Finds the alternative strategies of each layer of a plan, and their regret.

The *regret* of an alternative is the cost of the plan with it, minus the cost of the plan.  The cost is the step, or its
communication if the plan minimises that.  For an alternative,

1. the layer, and all layers that are tied to it, get the other strategy, in their stage and in all equal stages;
2. the strategies of the other layers of the stage are chosen again, for the least cost in the stage's table (:mod:`.stagetable`,
   :mod:`autoddl.search.marginals`) within the memory of the stage;
3. cut, schedule, micro-batch, recomputation and all other stages stay as they are.

**One stage.**  The cost in the table is the cost of the plan (if the table is exact, see :mod:`.stagetable`), so the result is the
best plan with the alternative, and the regret is exact.  It is not the cost of changing one layer alone, which would leave its
neighbours in unsuitable layouts.  If the time limit ends a search, the regret is an upper bound, with a proven lower bound.

**Several stages.**  The whole plan is evaluated again and its schedule simulated.  The regret is an upper bound, since a plan with
other choices in this stage or in others may be better.  Alternatives in a stage that does not limit the pipeline may cost nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoddl.costmodel.problem import Problem, Variable
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.joint.evaluation import Evaluation, evaluate
from autoddl.pipelines.joint.partition import ENTRY, Chain, chain_of
from autoddl.search.marginals import Forced, Marginals, marginals, nearest

from .choices import Alternative, Choice, MemoryPrice, StageChoices
from .groups import StageGroup, group_name
from .resources import ResourceBook
from .stagetable import LayerChoices, stage_table
from .steptime import step_parts
from .view import PlanView

__all__ = ["explain_stages"]

#: Differences of costs below this part of the cost are rounding errors.
_ROUNDING_SHARE = 1e-9
#: Share of the time limit for the search if the alternatives must be simulated afterwards.
_SEARCH_SHARE = 0.5


def explain_stages(
    view: PlanView, stage_group: StageGroup, *, count: int = 3, layer: str | None = None, time_limit_s: float = math.inf
) -> StageChoices:
    """Return the choices of a group of equal stages, in graph order, each with its ``count`` alternatives of least regret.

    Args:
        view: the plan.
        stage_group: the stages, one of ``view.stage_groups``.
        count: number of alternatives per choice.
        layer: name of a choice, or of a layer of any of the stages; None for all choices.
        time_limit_s: after it regrets of a single stage are upper bounds, and alternatives not yet simulated are left out.
    """
    start, proof = time.perf_counter(), view.certificate
    first_stage = stage_group.stages[0]
    table = stage_table(
        view.evaluation,
        first_stage,
        view.objective,
        view.memory_limit_bytes,
        view.strategy_space,
        executor=view.plan.executor,
    )
    problem = table.problem
    # Choices: group equal variables with equal strategies.
    groups = _equal_variables(problem, table.chosen)
    if layer is not None:
        groups = _groups_named(problem, groups, _names_in_first_stage(view.evaluation, stage_group.stages, layer))
    if not groups:
        return StageChoices(stage_group.title, stage_group.stages, (), None)
    # Search: hold one variable of each group at each of its options, and choose the others for the least cost of the table.
    held = [group[len(group) // 2] for group in groups]
    bounds = marginals(problem.table, table.memory_limit_bytes)
    is_optimal = table.is_exact and proof is not None and proof.optimal
    searched = nearest(
        problem.table,
        bounds,
        table.chosen,
        count,
        variables=held,
        floor=problem.table.evaluate(table.chosen) if is_optimal else -math.inf,
        deadline=start + (1.0 if table.is_exact else _SEARCH_SHARE) * time_limit_s,
    )
    # Price: evaluate the whole plan with each alternative.
    pricing = _Pricing(view, stage_group.stages, table, bounds, start + time_limit_s)
    choices = tuple(pricing.choice(group, variable, forced) for group, variable, forced in zip(groups, held, searched))
    price = MemoryPrice(float(bounds.free[0].min()), bounds.is_exact, bounds.multiplier) if table.is_exact else None
    return StageChoices(stage_group.title, stage_group.stages, choices, price)


def _equal_variables(problem: Problem, chosen: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Groups of variables, in graph order: repetitions of a layer with equal strategies are one group, unless they are tied."""
    groups: dict[object, list[int]] = {}
    position = {layer.name: k for k, layer in enumerate(problem.graph.layers)}
    for i in sorted(range(len(problem.variables)), key=lambda i: position[problem.variables[i].layers[0]]):
        variable = problem.variables[i]
        first = problem.graph[variable.layers[0]]
        is_repetition = len(variable.layers) == 1 and first.block
        key = (first.block, first.role, variable.options[chosen[i]]) if is_repetition else i
        groups.setdefault(key, []).append(i)
    return [tuple(group) for group in groups.values()]


def _names_in_first_stage(evaluation: Evaluation, stages: Sequence[int], layer: str) -> set[str]:
    """The given name, and if it is a layer of one of these equal stages, the name of the same layer in the first stage."""
    names_by_stage = ([one.name for one in evaluation.stages[stage].graph.layers] for stage in stages)
    return {layer, *(names[0] for names in zip(*names_by_stage) if layer in names)}


def _groups_named(problem: Problem, groups: Sequence[tuple[int, ...]], names: set[str]) -> list[tuple[int, ...]]:
    """The groups with one of these names; if there is none, the single variables with one of these names, or a layer of it."""
    named_groups = [group for group in groups if _group_name(problem, group) in names]
    return named_groups or [
        (i,)
        for i, variable in enumerate(problem.variables)
        if not names.isdisjoint((variable.name, *variable.layers, *variable.name.split(" = ")))
    ]


def _group_name(problem: Problem, group: Sequence[int]) -> str:
    if len(group) > 1:
        return group_name([problem.graph[problem.variables[i].layers[0]] for i in group])
    return _display_name(problem.variables[group[0]])


def _display_name(variable: Variable) -> str:
    return "tensor that arrives" if variable.name == ENTRY else variable.name


@dataclass(frozen=True)
class _Figures:
    """The cost of a whole plan [s], its time on each resource [s], and its peak memory."""

    cost_s: float
    resources_s: Mapping[str, float]
    memory_bytes: float


@dataclass(frozen=True, eq=False)
class _Pricing:
    """Evaluates the whole plan with other strategies in a group of equal stages.

    Attributes:
        view: the plan.
        stages: numbers of the stages.
        table: the table of the first stage.
        bounds: the min-marginals of the table.
        deadline: end time of simulations, on the clock ``time.perf_counter``.
    """

    view: PlanView
    stages: tuple[int, ...]
    table: LayerChoices
    bounds: Marginals
    deadline: float

    @property
    def problem(self) -> Problem:
        return self.table.problem

    @property
    def chosen(self) -> tuple[int, ...]:
        return self.table.chosen

    @cached_property
    def book(self) -> ResourceBook:
        return ResourceBook(self.problem.graph, self.problem.cluster, self.problem.workload)

    @cached_property
    def chosen_seconds(self) -> Mapping[str, np.ndarray]:
        """For every layer its time per step on each resource, with the strategies of the plan."""
        return self.book.seconds(self.problem.strategies(self.chosen))

    @cached_property
    def before(self) -> _Figures:
        """The figures of the plan as it is."""
        return self._figures(self.chosen)

    @cached_property
    def _chain(self) -> Chain:
        return chain_of(self.view.plan.graph)

    def choice(self, group: tuple[int, ...], held: int, searched: Sequence[Forced]) -> Choice:
        """The choice of a group of variables, with the alternatives that were found for the variable ``held``."""
        variables = [self.problem.variables[i] for i in group]
        layers = tuple(name for variable in variables for name in variable.layers)
        alternatives = (self._alternative(forced) for forced in searched)
        return Choice(
            name=_group_name(self.problem, group),
            layers=layers,
            held=self.problem.variables[held].layers,
            strategy=variables[0].options[self.chosen[group[0]]],
            resources_s=self._named(np.sum([self.chosen_seconds[layer] for layer in layers], axis=0)),
            num_options=len(variables[0].options),
            num_fitting=int(np.isfinite(self.bounds.within[held]).sum()),
            alternatives=tuple(sorted((one for one in alternatives if one is not None), key=lambda one: one.regret_s)),
        )

    def _alternative(self, forced: Forced) -> Alternative | None:
        """The alternative; None if the plan with it does not fit in memory, or no time is left to simulate it."""
        assert forced.choice is not None
        is_exact, before = self.table.is_exact, self.before
        if not is_exact and time.perf_counter() > self.deadline:
            return None
        after = self._figures(forced.choice)
        if after.memory_bytes > self.view.memory_limit_bytes:
            return None
        names = dict.fromkeys((*before.resources_s, *after.resources_s))
        deltas = {name: after.resources_s.get(name, 0.0) - before.resources_s.get(name, 0.0) for name in names}
        regret_s = self._rounded(after.cost_s - before.cost_s)
        return Alternative(
            strategy=self.problem.variables[forced.variable].options[forced.option],
            regret_s=regret_s,
            least_regret_s=self._rounded(forced.lower_bound - before.cost_s) if is_exact else None,
            is_exact=is_exact and forced.is_exact,
            deltas_s=deltas,
            memory_bytes=after.memory_bytes,
            moved=tuple(
                _display_name(other)
                for i, other in enumerate(self.problem.variables)
                if forced.choice[i] != self.chosen[i] and i != forced.variable
            ),
            limit=self._limit(forced, regret_s, deltas),
        )

    def _limit(self, forced: Forced, regret_s: float, deltas: Mapping[str, float]) -> str:
        """The value of :attr:`Alternative.limit`."""
        unlimited_s = self.bounds.free[forced.variable]
        memory_binds = self.table.is_exact and self.bounds.multiplier
        chosen_option = self.chosen[forced.variable]
        if memory_binds and unlimited_s[forced.option] <= unlimited_s[chosen_option] * (1 + _ROUNDING_SHARE):
            return "memory"
        largest = max(deltas, key=deltas.__getitem__)
        return largest if regret_s > 0 and deltas[largest] > _ROUNDING_SHARE * self.before.cost_s else ""

    def _rounded(self, difference: float) -> float:
        """The difference of two costs; 0 if it is a rounding error."""
        return 0.0 if abs(difference) <= _ROUNDING_SHARE * self.before.cost_s else difference

    def _figures(self, choice: tuple[int, ...]) -> _Figures:
        """The figures of the whole plan with this choice in the stages: from the table if it is exact, else by simulation."""
        strategies = self.problem.strategies(choice)
        if self.table.is_exact:
            table, seconds = self.problem.table, self.book.total(strategies)
            return _Figures(table.evaluate(choice), self._named(seconds), table.peak_memory(choice))
        after = self._evaluated(strategies)
        parts = {part.name: part.seconds for part in step_parts(after)}
        return _Figures(after.cost(self.view.objective), parts, after.memory_bytes)

    def _evaluated(self, strategies: Mapping[str, Strategy]) -> Evaluation:
        """Evaluate the plan with the first stage's ``strategies`` in all the stages, layer by layer in graph order."""
        evaluation = self.view.evaluation
        configuration, changed = evaluation.configuration, list(evaluation.configuration.stages)
        for stage in self.stages:
            names = (layer.name for layer in evaluation.stages[stage].graph.graph.layers)
            changed[stage] = replace(changed[stage], strategies=dict(zip(names, strategies.values())))
        return evaluate(self._chain, evaluation.cluster, replace(configuration, stages=tuple(changed)))

    def _named(self, seconds: np.ndarray) -> dict[str, float]:
        """The times of the resources by their names."""
        return dict(zip(self.book.names, map(float, seconds)))
