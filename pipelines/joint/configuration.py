"""One point of the joint space: what runs where, in which order, with which strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Union

from autoddl.costmodel.cluster import Cluster, Level
from autoddl.costmodel.limits import MAX_PASSES
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from ..generators import generate
from ..schedule import Kind, Schedule
from .meshes import Meshes, StageMesh

__all__ = ["RECOMPUTATIONS", "Configuration", "PipelineSchedule", "StageChoice", "widths_of"]

#: What a stage keeps from the forward to the backward pass of a micro-batch: ``none``: everything; ``layers``: every layer's evenly
#: split input, the rest is made again layer by layer (as in plans without a pipeline); ``stage``: the stage's input alone, and the
#: whole forward pass is run again before the backward pass (the schedules' own task ``R``).
RECOMPUTATIONS = ("none", "layers", "stage")

#: Update periods of an asynchronous schedule that are simulated: the middle third is its steady state.
PERIODS = 6

Option = Union[int, str]


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule by what it is generated from.

    Attributes:
        name: one of the families of :mod:`autoddl.pipelines.generators`.
        num_workers: D, the pipeline's depth.
        num_micro_batches: N, per step.
        options: of the family, as sorted pairs.
        groups: stages per worker of schemes that have several on each in turn.
        synchronous: whether all micro-batches of a step use the newest weights.
        num_pipelines: pipelines over the same workers (2 or more of bidirectional schemes).
    """

    name: str
    num_workers: int
    num_micro_batches: int
    options: tuple[tuple[str, Option], ...] = ()
    groups: int = 1
    synchronous: bool = True
    num_pipelines: int = 1

    @property
    def num_stages(self) -> int:
        """Parts that the model is cut in."""
        return self.groups * self.num_workers

    @property
    def label(self) -> str:
        """Name and options, such as ``chimera (halving)``."""
        shown = ", ".join(f"{value}" if isinstance(value, str) else f"{key} {value}" for key, value in self.options)
        return f"{self.name} ({shown})" if shown else self.name

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass comes in two parts, that of the input and that of the weights."""
        return self.name == "zero-bubble"

    @property
    def halves_backwards(self) -> bool:
        """Whether backward passes are of half a micro-batch (Chimera's backward halving)."""
        return dict(self.options).get("concatenation") == "halving"

    def backward_passes(self, stage: int) -> int:
        """How often a stage is gone back through for each micro-batch.

        Ranks have one way to do it, which is autograd's: each part of a split backward pass carries the gradient through the whole
        stage, with all communication inside it, and comes upon both products of each layer.  Only the first stage, whose input
        wants no gradient, has nothing to do in the input part.
        """
        return 2 if self.splits_backward and stage else 1

    def input_passes(self, stage: int) -> int:
        """How often before the gradient of its input is there."""
        return self.backward_passes(stage) - 1 if self.splits_backward else 1

    def worker_of(self, stage: int) -> int:
        """The worker of a stage in the first pipeline."""
        return stage % self.num_workers

    def schedule(
        self,
        width: int | tuple[int, ...],
        recomputing: tuple[bool, ...],
        num_steps: int = PERIODS,
        most_passes: int = MAX_PASSES,
    ) -> Schedule:
        """The schedule itself, validated.

        Args:
            width: devices per worker; one number for all, or one for each.
            recomputing: per stage whether its forward pass is run again as a task of its own.
            num_steps: of an asynchronous schedule; a synchronous one has one step.
            most_passes: that a schedule may have.
        """
        return _schedule(self, width, recomputing, 1 if self.synchronous else num_steps, most_passes)


@lru_cache(maxsize=8)
def _schedule(
    of: PipelineSchedule,
    width: int | tuple[int, ...],
    recomputing: tuple[bool, ...],
    iterations: int,
    most_passes: int,
) -> Schedule:
    options: dict[str, Any] = dict(of.options)
    schedule = generate(
        of.name,
        num_stages=of.num_workers,
        num_micro_batches=of.num_micro_batches,
        iterations=iterations,
        width=width,
        recompute=any(recomputing),
        most_passes=most_passes,
        **options,
    )
    if all(recomputing) or not any(recomputing):
        return schedule
    workers = tuple(
        tuple(task for task in tasks if task.kind is not Kind.RECOMPUTE or recomputing[task.stage])
        for tasks in schedule.workers
    )
    return replace(schedule, workers=workers)


def widths_of(mesh: Meshes) -> int | tuple[int, ...]:
    """Devices per worker: one number where all have as many."""
    return mesh.num_devices if isinstance(mesh, StageMesh) else tuple(one.num_devices for one in mesh.meshes)


@dataclass(frozen=True)
class StageChoice:
    """What happens inside one stage.

    Attributes:
        num_units: of the chain (see :mod:`.partition`).
        recompute: one of :data:`RECOMPUTATIONS`.
        strategies: of its layers by name, over its mesh; with the entry's where it is not the first stage.
    """

    num_units: int
    recompute: str
    strategies: Mapping[str, Strategy] = field(hash=False)


@dataclass(frozen=True)
class Configuration:
    """A whole plan.

    Attributes:
        mesh: the devices of every worker: equal rectangles, or a division in unequal ones.
        schedule: what they do in which order.
        workload: batch, micro-batch (samples over all devices of a stage), precision and optimizer; its ``recompute`` is unused.
        stages: in the order of the model.
    """

    mesh: Meshes
    schedule: PipelineSchedule
    workload: Workload
    stages: tuple[StageChoice, ...]

    def mesh_of(self, stage: int) -> StageMesh:
        """The rectangle of the workers of a stage."""
        return self.mesh.mesh_of(self.schedule.worker_of(stage))

    def levels(self, cluster: Cluster) -> tuple[Level, ...]:
        """The network levels that strategies are written for; of the stages with the most of them."""
        return max((self.mesh_of(stage).devices(cluster).levels for stage in range(len(self.stages))), key=len)

    @property
    def widths(self) -> int | tuple[int, ...]:
        """Devices per worker: one number where all have as many."""
        return widths_of(self.mesh)

    @property
    def cut(self) -> tuple[int, ...]:
        """Units per stage."""
        return tuple(stage.num_units for stage in self.stages)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First and behind-the-last unit of every stage."""
        found, first = [], 0
        for stage in self.stages:
            found.append((first, first + stage.num_units))
            first += stage.num_units
        return tuple(found)
