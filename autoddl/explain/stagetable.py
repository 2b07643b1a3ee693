"""The cost table of one stage of a plan: the strategies that its layers can have, what they cost, and which of them the plan has.

**Cost.**  With N micro-batches per step, an assignment of strategies costs N (forward + backward) + gradient all-reduce + optimizer
step: the time of one worker per step.  If the plan minimises communication, only the communication in it counts.

**Memory.**  A stage keeps the activations of up to K micro-batches at once, where K is that of the stage's fullest worker.  So the
memory in the table is state + K kept + recomputed, with kept the activations of one micro-batch, and recomputed those of one
block.  A recomputed stage keeps the activations of one micro-batch (K = 1); the inputs that it keeps of the others are left out
of its table.

**Exact tables.**  With a single stage, the step is this cost and a device needs this memory, so the cheapest assignment of the
table is the best plan at its micro-batch and recomputation.  The table is not exact if

- there are several stages: the schedule decides by how much a longer pass lengthens the step;
- the stage is recomputed as a whole, so that its forward pass runs twice;
- the schedule is asynchronous.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph_meshes import EAGER, family_of
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import Problem
from autoddl.costmodel.strategy import Choices
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.stage_figures import workload_of_stage

from .searched import StrategySpace
from .steptime import is_sequential

__all__ = ["LayerChoices", "stage_table"]


@dataclass(frozen=True, eq=False)
class LayerChoices:
    """The strategies that the layers of a stage can have.

    Attributes:
        problem: the variables, their options, the cost of the options per step [s], and their memory under the plan's schedule.
        chosen: the option of each variable that the plan has.
        memory_limit_bytes: memory that the stage may use on its fullest worker.
        is_exact: whether cost and memory of the table are those of the whole plan.
    """

    problem: Problem
    chosen: tuple[int, ...]
    memory_limit_bytes: float
    is_exact: bool


def stage_table(
    evaluation: Evaluation,
    stage: int,
    objective: str,
    memory_limit_bytes: float,
    space: StrategySpace | None = None,
    executor: str = EAGER,
) -> LayerChoices:
    """Compute the table of one stage of a plan.

    Args:
        evaluation: the evaluation of the plan.
        stage: number of the stage.
        objective: what the plan minimises, ``step`` or ``communication``.
        memory_limit_bytes: memory limit of a device.
        space: the strategies that the search could choose from.  If None, as for a plan that was edited, repetitions of a block are
            tied if they have equal strategies in the plan, and Summa meshes are offered if the plan has one.
        executor: what executes the plan, if ``space`` is None.

    Raises:
        UserError: the strategies of the plan are not in the space.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> table = stage_table(plan.evaluation, 0, "step", plan.memory_limit_bytes)
    >>> table.is_exact, [variable.name for variable in table.problem.variables]
    (True, ['fc1', 'fc2'])
    """
    book, problem, chosen = _priced_space(evaluation, stage, objective, space, executor)
    is_recomputed = evaluation.stages[stage].recompute_s > 0
    num_in_flight = 1.0 if is_recomputed else max(evaluation.in_flight[stage])
    if num_in_flight != 1:
        problem = _with_in_flight(problem, book, num_in_flight)
    is_exact = is_sequential(evaluation) and not is_recomputed
    limit = memory_limit_bytes
    if not is_exact:
        # The stage may use its own memory and what is free on its fullest worker.
        workers = [replica.worker for replica in evaluation.schedule.replicas_of(stage)]
        free_bytes = memory_limit_bytes - max(evaluation.worker_memory_bytes[worker] for worker in workers)
        limit = problem.table.peak_memory(chosen) + max(0.0, free_bytes)
    return LayerChoices(problem, chosen, limit, is_exact)


def _priced_space(
    evaluation: Evaluation, stage: int, objective: str, space: StrategySpace | None, executor: str
) -> tuple[PriceBook, Problem, tuple[int, ...]]:
    """The prices of a space for one stage, the table with the activations of one micro-batch, and the plan's options in it."""
    configuration, graph = evaluation.configuration, evaluation.stages[stage].graph.graph
    choice = configuration.stages[stage]
    devices = configuration.mesh_of(stage).devices(evaluation.cluster)
    workload = workload_of_stage(configuration.workload, choice.recompute)

    def priced(space: StrategySpace) -> tuple[PriceBook, Problem, tuple[int, ...]]:
        family = family_of(space.executor, choice.strategies.values(), devices.num_devices)
        book = PriceBook(graph, devices, workload, space.untied, space.summa, executor=family, choices=space.choices)
        problem = book.problem(workload.batch, workload.micro_batch, objective)
        return book, problem, problem.choice(choice.strategies)

    if space is not None:
        return priced(space)
    # The space of a plan that was edited is not known; it has at least what the plan makes use of.
    used = choice.strategies.values()
    has_summa = any(strategy.summa for strategy in used)
    shardings = (0, 1, 2, 3) if any(strategy.zero for strategy in used) else (0,)
    choices = Choices(shardings, any(strategy.regathers for strategy in used))
    try:
        return priced(StrategySpace(False, has_summa, executor, choices))
    except UserError:  # tied layers have different strategies
        return priced(StrategySpace(True, has_summa, executor, choices))


def _with_in_flight(problem: Problem, book: PriceBook, num_in_flight: float) -> Problem:
    """The problem with the memory of a stage that keeps the activations of ``num_in_flight`` micro-batches at once."""
    phases = book.phases(problem.workload.micro_batch)
    # Equal variables share one array, because searches recognise equal variables by the identity of their arrays.
    arrays: dict[tuple[int, int], np.ndarray] = {}
    for state, kept, recomputed in zip(phases.state, phases.kept, phases.recomputed):
        arrays.setdefault((id(state), id(kept)), np.ceil(state + num_in_flight * kept + recomputed))
    memory = tuple(arrays[id(state), id(kept)] for state, kept in zip(phases.state, phases.kept))
    return replace(problem, layer_table=replace(problem.layer_table, memory=memory))
