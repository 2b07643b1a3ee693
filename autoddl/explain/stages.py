"""The alternatives of a pipeline's layers.

The regret of an alternative is the difference that it makes to the simulated step.  It is taken in its stage (in all stages that
are equal): the layer is held there, the other layers of the stage are chosen anew within the memory that the stage has, to the
least time of a micro-batch's passes and the gradients' all-reduce; then the whole plan is priced and its schedule simulated.  The
cut, the schedule, the micro-batch, recomputation and the other stages stay, so another plan with this alternative may be better:
the regret is an upper bound.  Where a stage does not hold up the pipeline, alternatives may cost nothing.

**Memory.**  A stage keeps the activations of K micro-batches at once (K of its fullest worker; of one and K inputs, where it is
recomputed), so its table's memory is that of state + K kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.problem import Problem, Variable
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.joint.evaluation import Evaluation, evaluate, stage_workload
from autoddl.pipelines.joint.partition import ENTRY, chain_of
from autoddl.search.marginals import marginals, nearest

from .alternatives import Alternative, Choice, answers_to, problem_of
from .resources import ResourceBook
from .view import Part, pipeline_parts

__all__ = ["explain_stage", "stage_problem"]

#: Differences of the step below this part of it are rounding.
_EQUAL = 1e-9


def stage_problem(pipeline: Evaluation, stage: int) -> tuple[Problem, tuple[int, ...]]:
    """The table of a stage's strategies, with the memory that its schedule keeps, and the plan in it."""
    configuration, figures = pipeline.configuration, pipeline.stages[stage]
    choice = configuration.stages[stage]
    devices = configuration.mesh_of(stage).devices(pipeline.cluster)
    workload = stage_workload(configuration.workload, choice.recompute)
    problem, chosen = problem_of(figures.graph.graph, devices, workload, choice.strategies, "step")
    kept = 1.0 if figures.recompute_s else max(pipeline.in_flight[stage])
    known: dict[object, np.ndarray] = {}
    memory = tuple(_memory(problem, variable, kept, known) for variable in problem.variables)
    return replace(problem, alone=replace(problem.alone, memory=memory)), chosen


def _memory(problem: Problem, variable: Variable, kept: float, known: dict[object, np.ndarray]) -> np.ndarray:
    """State and ``kept`` times the activations of all layers of a variable, for each of its options [bytes]."""
    total = np.zeros(len(variable.options))
    for name in variable.layers:
        layer = problem.graph[name]
        is_first = not problem.graph.inputs(name)
        key = (layer.signature(), is_first, name in variable.swapped, variable.options)
        if key not in known:
            works = [
                layer_work(
                    layer,
                    variable.strategy(name, option),
                    problem.cluster,
                    problem.workload,
                    problem.workload.micro_batch,
                    is_first,
                )
                for option in range(len(variable.options))
            ]
            known[key] = np.array([work.state_bytes + kept * work.kept_bytes for work in works])
        total += known[key]
    return np.ceil(total)


def explain_stage(
    pipeline: Evaluation,
    model: LayerGraph,
    stages: tuple[int, ...],
    memory_limit_bytes: float,
    *,
    count: int = 3,
    only: str | None = None,
    deadline: float = math.inf,
) -> tuple[Choice, ...]:
    """The choices of equal stages, each with its ``count`` nearest alternatives (see the module's docstring).

    Args:
        model: the whole plan's graph.
        only: the name of a choice or layer; all by default.
        deadline: of ``time.perf_counter``; choices that are not reached by then have no alternatives.
    """
    problem, chosen = stage_problem(pipeline, stages[0])
    workers = [replica.worker for replica in pipeline.schedule.replicas_of(stages[0])]
    room = memory_limit_bytes - max(pipeline.memory[worker] for worker in workers)
    limit = problem.table.peak_memory(chosen) + max(0.0, room)
    bounds = marginals(problem.table, limit)
    context = _Context(pipeline, model, stages, problem, chosen, memory_limit_bytes)
    choices = []
    for i, variable in enumerate(problem.variables):
        if only is not None and not answers_to(variable, only):
            continue
        (found,) = nearest(problem.table, bounds, chosen, count, variables=(i,), deadline=deadline)
        alternatives = [
            alternative
            for forced in found
            if forced.choice is not None and time.perf_counter() < deadline
            if (alternative := context.alternative(i, forced.choice)) is not None
        ]
        fitting = int(np.isfinite(bounds.within[i]).sum())
        choices.append(context.choice(i, fitting, sorted(alternatives, key=lambda one: one.regret_s)))
    return tuple(choices)


