"""What each rank does in training on a text."""

from __future__ import annotations

from typing import Any

from autoddl.costmodel.errors import UserError

from ..load import load_oneflow
from ..models import GPT, initialize
from ..rank import report
from .chain import chain_of
from .report import RankReport
from .trainer import PipelineTrainer
from .training import VOCABULARY, TextBatches, TrainingOptions

flow: Any = load_oneflow()

__all__ = ["train_text"]


def train_text(options: TrainingOptions) -> RankReport | None:
    """Train to the last step; the report of the last run, None where nothing was left to do."""
    make = getattr(flow.optim, options.optimizer, None)
    if not (isinstance(make, type) and issubclass(make, flow.optim.Optimizer)):
        raise UserError(f"optimizer {options.optimizer} is not in oneflow.optim; give SGD, Adam, AdamW, ...")
    sizes = (options.layers, options.width, options.heads, VOCABULARY, options.sequence)
    trainer = PipelineTrainer(
        chain_of(initialize(GPT(*sizes, tied=options.tied), options.seed)),
        options.schedule,
        lambda parameters: make(parameters, lr=options.learning_rate),
        TextBatches(options.text, options.micro_batch, options.sequence, options.seed),
        sizes=options.sizes,
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
