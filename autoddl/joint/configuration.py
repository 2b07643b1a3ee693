"""One point of the joint space: what runs where, in which order, with which strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Union

from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.generators import generate
from autoddl.pipelines.schedule import Kind, Schedule

from .meshes import StageMesh

__all__ = ["RECOMPUTATIONS", "Configuration", "PipelineSchedule", "StageChoice"]

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

    def schedule(self, width: int, recomputing: tuple[bool, ...]) -> Schedule:
        """The schedule itself, validated.

        Args:
            width: devices per worker.
            recomputing: per stage whether its forward pass is run again as a task of its own.
        """
        return _schedule(self, width, recomputing)


@lru_cache(maxsize=8)
def _schedule(of: PipelineSchedule, width: int, recomputing: tuple[bool, ...]) -> Schedule:
    options: dict[str, Any] = dict(of.options)
    schedule = generate(
        of.name,
        num_stages=of.num_workers,
        num_micro_batches=of.num_micro_batches,
        iterations=1 if of.synchronous else PERIODS,
        width=width,
        recompute=any(recomputing),
        **options,
    )
    if all(recomputing) or not any(recomputing):
        return schedule
    workers = tuple(
        tuple(task for task in tasks if task.kind is not Kind.RECOMPUTE or recomputing[task.stage])
        for tasks in schedule.workers
    )
    return replace(schedule, workers=workers)


@dataclass(frozen=True)
class StageChoice:
    """What happens inside one stage.

    Attributes:
        num_units: of the chain (see :mod:`.cutting`).
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
        mesh: the devices of every worker.
        schedule: what they do in which order.
        workload: batch, micro-batch (samples over all devices of a stage), precision and optimizer; its ``recompute`` is unused.
        stages: in the order of the model.
    """

    mesh: StageMesh
    schedule: PipelineSchedule
    workload: Workload
    stages: tuple[StageChoice, ...]

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