class _Context:
    """What the choices of a stage are described by."""

    def __init__(
        self,
        pipeline: Evaluation,
        model: LayerGraph,
        stages: tuple[int, ...],
        problem: Problem,
        chosen: tuple[int, ...],
        memory_limit_bytes: float,
    ):
        self.pipeline, self.stages, self.problem, self.chosen = pipeline, stages, problem, chosen
        self.limit = memory_limit_bytes
        self.chain = chain_of(model)
        self.before = _by_name(pipeline_parts(pipeline))
        book = ResourceBook(problem.graph, problem.cluster, problem.workload)
        self.names, self.by_layer = book.names, book.seconds(problem.strategies(chosen))

    def choice(self, i: int, num_fitting: int, alternatives: list[Alternative]) -> Choice:
        variable = self.problem.variables[i]
        seconds = np.sum([self.by_layer[name] for name in variable.layers], axis=0)
        return Choice(
            name=_shown(variable),
            layers=variable.layers,
            held=variable.layers,
            strategy=variable.options[self.chosen[i]],
            resources_s=dict(zip(self.names, map(float, seconds))),
            num_options=len(variable.options),
            num_fitting=num_fitting,
            alternatives=tuple(alternatives),
        )

    def alternative(self, i: int, choice: tuple[int, ...]) -> Alternative | None:
        """Priced and simulated; None where the whole plan would not fit."""
        problem, step_s = self.problem, self.pipeline.step_s
        after = self._with(problem.strategies(choice))
        if after.memory_bytes > self.limit:
            return None
        parts = _by_name(pipeline_parts(after))
        names = dict.fromkeys((*self.before, *parts))
        deltas = {name: parts.get(name, 0.0) - self.before.get(name, 0.0) for name in names}
        regret = after.step_s - step_s
        regret = 0.0 if abs(regret) <= _EQUAL * step_s else regret
        largest = max(deltas, key=deltas.__getitem__)
        return Alternative(
            strategy=problem.variables[i].options[choice[i]],
            regret_s=regret,
            least_regret_s=None,
            is_exact=False,
            deltas_s=deltas,
            memory_bytes=after.memory_bytes,
            moved=tuple(_shown(v) for j, v in enumerate(problem.variables) if choice[j] != self.chosen[j] and j != i),
            limit=largest if regret > 0 else "",
        )

    def _with(self, strategies: Mapping[str, Strategy]) -> Evaluation:
        """The plan with these strategies in the stages, by the layers' places in them."""
        configuration = self.pipeline.configuration
        names = [layer.name for layer in self.problem.graph.layers]
        changed = list(configuration.stages)
        for stage in self.stages:
            own = [layer.name for layer in self.pipeline.stages[stage].graph.graph.layers]
            translated = {mine: strategies[name] for mine, name in zip(own, names)}
            changed[stage] = replace(changed[stage], strategies=translated)
        return evaluate(self.chain, self.pipeline.cluster, replace(configuration, stages=tuple(changed)))


def _shown(variable: Variable) -> str:
    return "tensor that arrives" if variable.name == ENTRY else variable.name


def _by_name(parts: tuple[Part, ...]) -> dict[str, float]:
    return {part.name: part.seconds for part in parts}
