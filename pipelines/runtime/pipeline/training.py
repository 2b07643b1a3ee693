"""Training of a model with a schedule on ranks of this machine. Needs no OneFlow in this process: only the ranks load it.

Checkpoints that are damaged or cannot be written do not end the training (see `saving`). The ranks decide together where they
resume, and report it, like losses and warnings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoddl.costmodel.devices import CPU, DEVICE_VARIABLE
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_TRAINING_PASSES

from ...generators import generate
from ...schedule import Schedule
from ...spans import Recorded
from ..ranks.launcher import RankPool
from .checkpoint import prepare_directory
from .problems import TrainingProblem
from .report import PipelineReport, combine
from .saving import warn_on_stderr

__all__ = [
    "Begun",
    "Ended",
    "Saved",
    "Traced",
    "TrainingOptions",
    "TrainingResult",
    "TrainingStep",
    "Warned",
    "schedule_of",
    "train",
]


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training.

    Attributes:
        problem: Model and data.
        schedule: Schedule of one run: of one step if it is synchronous, otherwise of the steps between two checkpoints, or of all.
        num_steps: Total number of weight updates, including those before a checkpoint.
        micro_batch: Samples per micro-batch.
        optimizer: Name of a class in ``oneflow.optim``.
        learning_rate: Learning rate of the optimizer.
        seed: Seed of initial values and data.
        sizes: Layers per stage; the embedding and the head count as one layer each. None: an even division.
        compress: Whether tensors between stages are compressed if their values allow it (see `compression`).
        checkpoints: Directory of checkpoints; the training resumes from the newest intact one there. None: no checkpoints.
        steps_per_checkpoint: Weight updates between checkpoints.
        precision: Precision, which CPU ranks run with wider types if it is a mixed one.
        device: Type of device.
        traces: Whether the ranks record where the time of the last run goes.
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
    precision: str = "float32"
    device: str = CPU
    traces: bool = False


@dataclass(frozen=True)
class TrainingStep:
    """A training step whose losses are complete.

    Attributes:
        number: Number of steps so far, including this one and those before a checkpoint.
        loss: Mean loss over the micro-batches of the step.
        units_per_s: Throughput in the problem's units, over all steps of this training up to this one.
    """

    number: int
    loss: float
    units_per_s: float


@dataclass(frozen=True)
class Begun:
    """A rank's report that it starts.

    Attributes:
        num_updates: Weight updates before the checkpoint from which the training resumes; 0 without one.
        device: Type of device that the ranks run on.
        types: Types of activations and of stored weights.
    """

    num_updates: int
    device: str = CPU
    types: tuple[str, str] = ("float32", "float32")


@dataclass(frozen=True)
class Warned:
    """Rank 0's report of a warning.

    Attributes:
        text: The warning, one line for the user.
    """

    text: str


@dataclass(frozen=True)
class Saved:
    """Rank 0's report of a checkpoint.

    Attributes:
        num_updates: Weight updates so far.
        failure: Reason why the checkpoint could not be written; "" if it is complete.
    """

    num_updates: int
    failure: str


@dataclass(frozen=True)
class Ended:
    """A rank's report that it has made all steps.

    Attributes:
        peak_memory_bytes: Its peak memory on its device (see `peakmemory`); None if unknown.
    """

    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Traced:
    """A rank's report of where the time of its last run went.

    Attributes:
        recorded: What the rank did.
        step_s: Median duration of the runs that were not recorded, without the first one; None if there are none.
    """

    recorded: Recorded
    step_s: float | None


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    Attributes:
        first_step: Number of steps before the checkpoint from which the training resumed; 0 without one.
        losses: Loss of each later step: the mean over its micro-batches.
        units_per_s: Throughput in the problem's units over these steps, without the start of the ranks.
        last_run: Report of the last run of the schedule; None if no step was left to run.
        unsaved: Reason why the last checkpoint could not be written; "" if it was written, or none was requested.
        last_saved: Number of steps before the newest checkpoint; 0 if there is none.
        device: Type of device that the ranks ran on.
        types: Types of activations and of stored weights.
        peak_memory_bytes: For each rank, its peak memory on its device (see `peakmemory`); None if unknown.
        traced: For each rank, where the time of the last run went; empty if it was not recorded.
    """

    first_step: int
    losses: tuple[float, ...]
    units_per_s: float
    last_run: PipelineReport | None
    unsaved: str = ""
    last_saved: int = 0
    device: str = CPU
    types: tuple[str, str] = ("float32", "float32")
    peak_memory_bytes: tuple[int | None, ...] = ()
    traced: tuple[Traced, ...] = ()


