"""Training a model with a schedule, on local ranks. Needs no OneFlow here: the ranks have it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MOST_TRAINING_PASSES

from ...generators import generate
from ...schedule import Schedule
from ..launcher import RankPool
from .checkpoint import find_checkpoint
from .problems import Problem
from .report import PipelineReport, combine

__all__ = ["Step", "TrainingOptions", "TrainingResult", "schedule_of", "train"]


@dataclass(frozen=True)
class TrainingOptions:
    """What is trained, and how."""

    problem: Problem
    schedule: Schedule
    """Of one run; of one iteration, where it is synchronous."""
    num_steps: int
    """Weight updates in all, those before a checkpoint included."""
    micro_batch: int = 4
    """Samples."""
    optimizer: str = "Adam"
    """One of ``oneflow.optim``."""
    learning_rate: float = 1e-3
    seed: int = 0
    sizes: tuple[int, ...] | None = None
    """Layers per stage, the embedding and the head counting as one each."""
    compress: bool = False
    """Whether what goes between stages is compressed where its values allow it (see `compression`)."""
    checkpoints: Path | None = None
    """A directory; training goes on from the newest one there."""
    steps_per_checkpoint: int = 10


@dataclass(frozen=True)
class Step:
    """A weight update whose micro-batches are through."""

    number: int
    loss: float
    units_per_s: float
    """Of the problem's units, over all steps up to this one."""


@dataclass(frozen=True)
class TrainingResult:
    """What came of it."""

    first_step: int
    """0, or where a checkpoint left off."""
    losses: tuple[float, ...]
    """Of each step from there on: the mean over its micro-batches."""
    units_per_s: float
    """Over all steps, setting up not counted."""
    last_run: PipelineReport | None
    """None where nothing was left to do."""


def train(
    options: TrainingOptions,
    on_step: Callable[[Step], None] | None = None,
    *,
    timeout_s: float | None = None,
    **pool_options: Any,
) -> TrainingResult:
    """Train to the end on ranks of this machine, as many as the schedule has.

    Args:
        on_step: called with every step as soon as its last loss is known.
        timeout_s: how long it may take, from when the ranks are there; for ever if None.
        pool_options: of the `RankPool`.

    Raises:
        UserError: options that do not fit each other; RankError: a rank failed.
    """
    _check(options)
    schedule = options.schedule
    found = None if options.checkpoints is None else find_checkpoint(options.checkpoints)
    first = 0 if found is None else found.num_updates
    if found is not None and found.num_micro_batches != first * schedule.update_period:
        raise UserError(
            f"checkpoint {found.folder} is of {found.num_micro_batches} micro-batches after {first} steps; "
            f"schedule {schedule.name} has {schedule.update_period} per step"
        )
    progress = _Progress(options, first, on_step)
    with RankPool(sum(schedule.widths), **pool_options) as pool:
        job = "autoddl.pipelines.runtime.pipeline.training_job:train_on_rank"
        results = pool.run(job, options, timeout_s=timeout_s, on_report=progress.take)
    last = combine(schedule, results) if results[0] is not None else None
    return TrainingResult(first, tuple(progress.losses), progress.units_per_s, last)


def schedule_of(name: str, num_steps: int, **options: Any) -> Schedule:
    """The schedule of one run: of one step where it is synchronous, of ``num_steps`` where it is not."""
    schedule = generate(name, iterations=1, **options)
    return (
        schedule
        if schedule.is_synchronous
        else generate(name, iterations=num_steps, most_passes=MOST_TRAINING_PASSES, **options)
    )


def _check(options: TrainingOptions) -> None:
    for name in ("num_steps", "micro_batch", "steps_per_checkpoint"):
        if getattr(options, name) < 1:
            raise UserError(f"{name.replace('_', ' ')} is {getattr(options, name)}; give a whole number of at least 1")
    if not 0 < options.learning_rate < float("inf"):
        raise UserError(f"learning rate is {options.learning_rate:g}; give a positive number")
    per_run = options.schedule.num_updates
    if options.num_steps % per_run:
        raise UserError(f"{options.num_steps} steps are not made up of runs of {per_run}; give a multiple of {per_run}")
    options.problem.check()


class _Progress:
    """Puts together what ranks report of losses."""

    def __init__(self, options: TrainingOptions, first: int, on_step: Callable[[Step], None] | None) -> None:
        self.losses: list[float] = []
        self.units_per_s = 0.0
        self._period = options.schedule.update_period
        self._units = self._period * options.micro_batch * options.problem.units_per_sample
        self._first = first
        self._on_step = on_step
        self._parts: dict[int, float] = {}
        self._shares: dict[int, float] = {}
        self._begun: float | None = None

    def take(self, rank: int, value: Any) -> None:
        """A rank's report: that it begins, or (micro-batch, its part of the mean loss, the share of the rows)."""
        if value == "begin":
            self._begun = self._begun or time.monotonic()
            return
        number, part, share = value
        step = number // self._period
        self._parts[step] = self._parts.get(step, 0.0) + part / self._period
        self._shares[step] = self._shares.get(step, 0.0) + share / self._period
        while self._shares.get(self._first + len(self.losses), 0.0) > 1 - 1e-9:
            self._finish(self._first + len(self.losses))

    def _finish(self, step: int) -> None:
        assert self._begun is not None
        del self._shares[step]
        self.losses.append(self._parts.pop(step))
        seconds = time.monotonic() - self._begun
        self.units_per_s = len(self.losses) * self._units / seconds
        if self._on_step is not None:
            self._on_step(Step(step + 1, self.losses[-1], self.units_per_s))
