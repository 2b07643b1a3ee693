"""Schedules as data: per worker an ordered list of tasks, and what a runtime must know to execute them.

A task prints and parses as ``[pipeline:]stage KIND micro-batch``; pipeline 0 is not written:

=========  ====================================================================
``2F5``    forward of micro-batch 5 through stage 2 (of pipeline 0)
``1:2F5``  the same in pipeline 1
``2F4+5``  forward of the pair of micro-batches 4 and 5 at once
``2B5``    backward of micro-batch 5 (gradients of input and weights)
``2B5a``   backward of the first half of micro-batch 5 (``b``: the second half)
``2I5``    the part of the backward that yields the gradient of the input
``2W5``    the part of the backward that yields the gradient of the weights
``2R5``    recomputation of stage 2's activations for micro-batch 5
``2A3``    all-reduce of stage 2's weight gradients of update 3 (the launch; it does not block)
``2U3``    update 3 of stage 2's weights: turns version 3 into version 4
=========  ====================================================================

**Semantics, as data.** Micro-batches are numbered over all pipelines; each runs through one of them. Micro-batch m
counts towards update ``t = m // update_period``. Every (pipeline, stage) is one replica of that stage's weights;
replicas of a stage average their gradients (task ``A``) before each updates its own copy (task ``U``). Versions are
numbered from 0, the initial weights. All of micro-batch m's tasks at stage s use version

    v(m, s) = max(0, m // update_period - delays[s]),

so delay 0 everywhere is a synchronous scheme; PipeDream is ``delays[s] = S - 1 - s`` with a period of 1; PipeDream-2BW
is 1 everywhere; WPipe is 1 for the stages of its first group and 0 for those of its second. Nothing else distinguishes
the schemes, so a runtime needs no code of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import MOST_DIGITS

__all__ = ["Kind", "Part", "Replica", "Schedule", "ScheduleTextError", "Task", "parse_task"]


class ScheduleTextError(UserError):
    """A task's or a schedule's text that cannot be read."""


class Kind(IntEnum):
    """What a task does. The letter of its text is :attr:`letter`."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    RECOMPUTE = 4
    ALL_REDUCE = 5
    UPDATE = 6

    @property
    def letter(self) -> str:
        return _LETTERS[self]

    @property
    def is_compute(self) -> bool:
        """Whether the task works on a micro-batch (``A`` and ``U`` belong to an update instead)."""
        return self < Kind.ALL_REDUCE


class Part(IntEnum):
    """How much of a micro-batch a task works on."""

    WHOLE = 0
    FIRST_HALF = 1
    SECOND_HALF = 2
    PAIR = 3

    @property
    def size(self) -> float:
        """In micro-batches."""
        return _SIZES[self]


_LETTERS = "FBIWRAU"
_SIZES = (1.0, 0.5, 0.5, 2.0)
_WHOLE = rf"([0-9]{{1,{MOST_DIGITS}}})"
_TASK = re.compile(rf"(?:{_WHOLE}:)?{_WHOLE}([FBIWRAU]){_WHOLE}(?:([ab])|\+{_WHOLE})?")


class Task(NamedTuple):
    """One step of a worker. ``micro_batch`` is the update's number for ``ALL_REDUCE`` and ``UPDATE``, and the first of
    the two for a ``PAIR``."""

    kind: Kind
    pipeline: int
    stage: int
    micro_batch: int
    part: Part = Part.WHOLE

    def __str__(self) -> str:
        kind, pipeline, stage, micro_batch, part = self
        prefix = f"{pipeline}:" if pipeline else ""
        suffix = ("", "a", "b", f"+{micro_batch + 1}")[part]
        return f"{prefix}{stage}{_LETTERS[kind]}{micro_batch}{suffix}"


def parse_task(text: str) -> Task:
    """Read a task's text, the inverse of ``str(task)``.

    Raises:
        ScheduleTextError: if the text is not a task.
    """
    match = _TASK.fullmatch(text.strip())
    if match is None:
        raise ScheduleTextError(f"{quote(text)} is not a task; a task reads like 2F0, 1:3B4, 2F4+5, 2B5a, 2A0 or 2U0")
    pipeline, stage, letter, micro_batch, half, second = match.groups()
    kind = Kind(_LETTERS.index(letter))
    part = Part.WHOLE
    if half is not None:
        part = Part.FIRST_HALF if half == "a" else Part.SECOND_HALF
    elif second is not None:
        part = Part.PAIR
        if int(second) != int(micro_batch) + 1:
            raise ScheduleTextError(f"{quote(text)}: a pair is two consecutive micro-batches, as in 2F4+5")
    if part is not Part.WHOLE and not kind.is_compute:
        raise ScheduleTextError(f"{quote(text)}: an {'all-reduce' if letter == 'A' else 'update'} has a number alone")
    return Task(kind, int(pipeline or 0), int(stage), int(micro_batch), part)


