"""Training a model with a schedule, on local ranks. Needs no OneFlow here: only the ranks load it.

Checkpoints that are damaged or cannot be written do not end the training (see `saving`). The ranks decide together where they
resume, and report it, like losses and warnings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_TRAINING_PASSES

from ...generators import generate
from ...schedule import Schedule
from ..launcher import RankPool
from .checkpoint import prepare_directory
from .problems import TrainingProblem
from .report import PipelineReport, combine
from .saving import warn_on_stderr

__all__ = ["Begun", "Saved", "TrainingOptions", "TrainingResult", "TrainingStep", "Warned", "schedule_of", "train"]


@dataclass(frozen=True)
class TrainingOptions:
    """What is trained, and how.

    Attributes:
        problem: model and data.
        schedule: of one run: of one iteration if it is synchronous, of all steps otherwise.
        num_steps: total number of weight updates, including those before a checkpoint.
        micro_batch: samples per micro-batch.
        optimizer: name of a class of ``oneflow.optim``.
        learning_rate: of the optimizer.
        seed: of initial values and data.
        sizes: layers per stage, where the embedding and the head count as one each; None: balanced.
        compress: whether tensors between stages are compressed if their values allow it (see `compression`).
        checkpoints: a directory; training resumes from its newest intact checkpoint.
        steps_per_checkpoint: weight updates between checkpoints.
    """

    problem: TrainingProblem
    schedule: Schedule
    num_steps: int
    micro_batch: int = 4
    optimizer: str = "Adam"
    learning_rate: float = 1e-3
    seed: int = 0
    sizes: tuple[int, ...] | None = None
    compress: bool = False
    checkpoints: Path | None = None
    steps_per_checkpoint: int = 10


@dataclass(frozen=True)
class TrainingStep:
    """A weight update whose micro-batches are done.

    Attributes:
        number: of updates so far.
        loss: mean over its micro-batches.
        units_per_s: throughput in the problem's units, over all steps up to this one.
    """

    number: int
    loss: float
    units_per_s: float


@dataclass(frozen=True)
class Begun:
    """A rank's report that it starts.

    Attributes:
        num_updates: weight updates so far, from a checkpoint.
    """

    num_updates: int


@dataclass(frozen=True)
class Warned:
    """Rank 0's report of a warning.

    Attributes:
        text: one line for the user.
    """

    text: str


@dataclass(frozen=True)
class Saved:
    """Rank 0's report of a checkpoint.

    Attributes:
        num_updates: weight updates so far.
        failure: why it could not be written; "" if it is complete.
    """

    num_updates: int
    failure: str


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    Attributes:
        first_step: 0, or the step of the checkpoint from which it was resumed.
        losses: of each step since then: the mean over its micro-batches.
        units_per_s: throughput over all steps, without the start.
        last_run: report of the last run; None if no step was left.
        unsaved: why the last checkpoint could not be written; "" if it was written, or none was requested.
        last_saved: the step of the newest checkpoint.
    """

    first_step: int
    losses: tuple[float, ...]
    units_per_s: float
    last_run: PipelineReport | None
    unsaved: str = ""
    last_saved: int = 0


def train(
    options: TrainingOptions,
    on_step: Callable[[TrainingStep], None] | None = None,
    *,
    on_warning: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    **pool_options: Any,
) -> TrainingResult:
    """Train on ranks of this machine, as many as the schedule has.

    Args:
        options: what is trained, and how.
        on_step: called with every step as soon as its last loss is known.
        on_warning: called with every warning, of one line, about a checkpoint that is damaged or cannot be written. By default
            warnings are printed on stderr.
        timeout_s: how long the training may take after the ranks have started; None: forever.
        pool_options: of the `RankPool`.

    Raises:
        UserError: options are inconsistent, the directory of checkpoints cannot be written, none of the checkpoints there is
            intact, or they are of another model.
        RankError: a rank failed.
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
    """The schedule of one run: of one step if it is synchronous, otherwise of ``num_steps``."""
    schedule = generate(name, iterations=1, **options)
    return (
        schedule
        if schedule.is_synchronous
        else generate(name, iterations=num_steps, most_passes=MAX_TRAINING_PASSES, **options)
    )


def _check(options: TrainingOptions) -> None:
    for name in ("num_steps", "micro_batch", "steps_per_checkpoint"):
        if getattr(options, name) < 1:
            raise UserError(f"{name.replace('_', ' ')} is {getattr(options, name)}; give a whole number of at least 1")
    if not 0 < options.learning_rate < float("inf"):
        raise UserError(f"learning rate is {options.learning_rate:g}; give a positive number")
    per_run = options.schedule.num_updates
    if options.num_steps % per_run:
        raise UserError(f"{options.num_steps} steps do not divide into runs of {per_run}; give a multiple of {per_run}")
    options.problem.check()


class _Progress:
    """Combines the reports of the ranks."""

    def __init__(
        self,
        options: TrainingOptions,
        on_step: Callable[[TrainingStep], None] | None,
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
        """Process a rank's report: `Begun`, `Warned`, `Saved`, or (micro-batch, part of its mean loss, share of its rows)."""
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
            self._on_step(TrainingStep(step + 1, self.losses[-1], self.units_per_s))
