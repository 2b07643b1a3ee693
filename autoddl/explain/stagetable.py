"""The table that a stage's strategies are chosen from, and the plan in it.

**Cost.**  N (forward + backward) of the stage's micro-batches, and the gradients' all-reduce: what one worker does in a step; where
communication is minimised, the communication in it.

**Memory.**  A stage keeps the activations of K micro-batches at once (K of its fullest worker; of one and K inputs, where it is
recomputed), so its table's memory is that of state + K kept.

**Where the table is exact.**  The step of a single stage is this sum, and a device holds this memory: the cheapest choice of the
table is the best plan (at its micro-batch and recomputation).  It is not exact where a recomputed stage runs forward twice,
where updates are asynchronous, or with several stages, whose schedule decides by how much a longer pass lengthens the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import Problem
from autoddl.pipelines.joint.evaluation import Evaluation, stage_workload

from .steptime import is_sequential

__all__ = ["LayerChoices", "stage_table"]


@dataclass(frozen=True, eq=False)
class LayerChoices:
    """What the layers of a stage can be.

    Attributes:
        problem: options, their costs [s] of a step, and their memory [bytes] under the plan's schedule.
        chosen: the plan's options.
        memory_limit_bytes: for the stage on its fullest worker.
        is_exact: whether its costs and its memory are those of the whole plan.
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
    space_size: int | None = None,
) -> LayerChoices:
    """The table of a stage of a plan.

    Args:
        memory_limit_bytes: of a device.
        space_size: of the table that the plan was found on, where that is known.

    Raises:
        UserError: no table has the plan's strategies.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> table = stage_table(plan.evaluation, 0, "step", plan.memory_limit_bytes)
    >>> table.is_exact, [variable.name for variable in table.problem.variables]
    (True, ['fc1', 'fc2'])
    """
    book, problem, chosen = _find_table(evaluation, stage, objective, space_size)
    recomputed = evaluation.stages[stage].recompute_s > 0
    in_flight = 1.0 if recomputed else max(evaluation.in_flight[stage])
    if in_flight != 1:
        problem = _with_in_flight(problem, book, in_flight)
    is_exact = is_sequential(evaluation) and not recomputed
    limit = memory_limit_bytes
    if not is_exact:  # what is left on the fullest worker of the stage, beside the stage as it is
        workers = [replica.worker for replica in evaluation.schedule.replicas_of(stage)]
        left = memory_limit_bytes - max(evaluation.memory[worker] for worker in workers)
        limit = problem.table.peak_memory(chosen) + max(0.0, left)
    return LayerChoices(problem, chosen, limit, is_exact)


def _find_table(
    evaluation: Evaluation, stage: int, objective: str, space_size: int | None
) -> tuple[PriceBook, Problem, tuple[int, ...]]:
    """The book, the table and the options of a stage's strategies.

    A plan does not say whether its layers were tied, or Summa was on offer; but the size of its space does, where it is known.
    """
    configuration, graph = evaluation.configuration, evaluation.stages[stage].graph.graph
    choice = configuration.stages[stage]
    devices = configuration.mesh_of(stage).devices(evaluation.cluster)
    workload = stage_workload(configuration.workload, choice.recompute)
    found: list[tuple[PriceBook, Problem, tuple[int, ...]]] = []
    fault: UserError | None = None
    for untied, summa in ((False, False), (False, True), (True, False), (True, True)):
        try:
            book = PriceBook(graph, devices, workload, untied, summa)
            problem = book.problem(workload.batch, workload.micro_batch, objective)
            found.append((book, problem, problem.choice(choice.strategies)))
        except UserError as error:
            fault = error
            continue
        if space_size is None or problem.layer_table.space_size == space_size:
            return found[-1]
    if not found:
        assert fault is not None
        raise fault
    return found[0]


def _with_in_flight(problem: Problem, book: PriceBook, in_flight: float) -> Problem:
    """The problem with the memory of a stage that keeps the activations of so many micro-batches at once."""
    phases = book.phases(problem.workload.micro_batch)
    known: dict[tuple[int, int], np.ndarray] = {}  # equal variables share their arrays, by which searches know them
    for state, kept in zip(phases.state, phases.kept):
        known.setdefault((id(state), id(kept)), np.ceil(state + in_flight * kept))
    memory = tuple(known[id(state), id(kept)] for state, kept in zip(phases.state, phases.kept))
    return replace(problem, layer_table=replace(problem.layer_table, memory=memory))
