"""Schedules as data: per worker an ordered list of tasks, with all that a runtime needs to execute them.

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

**Semantics, as data.** Micro-batches are numbered over all pipelines; each runs through one of them. The gradients of
micro-batch m belong to update ``t = m // update_period``. Every (pipeline, stage) is one replica of that stage's weights;
the replicas of a stage average their gradients (task ``A``) before each updates its own copy (task ``U``). Versions are
numbered from 0, the initial weights. All tasks of micro-batch m at stage s use version

    v(m, s) = max(0, m // update_period - delays[s]).

Delay 0 everywhere is a synchronous scheme. PipeDream has ``delays[s] = S - 1 - s`` and a period of 1, PipeDream-2BW has
delay 1 everywhere, and WPipe has 1 for the stages of its first group and 0 for those of its second. Nothing else
distinguishes the schemes, so a runtime needs no code specific to any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import MAX_DIGITS

__all__ = [
    "Kind",
    "Part",
    "Replica",
    "Schedule",
    "ScheduleFrame",
    "ScheduleTextError",
    "Task",
    "parse_task",
    "read_task",
]


class ScheduleTextError(UserError):
    """A task's or a schedule's text that cannot be read."""


class Kind(IntEnum):
    """What a task does; :attr:`letter` is its letter in a task's text."""

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
        """Whether the task works on a micro-batch (``A`` and ``U`` belong to an update)."""
        return self < Kind.ALL_REDUCE


class Part(IntEnum):
    """How much of a micro-batch a task works on."""

    WHOLE = 0
    FIRST_HALF = 1
    SECOND_HALF = 2
    PAIR = 3

    @property
    def size(self) -> float:
        """Number of micro-batches."""
        return _SIZES[self]


_LETTERS = "FBIWRAU"
_SIZES = (1.0, 0.5, 0.5, 2.0)
_WHOLE = rf"([0-9]{{1,{MAX_DIGITS}}})"
_TASK = re.compile(rf"(?:{_WHOLE}:)?{_WHOLE}([FBIWRAU]){_WHOLE}(?:([ab])|\+{_WHOLE})?")


class Task(NamedTuple):
    """One step of a worker.

    Attributes:
        kind: what it does.
        pipeline: pipeline of its micro-batch.
        stage: stage of the model.
        micro_batch: index of the micro-batch, the first of the two for a ``PAIR``; the update's index for ``ALL_REDUCE`` and
            ``UPDATE``.
        part: how much of the micro-batch it works on.
    """

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
    """Parse a task's text, the inverse of ``str(task)``.

    >>> parse_task("1:2F5").stage
    2

    Raises:
        ScheduleTextError: if the text is not a task.
    """
    task = read_task(text.strip())
    if task is None:
        raise ScheduleTextError(f"{quote(text)} is not a task; a task reads like 2F0, 1:3B4, 2F4+5, 2B5a, 2A0 or 2U0")
    if task.part is Part.PAIR and not text.strip().endswith(f"+{task.micro_batch + 1}"):
        raise ScheduleTextError(f"{quote(text)}: a pair is two consecutive micro-batches, as in 2F4+5")
    if task.part is not Part.WHOLE and not task.kind.is_compute:
        letter = task.kind.letter
        name = "all-reduce" if task.kind is Kind.ALL_REDUCE else "update"
        raise ScheduleTextError(f"{quote(text)}: an {name} has a number only, as in 2{letter}0")
    return task


def read_task(text: str) -> Task | None:
    """`parse_task` of a text that was printed; None where it is no task's."""
    match = _TASK.fullmatch(text)
    if match is None:
        return None
    pipeline, stage, letter, micro_batch, half, second = match.groups()
    parts = {"a": Part.FIRST_HALF, "b": Part.SECOND_HALF, None: Part.WHOLE if second is None else Part.PAIR}
    return Task(Kind(_LETTERS.index(letter)), int(pipeline or 0), int(stage), int(micro_batch), parts[half])


class Replica(NamedTuple):
    """One copy of a stage's weights.

    Attributes:
        pipeline: that uses it.
        worker: that holds it.
    """

    pipeline: int
    worker: int


