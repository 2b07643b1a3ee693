"""What a step of a plan uses, with a pipeline or without: what lies on the longest path through the tasks of its schedule.

As long as no other path is the longest one, a step is the sum over this path, and linear in the parameters of the cluster:

    step = sum over stages of  n_F forward + n_B backward + n_R recomputation + n_A all-reduce
         + sum over boundaries of  n_+ transfer forward + n_- transfer backward

With other parameters another path may be the longest: then the step is underestimated, the plan's like its rivals'.  A stage that
has no other beside it has one path, of all its tasks.  Of an asynchronous schedule it is the path of all simulated updates, a
step's share of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.cluster import LEVEL_NAMES
from autoddl.costmodel.collectives import Step
from autoddl.pipelines.critical import critical_path
from autoddl.pipelines.joint.boundary import own_gradient_bytes, replicated_all_reduce_steps, shared_steps
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.schedule import Kind

from .trust import Usage, UsageSum

__all__ = ["usage_of_all", "usage_of_step"]


def usage_of_step(evaluation: Evaluation, objective: str = "step") -> Usage:
    """What the longest path of a step uses; of the step in which nothing is computed where the objective is communication."""
    return _usage(evaluation, _on_longest_path(evaluation, objective))


def usage_of_all(evaluation: Evaluation) -> Usage:
    """What all stages use, each of them for all micro-batches."""
    return _usage(evaluation, _all_tasks(evaluation))


class _Counts(NamedTuple):
    """How often each stage is passed, and each boundary is crossed; arrays over stages or boundaries."""

    forward: np.ndarray
    backward: np.ndarray
    all_reduce: np.ndarray
    crossing_forward: np.ndarray
    crossing_backward: np.ndarray


def _all_tasks(evaluation: Evaluation) -> _Counts:
    num, stages = evaluation.configuration.schedule.num_micro_batches, evaluation.stages
    forward = np.array([num * stage.forward_passes for stage in stages], dtype=float)
    backward = np.array([num * stage.backward_passes for stage in stages], dtype=float)
    crossing = np.full(len(stages) - 1, float(num))
    return _Counts(forward, backward, np.ones(len(stages)), crossing, crossing)


def _on_longest_path(evaluation: Evaluation, objective: str) -> _Counts:
    if not evaluation.has_pipeline:
        return _all_tasks(evaluation)
    spec, timeline = evaluation.configuration.schedule, evaluation.timeline_of(objective)
    forward, backward, all_reduce = np.zeros((3, len(evaluation.stages)))
    crossing_forward, crossing_backward = np.zeros((2, len(evaluation.stages) - 1))
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
    for task in path.transfers:
        if task.kind is Kind.FORWARD:
            crossing_forward[task.stage] += task.part.size
        else:
            crossing_backward[task.stage - 1] += task.part.size
    share = evaluation.cost(objective) / timeline.makespan if timeline.makespan else 1.0
    found = _Counts(forward, backward, all_reduce, crossing_forward, crossing_backward)
    return found if spec.synchronous else _Counts(*(share * counts for counts in found))


def _usage(evaluation: Evaluation, counts: _Counts) -> Usage:
    configuration = evaluation.configuration
    found = UsageSum(evaluation.cluster, configuration.workload.precision)
    for number in range(len(evaluation.stages)):
        _add_stage(found, evaluation, number, counts)
    for number, boundary in enumerate(evaluation.boundaries):
        for load, times in (
            (boundary.forward, counts.crossing_forward[number]),
            (boundary.backward, counts.crossing_backward[number]),
        ):
            found.add_messages(LEVEL_NAMES[load.is_inside], load.messages, load.nbytes, times)
    _add_shared(found, evaluation, counts)
    return found.usage


def _add_stage(found: UsageSum, evaluation: Evaluation, number: int, counts: _Counts) -> None:
    """The passes through a stage, and the all-reduce of its gradients."""
    configuration, cluster = evaluation.configuration, evaluation.cluster
    names = [level.name for level in configuration.mesh_of(number).devices(cluster).levels]
    workers = tuple(replica.worker for replica in evaluation.schedule.replicas_of(number))
    for layer in evaluation.stages[number].assessment.layers:
        found.add_steps(layer.forward_steps, names, counts.forward[number])
        found.add_work(layer.work.forward_work, counts.forward[number])
        found.add_steps(layer.backward_steps, names, counts.backward[number])
        found.add_work(layer.work.backward_work, counts.backward[number])
        inside = layer.work.gradient
        if len(workers) > 1:
            nbytes = own_gradient_bytes(layer, configuration.workload)
            between, inside = replicated_all_reduce_steps(layer.layer, layer.strategy, len(workers), nbytes)
            _add_between(found, evaluation, between, workers, counts.all_reduce[number])
        found.add_steps(inside, names, counts.all_reduce[number])


def _add_shared(found: UsageSum, evaluation: Evaluation, counts: _Counts) -> None:
    """The exchange of gradients of weights that several stages have."""
    graphs = [stage.graph for stage in evaluation.stages]
    layers = {layer.layer.name: layer for layer in evaluation.layers}
    stage_of = {layer.name: number for number, graph in enumerate(graphs) for layer in graph.layers}
    workload = evaluation.configuration.workload
    for number, workers, step in shared_steps(evaluation.schedule, graphs, stage_of, layers, workload):
        _add_between(found, evaluation, (step,), workers, counts.all_reduce[number])


def _add_between(
    found: UsageSum, evaluation: Evaluation, steps: Sequence[Step], workers: tuple[int, ...], times: float
) -> None:
    """Steps between equal ranks of workers, over one link."""
    name = LEVEL_NAMES[evaluation.configuration.mesh.share_nodes(evaluation.cluster, workers)]
    found.add_steps(steps, (name, name), times)