class Replica(NamedTuple):
    """One copy of a stage's weights: where it lives."""

    pipeline: int
    worker: int


@dataclass(frozen=True)
class Schedule:
    """A complete pipeline schedule: what each worker does, in which order, with which weights.

    Build one with :func:`autoddl.pipelines.generators.generate`, which validates it, or read one with
    :func:`autoddl.pipelines.grid.from_csv` and validate it with :func:`autoddl.pipelines.validate.validate`.
    """

    name: str
    """The family that generated it."""
    num_stages: int
    """Parts that the model is cut in (for schemes with several groups of stages per worker: all of them)."""
    num_micro_batches: int
    """Micro-batches over all pipelines and all iterations."""
    placement: tuple[tuple[int, ...], ...]
    """``placement[pipeline][stage]`` is the worker that runs it."""
    workers: tuple[tuple[Task, ...], ...]
    """Per worker its tasks in order."""
    update_period: int
    """Micro-batches (over all pipelines) per weight update."""
    delays: tuple[int, ...]
    """Per stage, by how many updates its weights lag behind (see the module's text)."""
    widths: tuple[int, ...]
    """Devices per worker: a worker with width r splits every micro-batch over r replicas of its stages."""
    activation_limits: tuple[float, ...] | None = None
    """Per worker, the most micro-batches whose activations may be alive; None where unbounded."""

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    @property
    def num_pipelines(self) -> int:
        return len(self.placement)

    @property
    def num_tasks(self) -> int:
        return sum(map(len, self.workers))

    @property
    def num_updates(self) -> int:
        """Updates of every stage until the schedule ends; the last one may be of fewer micro-batches."""
        return -(-self.num_micro_batches // self.update_period)

    @property
    def is_synchronous(self) -> bool:
        """Whether every micro-batch uses the weights that all the earlier updates have made."""
        return not any(self.delays)

    def worker_of(self, task: Task) -> int:
        return self.placement[task.pipeline][task.stage]

    def update_of(self, micro_batch: int) -> int:
        """The update that a micro-batch's gradients count towards."""
        return micro_batch // self.update_period

    def micro_batches_of(self, update: int) -> range:
        """The micro-batches (over all pipelines) whose gradients make up an update."""
        first = update * self.update_period
        return range(first, min(first + self.update_period, self.num_micro_batches))

    def version_of(self, task: Task) -> int:
        """The version of its stage's weights that a task reads (an update turns this version t into t + 1)."""
        if not task.kind.is_compute:
            return task.micro_batch
        return max(0, task.micro_batch // self.update_period - self.delays[task.stage])

    def replicas_of(self, stage: int) -> tuple[Replica, ...]:
        """The copies of a stage's weights over the pipelines, whose gradients are averaged before an update.

        Each is in turn split over ``widths[worker]`` devices.
        """
        return tuple(Replica(pipeline, workers[stage]) for pipeline, workers in enumerate(self.placement))

    def num_replicas_of(self, stage: int) -> int:
        """Devices that hold a copy of the stage's weights."""
        return sum(self.widths[replica.worker] for replica in self.replicas_of(stage))

    def stages_on(self, worker: int) -> tuple[tuple[int, int], ...]:
        """The (pipeline, stage) pairs whose weights a worker holds."""
        return tuple(
            (pipeline, stage)
            for pipeline, workers in enumerate(self.placement)
            for stage, owner in enumerate(workers)
            if owner == worker
        )

    def source_of(self, task: Task) -> int | None:
        """The worker whose activation (forward) or gradient (backward) a task takes in.

        None where the task needs nothing from another stage: a forward of stage 0 takes the data, a backward of the
        last stage the loss, and recomputations, weight parts, all-reduces and updates what their worker has.
        """
        if task.kind is Kind.FORWARD and task.stage > 0:
            return self.placement[task.pipeline][task.stage - 1]
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and task.stage < self.num_stages - 1:
            return self.placement[task.pipeline][task.stage + 1]
        return None

    def destination_of(self, task: Task) -> int | None:
        """The worker that a task's activation (forward) or gradient of the input (backward) goes to; None for none."""
        if task.kind is Kind.FORWARD and task.stage < self.num_stages - 1:
            return self.placement[task.pipeline][task.stage + 1]
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and task.stage > 0:
            return self.placement[task.pipeline][task.stage - 1]
        return None

    def tasks(self) -> Iterator[tuple[int, int, Task]]:
        """All tasks as (worker, index in its list, task)."""
        for worker, tasks in enumerate(self.workers):
            for index, task in enumerate(tasks):
                yield worker, index, task
