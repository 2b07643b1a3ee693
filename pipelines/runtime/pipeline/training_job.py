"""What each rank does in training."""

from __future__ import annotations

from typing import Any

from autoddl.costmodel.errors import UserError

from ..load import load_oneflow
from ..rank import report
from .report import RankReport
from .trainer import PipelineTrainer
from .training import TrainingOptions

flow: Any = load_oneflow()

__all__ = ["train_on_rank"]


def train_on_rank(options: TrainingOptions) -> RankReport | None:
    """Train to the last step; the report of the last run, None where nothing was left to do."""
    make = getattr(flow.optim, options.optimizer, None)
    if not (isinstance(make, type) and issubclass(make, flow.optim.Optimizer)):
        raise UserError(f"optimizer {options.optimizer} is not in oneflow.optim; give SGD, Adam, AdamW, ...")
    chain, batches = options.problem.load(options.micro_batch, options.seed)
    trainer = PipelineTrainer(
        chain,
        options.schedule,
        lambda parameters: make(parameters, lr=options.learning_rate),
        batches,
        sizes=options.sizes,
        compress=options.compress,
        on_loss=lambda *part: report(part),
    )
    if options.checkpoints is not None:
        trainer.restore(options.checkpoints)
    report("begin")
    last = None
    saved = trainer.num_updates
    while trainer.num_updates < options.num_steps:
        last = trainer.run()
        is_due = trainer.num_updates - saved >= options.steps_per_checkpoint or trainer.num_updates >= options.num_steps
        if options.checkpoints is not None and is_due:
            trainer.save(options.checkpoints)
            saved = trainer.num_updates
    return last
