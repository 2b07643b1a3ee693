"""What every choice of a plan is worth: the alternatives of each layer, and what they would cost.

The *regret* of an alternative is how much longer the plan takes with it (its step, or its communication where that was minimised):
the layer, with all that are tied to it, is held there in its stage and in all that are equal; the other layers of the stage are
chosen anew within the memory that the stage has, to the least cost of its table (:mod:`.stagetable`,
:mod:`autoddl.search.marginals`).  Cut, schedule, micro-batch, recomputation and other stages stay.

**With one stage** that is the best plan with the alternative: the step is the sum that the table has.  So the regret is exact, not
the price of changing one layer and leaving its neighbours in the wrong layout; where time runs out it is an interval, and says so.

**With several stages** the whole plan is priced again, and its schedule simulated.  Another plan with the alternative may be
better (another choice in the stage, which the schedule favours, or in other stages), so the regret is an upper bound.  Where a
stage does not hold up the pipeline, alternatives may cost nothing.
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

#: Regrets below this part of the cost are differences of rounding.
_EQUAL = 1e-9
#: The part of the time that the search has where its answers must be simulated afterwards.
_SEARCHING = 0.5


def explain_stages(
    view: PlanView, stage_group: StageGroup, *, count: int = 3, layer: str | None = None, time_limit_s: float = math.inf
) -> StageChoices:
    """The choices of equal stages, in the order of the graph, each with its ``count`` nearest alternatives.

    Args:
        layer: the name of a choice, or of a layer of any of the stages; all choices by default.
        time_limit_s: after it exact regrets are intervals, and alternatives that were not simulated are left out.
    """
    start, proof = time.perf_counter(), view.certificate
    space_size = None if proof is None or view.has_pipeline else proof.space_size
    table = stage_table(view.evaluation, stage_group.stages[0], view.objective, view.memory_limit_bytes, space_size)
    problem = table.problem
    # Choices: each set of equal variables once.
    groups = _equal_variables(problem, table.chosen)
    if layer is not None:
        groups = _matching(problem, groups, _names_in_first(view.evaluation, stage_group.stages, layer))
    if not groups:
        return StageChoices(stage_group.title, stage_group.stages, (), None)
    held = [group[len(group) // 2] for group in groups]
    # Search: for each held variable the options of least cost, everything else of the table chosen anew.
    bounds = marginals(problem.table, table.memory_limit_bytes)
    is_optimal = table.is_exact and proof is not None and proof.optimal
    searched = nearest(
        problem.table,
        bounds,
        table.chosen,
        count,
        variables=held,
        floor=problem.table.evaluate(table.chosen) if is_optimal else -math.inf,
        deadline=start + (1.0 if table.is_exact else _SEARCHING) * time_limit_s,
    )
    # Price: the whole plan with each of them.
    pricing = _Pricing(view, stage_group.stages, table, bounds, start + time_limit_s)
    choices = tuple(pricing.choice(group, i, found) for group, i, found in zip(groups, held, searched))
    price = MemoryPrice(float(bounds.free[0].min()), bounds.is_exact, bounds.multiplier) if table.is_exact else None
    return StageChoices(stage_group.title, stage_group.stages, choices, price)


def _equal_variables(problem: Problem, chosen: tuple[int, ...]) -> list[tuple[int, ...]]:
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


def _names_in_first(evaluation: Evaluation, stages: Sequence[int], layer: str) -> set[str]:
    """What a layer of equal stages is called in the first of them, where the table is; and a name of anything else."""
    places = zip(*([one.name for one in evaluation.stages[stage].graph.layers] for stage in stages))
    return {layer, *(names[0] for names in places if layer in names)}


def _matching(problem: Problem, groups: Sequence[tuple[int, ...]], names: set[str]) -> list[tuple[int, ...]]:
    """The groups of one of these names; or else the single variables that have it, or a layer of it."""
    whole = [group for group in groups if _group_name(problem, group) in names]
    return whole or [
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
    """What a whole plan costs [s], by resource too, and its memory [bytes]."""

    cost_s: float
    resources_s: Mapping[str, float]
    memory_bytes: float


@dataclass(frozen=True, eq=False)
class _Pricing:
    """The whole plan with other choices in equal stages.

    Attributes:
        table, bounds: of the first of the stages.
        deadline: of ``time.perf_counter``, for what must be simulated.
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
    def by_layer(self) -> Mapping[str, np.ndarray]:
        """Seconds per step of each resource, as chosen."""
        return self.book.seconds(self.problem.strategies(self.chosen))

    @cached_property
    def before(self) -> _Figures:
        """Of the plan as it is."""
        return self._figures(self.chosen)

    @cached_property
    def _chain(self) -> Chain:
        return chain_of(self.view.plan.graph)

    def choice(self, group: tuple[int, ...], held: int, found: Sequence[Forced]) -> Choice:
        variables = [self.problem.variables[i] for i in group]
        layers = tuple(name for variable in variables for name in variable.layers)
        alternatives = (self._alternative(one) for one in found)
        return Choice(
            name=_group_name(self.problem, group),
            layers=layers,
            held=self.problem.variables[held].layers,
            strategy=variables[0].options[self.chosen[group[0]]],
            resources_s=self._named(np.sum([self.by_layer[layer] for layer in layers], axis=0)),
            num_options=len(variables[0].options),
            num_fitting=int(np.isfinite(self.bounds.within[held]).sum()),
            alternatives=tuple(sorted((one for one in alternatives if one is not None), key=lambda one: one.regret_s)),
        )

    def _alternative(self, found: Forced) -> Alternative | None:
        """None where the whole plan does not fit, or there is no time left to simulate it."""
        assert found.choice is not None
        is_exact, before = self.table.is_exact, self.before
        if not is_exact and time.perf_counter() > self.deadline:
            return None
        after = self._figures(found.choice)
        if after.memory_bytes > self.view.memory_limit_bytes:
            return None
        names = dict.fromkeys((*before.resources_s, *after.resources_s))
        deltas = {name: after.resources_s.get(name, 0.0) - before.resources_s.get(name, 0.0) for name in names}
        regret_s = self._rounded(after.cost_s - before.cost_s)
        return Alternative(
            strategy=self.problem.variables[found.variable].options[found.option],
            regret_s=regret_s,
            least_regret_s=self._rounded(found.lower_bound - before.cost_s) if is_exact else None,
            is_exact=is_exact and found.is_exact,
            deltas_s=deltas,
            memory_bytes=after.memory_bytes,
            moved=tuple(
                _display_name(other)
                for i, other in enumerate(self.problem.variables)
                if found.choice[i] != self.chosen[i] and i != found.variable
            ),
            limit=self._limit(found, regret_s, deltas),
        )

    def _limit(self, found: Forced, regret_s: float, deltas: Mapping[str, float]) -> str:
        free = self.bounds.free[found.variable]
        is_bound = self.table.is_exact and self.bounds.multiplier
        if is_bound and free[found.option] <= free[self.chosen[found.variable]] * (1 + _EQUAL):
            return "memory"
        largest = max(deltas, key=deltas.__getitem__)
        return largest if regret_s > 0 and deltas[largest] > _EQUAL * self.before.cost_s else ""

    def _rounded(self, difference: float) -> float:
        return 0.0 if abs(difference) <= _EQUAL * self.before.cost_s else difference

    def _figures(self, choice: tuple[int, ...]) -> _Figures:
        """Of the whole plan with this choice in the stages: the table's where it is exact, or simulated."""
        strategies = self.problem.strategies(choice)
        if self.table.is_exact:
            table, spent = self.problem.table, self.book.total(strategies)
            return _Figures(table.evaluate(choice), self._named(spent), table.peak_memory(choice))
        after = self._evaluated(strategies)
        parts = {part.name: part.seconds for part in step_parts(after)}
        return _Figures(after.cost(self.view.objective), parts, after.memory_bytes)

    def _evaluated(self, strategies: Mapping[str, Strategy]) -> Evaluation:
        """The plan with these strategies in the stages, by the layers' places in them."""
        evaluation = self.view.evaluation
        configuration, changed = evaluation.configuration, list(evaluation.configuration.stages)
        for stage in self.stages:
            own = (layer.name for layer in evaluation.stages[stage].graph.graph.layers)
            changed[stage] = replace(changed[stage], strategies=dict(zip(own, strategies.values())))
        return evaluate(self._chain, evaluation.cluster, replace(configuration, stages=tuple(changed)))

    def _named(self, seconds: np.ndarray) -> dict[str, float]:
        return dict(zip(self.book.names, map(float, seconds)))
