"""Where the time of a step goes: what its busiest worker does in its stages, by resource, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoddl.pipelines.joint.evaluation import Evaluation, stage_workload

from .resources import LOCAL, ResourceBook

__all__ = ["StepPart", "is_sequential", "step_parts"]

#: Parts of the step below this share of it are what rounding leaves of a difference.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class StepPart:
    """A part of the step's time [s]: of ``compute``, ``communication`` or ``idle``."""

    name: str
    kind: str
    seconds: float


def is_sequential(evaluation: Evaluation) -> bool:
    """Whether nothing overlaps and nothing waits: a step is the sum of its micro-batches' passes and of one all-reduce.

    So it is with a single stage, unless its schedule is asynchronous and has an all-reduce for each update.
    """
    return len(evaluation.stages) == 1 and evaluation.schedule.is_synchronous


def step_parts(evaluation: Evaluation) -> tuple[StepPart, ...]:
    """The parts of a step; they add up to it.

    Gradient all-reduces divide by resource too where nothing overlaps; elsewhere what is exposed of them is a part of its own.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> [part.name for part in step_parts(plan.evaluation) if part.kind == "communication"]
    ['intra-node bandwidth', 'intra-node latency']
    """
    busy = _busy_parts(evaluation, evaluation.busiest)
    if is_sequential(evaluation):
        return _without_rounding(*busy)
    return _without_rounding(
        *busy,
        StepPart("transfers between stages", "communication", evaluation.exposed_transfer_s),
        StepPart("gradient all-reduce", "communication", evaluation.exposed_all_reduce_s),
        StepPart("pipeline bubble", "idle", evaluation.bubble_s),
    )


def _busy_parts(evaluation: Evaluation, worker: int) -> list[StepPart]:
    """The time that a worker is busy in its stages, by resource."""
    configuration = evaluation.configuration
    devices = configuration.mesh.mesh_of(worker).devices(evaluation.cluster)
    all_reduces = 1.0 if is_sequential(evaluation) else 0.0
    names: tuple[str, ...] = ()
    total: np.ndarray | float = 0.0
    for direction, stage in evaluation.schedule.stages_on(worker):
        figures, choice = evaluation.stages[stage], configuration.stages[stage]
        book = ResourceBook(figures.graph.graph, devices, stage_workload(configuration.workload, choice.recompute))
        passes = book.passes(choice.strategies)
        num = evaluation.micro_batches_of(worker, stage, direction)
        again = num if figures.recompute_s else 0.0
        names = book.names
        weights = np.array([num + again, num * figures.backward_passes, all_reduces])
        total = total + weights @ np.sum([passes[layer.name] for layer in figures.graph.layers], axis=0)
    kinds = ("compute" if name in LOCAL else "communication" for name in names)
    return [StepPart(name, kind, float(seconds)) for name, kind, seconds in zip(names, kinds, np.asarray(total))]


def _without_rounding(*parts: StepPart) -> tuple[StepPart, ...]:
    """Those that are more than what rounding leaves of a difference."""
    whole = sum(part.seconds for part in parts)
    return tuple(part for part in parts if part.seconds > _ROUNDING * whole)
