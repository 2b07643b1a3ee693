"""Divides a training step into parts: the time of the busiest worker on each resource, and the time that it waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.stage_figures import workload_of_stage

from .resources import LOCAL, ResourceBook

__all__ = ["StepPart", "is_sequential", "step_parts"]

#: Parts of the step below this share are rounding errors of a difference, and left out.
_ROUNDING_SHARE = 1e-12


@dataclass(frozen=True)
class StepPart:
    """A part of a step's time.

    Attributes:
        name: a resource (:mod:`.resources`), or what the worker waits for.
        kind: ``compute``, ``communication`` or ``idle``.
        seconds: its duration [s].
    """

    name: str
    kind: str
    seconds: float


def is_sequential(evaluation: Evaluation) -> bool:
    """Whether a step is the sum of the passes of its micro-batches and of one gradient all-reduce, without overlap or idle time.

    This holds for a single stage, unless its schedule is asynchronous, with an all-reduce for each update.
    """
    return len(evaluation.stages) == 1 and evaluation.schedule.is_synchronous


def step_parts(evaluation: Evaluation) -> tuple[StepPart, ...]:
    """Return the parts of a step, which add up to its duration.

    If the step is sequential (:func:`is_sequential`), the gradient all-reduce is divided by resource as the passes are.  Otherwise
    the time by which it lengthens the step is a part of its own.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> [part.name for part in step_parts(plan.evaluation) if part.kind == "communication"]
    ['intra-node bandwidth', 'intra-node latency']
    """
    parts = _busy_parts(evaluation, evaluation.busiest)
    if not is_sequential(evaluation):
        parts += [
            StepPart("transfers between stages", "communication", evaluation.exposed_transfer_s),
            StepPart("gradient all-reduce", "communication", evaluation.exposed_all_reduce_s),
            StepPart("pipeline bubble", "idle", evaluation.bubble_s),
        ]
    total = sum(part.seconds for part in parts)
    return tuple(part for part in parts if part.seconds > _ROUNDING_SHARE * total)


def _busy_parts(evaluation: Evaluation, worker: int) -> list[StepPart]:
    """The time that a worker computes or communicates inside its stages, by resource."""
    configuration = evaluation.configuration
    devices = configuration.mesh.mesh_of(worker).devices(evaluation.cluster)
    num_all_reduces = 1.0 if is_sequential(evaluation) else 0.0
    names: tuple[str, ...] = ()
    total: np.ndarray | float = 0.0
    for pipeline, stage in evaluation.schedule.stages_on(worker):
        figures, choice = evaluation.stages[stage], configuration.stages[stage]
        book = ResourceBook(figures.graph.graph, devices, workload_of_stage(configuration.workload, choice.recompute))
        passes = book.passes(choice.strategies)
        num_micro_batches = evaluation.micro_batches_of(worker, stage, pipeline)
        num_recomputed = num_micro_batches if figures.recompute_s else 0.0
        names = book.names
        num_backward = num_micro_batches * figures.backward_passes
        forward, backward, once = np.sum([passes[layer.name] for layer in figures.graph.layers], axis=0)
        # The optimizer step is local.  All-reduces of a pipeline overlap other passes: a part of their own shows what is exposed.
        once[len(LOCAL) :] *= num_all_reduces
        total = total + (num_micro_batches + num_recomputed) * forward + num_backward * backward + once
    kinds = ("compute" if name in LOCAL else "communication" for name in names)
    return [StepPart(name, kind, float(seconds)) for name, kind, seconds in zip(names, kinds, np.asarray(total))]
