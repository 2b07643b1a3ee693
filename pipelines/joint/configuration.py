"""Configurations: the points of the joint space.  A configuration says which stage runs on which devices, in which order (its
schedule), and with which strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Union

from autoddl.costmodel.cluster import Cluster, Level
from autoddl.costmodel.limits import MAX_PASSES
from autoddl.costmodel.recomputation import RECOMPUTATIONS as WORKLOAD_RECOMPUTATIONS
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from ..generators import generate
from ..schedule import Kind, Schedule
from .meshes import Meshes, StageMesh

__all__ = ["RECOMPUTATIONS", "Configuration", "PipelineSchedule", "StageChoice", "recomputed_inside", "widths_of"]

#: Ways of recomputation of a stage: those of plans without a pipeline, and ``stage``.  That keeps the input of the stage alone
#: and runs its whole forward pass again before the backward pass (task ``R`` of schedules).
RECOMPUTATIONS = (*WORKLOAD_RECOMPUTATIONS, "stage")


def recomputed_inside(recompute: str) -> str:
    """Return what the passes of a stage recompute by themselves: nothing if the stage is recomputed as a whole.

    >>> recomputed_inside("stage"), recomputed_inside("blocks")
    ('none', 'blocks')
    """
    return "none" if recompute == "stage" else recompute


#: Number of simulated update periods of an asynchronous schedule.  The middle third is its steady state.
NUM_PERIODS = 6

Option = Union[int, str]


@dataclass(frozen=True)
class PipelineSchedule:
    """The arguments that a schedule is generated from.

    Attributes:
        name: Name of the schedule's family in :mod:`autoddl.pipelines.generators`.
        num_workers: D, the pipeline's depth.
        num_micro_batches: N, the number of micro-batches per step.
        options: Options of the family, as (name, value) pairs sorted by name.
        groups: Number of stages per worker and pipeline; more than 1 for interleaved schedules.
        synchronous: Whether all micro-batches of a step use the newest weights.
        num_pipelines: Number of pipelines over the same workers; 2 or more for bidirectional schedules.

    >>> spec = PipelineSchedule("interleaved-1f1b", 4, 8, (("groups", 2),), groups=2)
    >>> spec.label, spec.num_stages, spec.worker_of(5)
    ('interleaved-1f1b (groups 2)', 8, 1)
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
        """Number of stages that the model is cut into."""
        return self.groups * self.num_workers

    @property
    def label(self) -> str:
        """Name and options for the reader, such as ``chimera (halving, num_pipelines 2)``."""
        shown = ", ".join(f"{value}" if isinstance(value, str) else f"{key} {value}" for key, value in self.options)
        return f"{self.name} ({shown})" if shown else self.name

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes are split into an input part and a weight part."""
        return self.name == "zero-bubble"

    @property
    def halves_backwards(self) -> bool:
        """Whether each backward pass takes half a micro-batch (Chimera's backward halving)."""
        return dict(self.options).get("concatenation") == "halving"

    @property
    def runs_whole_passes(self) -> bool:
        """Whether each micro-batch has one backward pass, so that dividing gradients in every pass (ZeRO 2 and 3) is offered."""
        return not (self.splits_backward or self.halves_backwards)

    @property
    def period(self) -> int:
        """The number of micro-batches after which the tasks of a long synchronous schedule are the same again."""
        return self.num_workers * (2 if dict(self.options).get("concatenation") == "doubling" else 1)

    def backward_passes(self, stage: int) -> int:
        """Number of autograd passes through a stage per micro-batch.

        Both parts of a split backward pass are autograd passes over the whole stage: each computes both products of every layer
        and does all communication inside the stage.  The input part of the first stage is empty, because its input needs no
        gradient.
        """
        return 2 if self.splits_backward and stage else 1

    def input_passes(self, stage: int) -> int:
        """Number of autograd passes through a stage per micro-batch until the gradient of its input is available."""
        return self.backward_passes(stage) - 1 if self.splits_backward else 1

    def worker_of(self, stage: int) -> int:
        """The worker of a stage in the first pipeline."""
        return stage % self.num_workers

    def schedule(
        self,
        width: int | tuple[int, ...],
        recomputing: tuple[bool, ...],
        num_steps: int = NUM_PERIODS,
        most_passes: int = MAX_PASSES,
        validates: bool = True,
    ) -> Schedule:
        """Generate the schedule.

        Args:
            width: Number of devices per worker: one number for all workers, or one per worker.
            recomputing: Per stage, whether its forward pass is run again as a task of its own.
            num_steps: Number of steps of an asynchronous schedule; a synchronous one has one step.
            most_passes: Largest allowed number of passes of micro-batches through stages.
            validates: Whether to validate the schedule.  The joint search, which generates thousands, does not; its plans are
                evaluated with validated ones.

        Raises:
            GeneratorError: the family has no schedule for these numbers, or the schedule has too many passes.
        """
        return _generated(self, width, recomputing, 1 if self.synchronous else num_steps, most_passes, validates)


@lru_cache(maxsize=8)
def _generated(
    spec: PipelineSchedule,
    width: int | tuple[int, ...],
    recomputing: tuple[bool, ...],
    num_steps: int,
    most_passes: int,
    validates: bool,
) -> Schedule:
    options: dict[str, Any] = dict(spec.options)
    schedule = generate(
        spec.name,
        num_stages=spec.num_workers,
        num_micro_batches=spec.num_micro_batches,
        iterations=num_steps,
        width=width,
        recompute=any(recomputing),
        most_passes=most_passes,
        validates=validates,
        **options,
    )
    if all(recomputing) or not any(recomputing):
        return schedule
    # Generators recompute all stages or none: remove the tasks of stages that do not recompute.
    workers = tuple(
        tuple(task for task in tasks if task.kind is not Kind.RECOMPUTE or recomputing[task.stage])
        for tasks in schedule.workers
    )
    return replace(schedule, workers=workers)


def widths_of(mesh: Meshes) -> int | tuple[int, ...]:
    """Number of devices per worker: one number if all workers are equal, else one per worker."""
    return mesh.num_devices if isinstance(mesh, StageMesh) else tuple(part.num_devices for part in mesh.meshes)


@dataclass(frozen=True)
class StageChoice:
    """The choices for one stage.

    Attributes:
        num_units: Number of units of the chain that the stage contains (see :mod:`.partition`).
        recompute: Way of recomputation, one of :data:`RECOMPUTATIONS`.
        strategies: Strategy of each layer over the stage's mesh, by layer name; with that of :data:`.partition.ENTRY` for all
            stages but the first.
    """

    num_units: int
    recompute: str
    strategies: Mapping[str, Strategy] = field(hash=False)


@dataclass(frozen=True)
class Configuration:
    """A complete plan: devices, schedule, workload, and the choices for every stage.

    Attributes:
        mesh: Devices of every worker: equal rectangles, or a division into unequal ones.
        schedule: Arguments of the schedule.
        workload: Batch, micro-batch (samples over all devices of a stage), precision and optimizer; its ``recompute`` is unused.
        stages: Choices for every stage, in the order of the model.
    """

    mesh: Meshes
    schedule: PipelineSchedule
    workload: Workload
    stages: tuple[StageChoice, ...]

    def mesh_of(self, stage: int) -> StageMesh:
        """The rectangle of devices that runs a stage."""
        return self.mesh.mesh_of(self.schedule.worker_of(stage))

    def levels(self, cluster: Cluster) -> tuple[Level, ...]:
        """The network levels that strategies are written for, of a stage that has the most levels."""
        return max((self.mesh_of(stage).devices(cluster).levels for stage in range(len(self.stages))), key=len)

    @property
    def widths(self) -> int | tuple[int, ...]:
        """Number of devices per worker: one number if all workers are equal, else one per worker."""
        return widths_of(self.mesh)

    @property
    def cut(self) -> tuple[int, ...]:
        """Number of units per stage."""
        return tuple(stage.num_units for stage in self.stages)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(first unit, last unit + 1) of every stage."""
        ends = list(accumulate(self.cut, initial=0))
        return tuple(zip(ends, ends[1:]))
