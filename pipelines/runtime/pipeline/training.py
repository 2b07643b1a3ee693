"""Training a model with a schedule, on local ranks. Needs no OneFlow here: the ranks have it.

Checkpoints that are damaged, or cannot be written, do not end the training: what happens then is told in `saving`. The ranks
decide together where they go on, and report it, as they do with losses and warnings.
"""

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
from .checkpoint import prepare_directory
from .problems import Problem
from .report import PipelineReport, combine
from .saving import warn_on_stderr

__all__ = ["Begun", "Saved", "Step", "TrainingOptions", "TrainingResult", "Warned", "schedule_of", "train"]


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
    """A directory; training goes on from the newest whole one there."""
    steps_per_checkpoint: int = 10


@dataclass(frozen=True)
class Step:
    """A weight update whose micro-batches are through."""

    number: int
    loss: float
    units_per_s: float
    """Of the problem's units, over all steps up to this one."""


@dataclass(frozen=True)
class Begun:
    """A rank's report: it begins, after so many updates."""

    num_updates: int


@dataclass(frozen=True)
class Warned:
    """Rank 0's report: a warning of one line for the user."""

    text: str


@dataclass(frozen=True)
class Saved:
    """Rank 0's report: a checkpoint after so many updates is complete, or why it is not."""

    num_updates: int
    failure: str


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
    unsaved: str = ""
    """Why the last checkpoint could not be written; "" where it could, or none was asked for."""
    last_saved: int = 0
    """The step of the newest checkpoint."""


def train(
    options: TrainingOptions,
    on_step: Callable[[Step], None] | None = None,
    *,
    on_warning: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    **pool_options: Any,
) -> TrainingResult:
    """Train to the end on ranks of this machine, as many as the schedule has.

    Args:
        on_step: called with every step as soon as its last loss is known.
        on_warning: called with every warning, of one line: about a checkpoint that is damaged or cannot be written. By default it
            goes to stderr.
        timeout_s: how long it may take, from when the ranks are there; for ever if None.
        pool_options: of the `RankPool`.

    Raises:
        UserError: options that do not fit each other; the directory of checkpoints cannot be written, none of the checkpoints
            there is whole, or they are of another model. RankError: a rank failed.
    """
    _check(options)
    schedule = options.schedule
    if options.checkpoints is not None:
        prepare_directory(options.checkpoints)
    progress = _Progress(options, on_step, on_warning or warn_on_stderr)
    with RankPool(sum(schedule.widths), **pool_options) as pool:
        job = "autoddl.pipelines.runtime.pipeline.training_job:train_on_rank"
        results = pool.run(job, options, timeout_s=timeout_s, on_report=progress.take)
    last = combine(schedule, results) if results[0] is not None else None
    return TrainingResult(
        progress.first, tuple(progress.losses), progress.units_per_s, last, progress.unsaved, progress.last_saved
    )


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
    """Puts together what ranks report."""

    def __init__(
        self,
        options: TrainingOptions,
        on_step: Callable[[Step], None] | None,
        on_warning: Callable[[str], None],
    ) -> None:
        self.first = 0
        self.unsaved = ""
        self.last_saved = 0
        self.losses: list[float] = []
        self.units_per_s = 0.0
        self._period = options.schedule.update_period
        self._units = self._period * options.micro_batch * options.problem.units_per_sample
        self._on_step = on_step
        self._on_warning = on_warning
        self._parts: dict[int, float] = {}
        self._shares: dict[int, float] = {}
        self._begun: float | None = None

    def take(self, rank: int, value: Any) -> None:
        """A rank's report: `Begun`, `Warned`, `Saved`, or (micro-batch, its part of the mean loss, the share of the rows)."""
        if isinstance(value, Begun):
            if self._begun is None:
                self._begun = time.monotonic()
                self.first = self.last_saved = value.num_updates
            return
        if isinstance(value, Warned):
            self._on_warning(value.text)
            return
        if isinstance(value, Saved):
            self.unsaved = value.failure
            self.last_saved = self.last_saved if value.failure else value.num_updates
            return
        number, part, share = value
        step = number // self._period
        self._parts[step] = self._parts.get(step, 0.0) + part / self._period
        self._shares[step] = self._shares.get(step, 0.0) + share / self._period
        while self._shares.get(self.first + len(self.losses), 0.0) > 1 - 1e-9:
            self._finish(self.first + len(self.losses))

    def _finish(self, step: int) -> None:
        assert self._begun is not None
        del self._shares[step]
        self.losses.append(self._parts.pop(step))
        seconds = time.monotonic() - self._begun
        self.units_per_s = len(self.losses) * self._units / seconds
        if self._on_step is not None:
            self._on_step(Step(step + 1, self.losses[-1], self.units_per_s))
