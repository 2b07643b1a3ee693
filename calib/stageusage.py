"""The usage of a training step: the collectives, messages and local work on the critical path of a plan's schedule.

The critical path is the longest path through the tasks of the schedule, and its length is the step time.  As long as this path
remains the longest one, the step time is linear in the parameters of the cluster:

    step = sum over stages of      n_F forward + n_B backward + n_R recomputation + n_A all-reduce + n_U optimizer step
         + sum over boundaries of  n_+ forward transfer + n_- backward transfer

where each n is the number of times that the path contains the task.  Communication that runs beside computation counts with its
exposed part, as it is with the parameters of the cluster.  With other parameters another path may be the longest one.
The sum then underestimates the step time, of the plan as well as of its rivals.

The path of a plan without a pipeline contains all tasks.  For an asynchronous schedule, the path of all simulated updates is
computed, and scaled to one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.cluster import LEVEL_NAMES
from autoddl.costmodel.collectives import Step
from autoddl.pipelines.critical import critical_path
from autoddl.pipelines.joint.boundary import divided_steps, replicated_all_reduce_steps, shared_steps
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.schedule import Kind

from .trust import Usage, UsageSum

__all__ = ["usage_of_all", "usage_of_step"]


def usage_of_step(evaluation: Evaluation, objective: str = "step") -> Usage:
    """Return the usage of the critical path of a step.

    Args:
        evaluation: The plan.
        objective: ``step`` or ``communication``.  For ``communication``, it is the critical path of a step without computation.
    """
    return _usage(evaluation, _critical_path_counts(evaluation, objective))


def usage_of_all(evaluation: Evaluation) -> Usage:
    """Return the usage of all stages for all micro-batches, whether on the critical path or not."""
    return _usage(evaluation, _counts_of_all_tasks(evaluation))


class _Counts(NamedTuple):
    """Numbers of passes, all-reduces, optimizer steps and transfers.

    Attributes:
        forward: Forward passes (with recomputations) through each stage, in micro-batches.
        backward: Backward passes through each stage, in micro-batches.
        all_reduce: All-reduces of the gradients of each stage.
        update: Optimizer steps of each stage.
        crossing_forward: Forward transfers across each boundary, in micro-batches.
        crossing_backward: Backward transfers across each boundary, in micro-batches.
    """

    forward: np.ndarray
    backward: np.ndarray
    all_reduce: np.ndarray
    update: np.ndarray
    crossing_forward: np.ndarray
    crossing_backward: np.ndarray


def _counts_of_all_tasks(evaluation: Evaluation) -> _Counts:
    num, stages = evaluation.configuration.schedule.num_micro_batches, evaluation.stages
    forward = np.array([num * stage.forward_passes for stage in stages], dtype=float)
    backward = np.array([num * stage.backward_passes for stage in stages], dtype=float)
    crossing = np.full(len(stages) - 1, float(num))
    return _Counts(forward, backward, np.ones(len(stages)), np.ones(len(stages)), crossing, crossing)


def _critical_path_counts(evaluation: Evaluation, objective: str) -> _Counts:
    if not evaluation.has_pipeline:
        return _counts_of_all_tasks(evaluation)
    spec, timeline = evaluation.configuration.schedule, evaluation.timeline_of(objective)
    forward, backward, all_reduce, update = np.zeros((4, len(evaluation.stages)))
    crossing_forward, crossing_backward = np.zeros((2, len(evaluation.stages) - 1))
    # The optimizer step of a stage is a part of its all-reduce, if there is one (pipelines/joint/evaluation.py::times_of).
    reduced = {task.stage for _, _, task in timeline.schedule.tasks() if task.kind is Kind.ALL_REDUCE}
    path = critical_path(timeline)
    for task in path.tasks:
        size, passes = task.part.size, evaluation.stages[task.stage].backward_passes
        if task.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            forward[task.stage] += size
        elif task.kind is Kind.BACKWARD:
            backward[task.stage] += size * passes
        elif task.kind is Kind.BACKWARD_INPUT:
            backward[task.stage] += size * spec.input_passes(task.stage)
        elif task.kind is Kind.BACKWARD_WEIGHT:
            backward[task.stage] += size * (passes - spec.input_passes(task.stage))
        elif task.kind is Kind.ALL_REDUCE:
            all_reduce[task.stage] += 1
            update[task.stage] += 1
        elif task.kind is Kind.UPDATE and task.stage not in reduced:
            update[task.stage] += 1
    for task in path.transfers:
        if task.kind is Kind.FORWARD:
            crossing_forward[task.stage] += task.part.size
        else:
            crossing_backward[task.stage - 1] += task.part.size
    counts = _Counts(forward, backward, all_reduce, update, crossing_forward, crossing_backward)
    if spec.synchronous:
        return counts
    # The timeline of an asynchronous schedule contains several updates: scale to one step.
    step_share = evaluation.cost(objective) / timeline.makespan if timeline.makespan else 1.0
    return _Counts(*(step_share * count for count in counts))


def _usage(evaluation: Evaluation, counts: _Counts) -> Usage:
    """Return the usage of the stages, the boundaries and the shared weights."""
    usage = UsageSum(evaluation.cluster, evaluation.configuration.workload.precision)
    for number in range(len(evaluation.stages)):
        _add_stage(usage, evaluation, number, counts)
    for number, boundary in enumerate(evaluation.boundaries):
        for load, times in (
            (boundary.forward, counts.crossing_forward[number]),
            (boundary.backward, counts.crossing_backward[number]),
        ):
            usage.add_messages(LEVEL_NAMES[load.is_inside], load.messages, load.nbytes, times)
    _add_shared_weights(usage, evaluation, counts)
    return usage.usage


def _add_stage(usage: UsageSum, evaluation: Evaluation, number: int, counts: _Counts) -> None:
    """Add the passes through a stage, the all-reduce of its gradients and its optimizer step."""
    configuration, cluster = evaluation.configuration, evaluation.cluster
    names = [level.name for level in configuration.mesh_of(number).devices(cluster).levels]
    workers = tuple(replica.worker for replica in evaluation.schedule.replicas_of(number))
    forward, backward, reduced = (
        counts.forward[number],
        counts.backward[number],
        _exposed_reduces(evaluation, number, counts),
    )
    for layer in evaluation.stages[number].assessment.layers:
        exposed = cluster.exposed_part(layer.work)
        usage.add_steps(layer.arriving, names, forward)
        usage.add_steps(layer.work.forward, names, forward * exposed)
        usage.add_work(layer.work.forward_work, forward)
        usage.add_steps((*layer.repeated, *(step.adjoint() for step in layer.arriving)), names, backward)
        usage.add_steps(layer.work.backward, names, backward * exposed)
        usage.add_work(layer.work.backward_work, backward)
        usage.add_work(layer.work.update_work, counts.update[number])
        steps_in_stage = layer.work.gradient
        if len(workers) > 1:
            steps_between_workers, steps_in_stage = replicated_all_reduce_steps(
                layer.layer, layer.strategy, len(workers), layer.work.gradient_bytes, divided_steps(layer.work)
            )
            _add_steps_between(usage, evaluation, steps_between_workers, workers, reduced)
        usage.add_steps(steps_in_stage, names, reduced)


def _exposed_reduces(evaluation: Evaluation, number: int, counts: _Counts) -> float:
    """The number of gradient all-reduces of a stage, each with the part that comes after the last backward pass."""
    stage = evaluation.stages[number]
    share = stage.exposed_all_reduce_s / stage.all_reduce_s if stage.all_reduce_s else 1.0
    return float(share * counts.all_reduce[number])


def _add_shared_weights(usage: UsageSum, evaluation: Evaluation, counts: _Counts) -> None:
    """Add the sums of the gradients of weights that several stages share."""
    graphs = [stage.graph for stage in evaluation.stages]
    layers = {layer.layer.name: layer for layer in evaluation.layers}
    stage_of = {layer.name: number for number, graph in enumerate(graphs) for layer in graph.layers}
    workload = evaluation.configuration.workload
    for number, workers, step in shared_steps(evaluation.schedule, graphs, stage_of, layers, workload):
        _add_steps_between(usage, evaluation, (step,), workers, _exposed_reduces(evaluation, number, counts))


def _add_steps_between(
    usage: UsageSum, evaluation: Evaluation, steps: Sequence[Step], workers: tuple[int, ...], times: float
) -> None:
    """Add steps between the corresponding ranks of several workers, over one network level."""
    level = LEVEL_NAMES[evaluation.configuration.mesh.share_nodes(evaluation.cluster, workers)]
    usage.add_steps(steps, (level, level), times)