def train(
    options: TrainingOptions,
    on_step: Callable[[TrainingStep], None] | None = None,
    *,
    on_warning: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    **pool_options: Any,
) -> TrainingResult:
    """Train on as many ranks of this machine as the schedule has.

    Args:
        options: Problem, schedule and options of the training.
        on_step: Called with every step as soon as its loss is complete.
        on_warning: Called with every warning, of one line, about a checkpoint that is damaged or cannot be written. Default: print
            warnings on stderr.
        timeout_s: Longest duration of the training after the ranks have started [s]; None: no limit.
        pool_options: Options of the `RankPool`.

    Raises:
        UserError: Options are inconsistent, the directory of checkpoints cannot be written, none of the checkpoints there is
            intact, or the newest intact one is of another model.
        RankError: A rank failed.
    """
    _check_options(options)
    schedule = options.schedule
    if options.checkpoints is not None:
        prepare_directory(options.checkpoints)
    progress = _Progress(options, on_step, on_warning or warn_on_stderr)
    environment = {DEVICE_VARIABLE: options.device}
    with RankPool(sum(schedule.widths), environment=environment, **pool_options) as pool:
        job = "autoddl.pipelines.runtime.pipeline.training_job:train_on_rank"
        results = pool.run(job, options, timeout_s=timeout_s, on_report=progress.take)
    last = combine(schedule, results) if results[0] is not None else None
    return TrainingResult(
        progress.first,
        tuple(progress.losses),
        progress.units_per_s,
        last,
        progress.unsaved,
        progress.last_saved,
        progress.begun.device,
        progress.begun.types,
        tuple(progress.peak_memory_bytes[rank] for rank in sorted(progress.peak_memory_bytes)),
        tuple(progress.traced[rank] for rank in sorted(progress.traced)),
    )


def schedule_of(name: str, num_steps: int, **options: Any) -> Schedule:
    """Return the schedule of one run.

    Args:
        name: Family of the schedule; see `autoddl.pipelines.generators`.
        num_steps: Training steps of the run if the schedule is asynchronous. A run of a synchronous schedule is one step.
        options: Options of the family.

    >>> schedule = schedule_of("gpipe", 10, num_stages=2, num_micro_batches=4)
    >>> schedule.num_workers, schedule.num_updates
    (2, 1)
    """
    schedule = generate(name, iterations=1, **options)
    if schedule.is_synchronous:
        return schedule
    return generate(name, iterations=num_steps, most_passes=MAX_TRAINING_PASSES, **options)


def _check_options(options: TrainingOptions) -> None:
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
    """Combines the reports of the ranks to steps.

    Args:
        options: Options of the training.
        on_step: Called with every step whose losses are complete.
        on_warning: Called with every warning.

    Attributes:
        first: Number of steps before the checkpoint from which the training resumed.
        begun: Report of the rank that has started first.
        unsaved: Reason why the last checkpoint could not be written; "" if it was written.
        last_saved: Number of steps before the newest checkpoint.
        losses: Mean losses of the steps that are complete.
        units_per_s: Throughput over these steps.
        peak_memory_bytes: Peak memory of each rank that has made all steps; None if unknown.
        traced: Where the time of the last run went, of each rank.
    """

    def __init__(
        self,
        options: TrainingOptions,
        on_step: Callable[[TrainingStep], None] | None,
        on_warning: Callable[[str], None],
    ) -> None:
        self.first = 0
        self.begun = Begun(0)
        self.unsaved = ""
        self.last_saved = 0
        self.losses: list[float] = []
        self.units_per_s = 0.0
        self.peak_memory_bytes: dict[int, int | None] = {}
        self.traced: dict[int, Traced] = {}
        self._period = options.schedule.update_period
        self._units_per_step = self._period * options.micro_batch * options.problem.units_per_sample
        self._on_step = on_step
        self._on_warning = on_warning
        #: By step: the sum of the parts of its mean loss that have been reported, and the share of its rows that these are of.
        self._loss_sums: dict[int, float] = {}
        self._shares: dict[int, float] = {}
        self._start_s: float | None = None

    def take(self, rank: int, value: Any) -> None:
        """Process a rank's report.

        It is `Begun`, `Warned`, `Saved`, `Traced`, `Ended`, or (micro-batch, part of its mean loss, share of rows).
        """
        if isinstance(value, Begun):
            if self._start_s is None:
                self._start_s = time.monotonic()
                self.begun = value
                self.first = self.last_saved = value.num_updates
            return
        if isinstance(value, Warned):
            self._on_warning(value.text)
            return
        if isinstance(value, Saved):
            self.unsaved = value.failure
            self.last_saved = self.last_saved if value.failure else value.num_updates
            return
        if isinstance(value, Traced):
            self.traced[rank] = value
            return
        if isinstance(value, Ended):
            self.peak_memory_bytes[rank] = value.peak_memory_bytes
            return
        number, part, share = value
        step = number // self._period
        self._loss_sums[step] = self._loss_sums.get(step, 0.0) + part / self._period
        self._shares[step] = self._shares.get(step, 0.0) + share / self._period
        while (
            self._shares.get(self.first + len(self.losses), 0.0) > 1 - 1e-9
        ):  # up to rounding, all rows of the next step
            self._finish(self.first + len(self.losses))

    def _finish(self, step: int) -> None:
        assert self._start_s is not None
        del self._shares[step]
        self.losses.append(self._loss_sums.pop(step))
        duration_s = time.monotonic() - self._start_s
        self.units_per_s = len(self.losses) * self._units_per_step / duration_s
        if self._on_step is not None:
            self._on_step(TrainingStep(step + 1, self.losses[-1], self.units_per_s))