@dataclass(frozen=True)
class ScheduleFrame:
    """A schedule without its tasks: which worker has which stage, and which weights micro-batches use."""

    num_stages: int
    num_micro_batches: int
    placement: tuple[tuple[int, ...], ...]
    """``placement[pipeline][stage]`` is the worker that runs it."""
    update_period: int
    delays: tuple[int, ...]
    """Per stage, by how many updates its weights lag behind (see the module's text)."""

    @property
    def num_updates(self) -> int:
        """Number of updates of every stage; the last one may be of fewer micro-batches."""
        return -(-self.num_micro_batches // self.update_period)

    def update_of(self, micro_batch: int) -> int:
        """The update that a micro-batch's gradients belong to."""
        return micro_batch // self.update_period

    def micro_batches_of(self, update: int) -> range:
        """The micro-batches (over all pipelines) whose gradients belong to an update."""
        first = update * self.update_period
        return range(first, min(first + self.update_period, self.num_micro_batches))

    def version_of(self, task: Task) -> int:
        """The version of its stage's weights that a task reads; update t reads version t and makes t + 1."""
        if not task.kind.is_compute:
            return task.micro_batch
        return max(0, self.update_of(task.micro_batch) - self.delays[task.stage])

    def stages_on(self, worker: int) -> tuple[tuple[int, int], ...]:
        """The (pipeline, stage) pairs whose weights a worker holds."""
        return tuple(
            (pipeline, stage)
            for pipeline, workers in enumerate(self.placement)
            for stage, owner in enumerate(workers)
            if owner == worker
        )

    def source_of(self, task: Task) -> int | None:
        """The worker whose activation (forward) or gradient (backward) a task receives.

        None if the task needs nothing from another stage: a forward of stage 0 takes the data, a backward of the last
        stage the loss, and recomputations, weight parts, all-reduces and updates what is on their worker.
        """
        if task.kind is Kind.FORWARD and task.stage > 0:
            return self.placement[task.pipeline][task.stage - 1]
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and task.stage < self.num_stages - 1:
            return self.placement[task.pipeline][task.stage + 1]
        return None

    def destination_of(self, task: Task) -> int | None:
        """The worker that a task sends its activation (forward) or gradient of the input (backward) to; None for none."""
        if task.kind is Kind.FORWARD and task.stage < self.num_stages - 1:
            return self.placement[task.pipeline][task.stage + 1]
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and task.stage > 0:
            return self.placement[task.pipeline][task.stage - 1]
        return None


@dataclass(frozen=True)
class Schedule(ScheduleFrame):
    """A complete pipeline schedule: what each worker does, in which order, with which weights.

    Build one with :func:`autoddl.pipelines.generators.generate`, which validates it, or read one with
    :func:`autoddl.pipelines.grid.from_csv` and validate it with :func:`autoddl.pipelines.validate.validate`.
    """

    name: str
    """The family that generated it."""
    workers: tuple[Sequence[Task], ...]
    """Per worker its tasks in order."""
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
    def is_synchronous(self) -> bool:
        """Whether every micro-batch uses the weights that all the earlier updates have made."""
        return not any(self.delays)

    def worker_of(self, task: Task) -> int:
        return self.placement[task.pipeline][task.stage]

    def replicas_of(self, stage: int) -> tuple[Replica, ...]:
        """The copies of a stage's weights over the pipelines, whose gradients are averaged before an update.

        Each is in turn split over ``widths[worker]`` devices.
        """
        return tuple(Replica(pipeline, workers[stage]) for pipeline, workers in enumerate(self.placement))

    def num_replicas_of(self, stage: int) -> int:
        """Devices that hold a copy of the stage's weights."""
        return sum(self.widths[replica.worker] for replica in self.replicas_of(stage))

    def tasks(self) -> Iterator[tuple[int, int, Task]]:
        """All tasks as (worker, index in its list, task)."""
        for worker, tasks in enumerate(self.workers):
            for index, task in enumerate(tasks):
                yield worker, index, task
