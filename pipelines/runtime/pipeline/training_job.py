"""The function that each rank runs in a training."""

from __future__ import annotations

import statistics
import time
from typing import Any

from autoddl.costmodel.errors import UserError

from ..backend import backend_of, type_name
from ..load import load_oneflow
from ..peakmemory import PeakMemory
from ..ranks.rank import report
from ..recording import Recorder
from .report import RankReport
from .trainer import PipelineTrainer
from .training import Begun, Ended, Saved, Traced, TrainingOptions, Warned

flow: Any = load_oneflow()

__all__ = ["train_on_rank"]

#: Number of runs that are recorded, of which the last one counts: the first allocates what only recording needs.
_RECORDED_RUNS = 2


def train_on_rank(options: TrainingOptions) -> RankReport | None:
    """Train to the last step, and report progress to the process that started the ranks.

    Returns:
        The report of the last run of the schedule; None if no step was left to run.

    Raises:
        UserError: The optimizer is unknown, or as for `PipelineTrainer`, its `restore`, and `TrainingProblem.load`.
    """
    make_optimizer = getattr(flow.optim, options.optimizer, None)
    if not (isinstance(make_optimizer, type) and issubclass(make_optimizer, flow.optim.Optimizer)):
        raise UserError(f"optimizer {options.optimizer} is not in oneflow.optim; give SGD, Adam, AdamW, ...")
    backend = backend_of(options.precision, options.device)
    memory = PeakMemory(backend.device)
    model, batches = options.problem.load(options.micro_batch, options.seed)
    trainer = PipelineTrainer(
        model,
        options.schedule,
        lambda parameters: make_optimizer(parameters, lr=options.learning_rate),
        batches,
        sizes=options.sizes,
        compress=options.compress,
        backend=backend,
        on_loss=lambda *part: report(part),
        warn=lambda text: report(Warned(text)),
    )
    if options.checkpoints is not None and trainer.restore(options.checkpoints):
        _check_period(trainer)
    report(Begun(trainer.num_updates, backend.device, (type_name(backend.compute), type_name(backend.master))))
    last = None
    last_tried = trainer.num_updates  # updates before the latest attempt to save
    recorder, seconds = Recorder(), []
    while trainer.num_updates < options.num_steps:
        num_left = (options.num_steps - trainer.num_updates) // options.schedule.num_updates
        is_recorded = options.traces and num_left <= _RECORDED_RUNS
        begun = time.monotonic()
        last = trainer.run(recorder if is_recorded else None)
        if not is_recorded:
            seconds.append(time.monotonic() - begun)
        is_last = trainer.num_updates >= options.num_steps
        is_due = is_last or trainer.num_updates - last_tried >= options.steps_per_checkpoint
        if options.checkpoints is not None and is_due:
            trainer.save(options.checkpoints)
            last_tried = trainer.num_updates  # even if it failed: the next attempt comes when it is due
            if trainer.rank == 0:
                report(Saved(trainer.num_updates, trainer.save_failure))
    if options.traces and last is not None:
        report(Traced(recorder.record(), statistics.median(seconds[1:]) if len(seconds) > 1 else None))
    report(Ended(memory.read()))
    return last


def _check_period(trainer: PipelineTrainer) -> None:
    """Check that the schedule has as many micro-batches per step as that of the checkpoint."""
    schedule = trainer.lowered.schedule
    if trainer.num_micro_batches != trainer.num_updates * schedule.update_period:
        raise UserError(
            f"the checkpoint is of {trainer.num_micro_batches} micro-batches after {trainer.num_updates} steps; "
            f"schedule {schedule.name} has {schedule.update_period} per step"
        )
