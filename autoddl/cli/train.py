"""``autoddl train``: train a plan, or a model with a pipeline schedule, on ranks of this machine.

The exit code is 1 if a rank failed, and 2 if the last checkpoint could not be written.  In the latter case the result is still
printed, since the training is complete, but the trained weights are not saved.
"""

from __future__ import annotations

import argparse
from inspect import signature

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.precision import PRECISIONS

from ._options import (
    add_device,
    add_edited,
    add_family_options,
    add_json,
    add_quiet,
    add_wide,
    print_document,
    show,
    whole_numbers_option,
)

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="train a plan, or a model with a pipeline schedule, on ranks of this machine (requires OneFlow)",
        description="Train a plan, or a model with a pipeline schedule, on ranks of this machine: on its GPUs, or on its CPU. "
        "Built-in models learn the bytes of a text; other models bring their own data. Every worker of a schedule is one rank, or "
        "several ranks that share the samples of each micro-batch. The exit code is 1 if a rank fails, and 2 if the last "
        "checkpoint cannot be written.",
    )
    parser.add_argument(
        "subject",
        metavar="MODEL",
        help="a model: gpt:LAYERSxWIDTH (such as gpt:6x64), bert:LAYERSxWIDTH, llama:LAYERSxWIDTH, mlp:WIDTH,WIDTH,..., or "
        "FILE.py:FUNCTION, where FUNCTION returns an nn.Sequential and (inputs, targets), the training samples; or a plan: "
        "PLAN.json, which defines the model, stages, strategies, schedule and micro-batch",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="FILE.py:FUNCTION",
        help="with a plan whose model is not built in: function that returns the model and (inputs, targets), the training samples",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="text that a built-in model learns, byte by byte (default: the license of AutoDDL)",
    )
    parser.add_argument(
        "--heads",
        type=int,
        metavar="H",
        help="number of attention heads of a transformer (default: width / 32, at least 1)",
    )
    parser.add_argument(
        "--sequence", type=int, metavar="BYTES", help="sequence length of a transformer, in bytes (default: 64)"
    )
    parser.add_argument(
        "--untied",
        action="store_true",
        help="give the head of gpt and bert its own weights, not those of the embedding; asynchronous schedules require this",
    )
    _add_schedule_options(parser)
    _add_training_options(parser)
    add_edited(parser)
    parser.add_argument(
        "--timeline", action="store_true", help="print the timeline of the last run and of its simulation"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="with a plan: record where the time of the last step goes on every rank, beside the predicted step, in a Chrome trace",
    )
    add_wide(parser)
    add_json(parser)
    add_quiet(parser)


def _add_schedule_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedule of a model without a plan")
    group.add_argument(
        "--schedule", metavar="NAME", help="schedule family; `autoddl schedule list` lists them (default: 1f1b)"
    )
    group.add_argument("--stages", type=int, metavar="D", help="number of stages (default: 2)")
    group.add_argument(
        "--micro-batches", type=int, metavar="N", help="micro-batches per weight update (default: number of stages)"
    )
    add_family_options(group)
    group.add_argument(
        "--width",
        type=whole_numbers_option,
        metavar="W",
        help="ranks per worker: one number, or W,... for each worker (default: 1)",
    )
    group.add_argument(
        "--sizes",
        type=whole_numbers_option,
        metavar="L,...",
        help="number of layers of each stage, including embedding and head (default: even)",
    )
    group.add_argument("--recompute", action="store_true", help="recompute activations before each backward pass")
    group.add_argument("--micro-batch", type=int, metavar="b", help="samples per micro-batch (default: 4)")


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--steps",
        type=int,
        default=50,
        metavar="STEPS",
        help="number of weight updates, including those before a checkpoint (default: %(default)s)",
    )
    group.add_argument(
        "--compress-boundaries",
        action="store_true",
        help="send tensors between stages in scaled half precision, if no value is lost",
    )
    group.add_argument(
        "--optimizer", default="Adam", metavar="NAME", help="class in oneflow.optim (default: %(default)s)"
    )
    group.add_argument(
        "--learning-rate", type=float, default=1e-3, metavar="LR", help="learning rate (default: %(default)g)"
    )
    add_device(group, default="cuda if this machine has GPUs")
    group.add_argument(
        "--precision", choices=tuple(PRECISIONS), help="precision of a model without a plan (default: float32)"
    )
    group.add_argument("--seed", type=int, default=0, help="seed of initial values and data (default: %(default)s)")
    group.add_argument(
        "--checkpoints",
        metavar="DIR",
        help="folder of checkpoints; the training resumes from the latest complete checkpoint there",
    )
    group.add_argument(
        "--every", type=int, default=10, metavar="STEPS", help="steps between checkpoints (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train the model and print the result."""
    from ..api.training import train
    from ..text.runs import training_text

    # The options of the command have the names of the function's arguments.
    options = {name: getattr(arguments, name) for name in signature(train).parameters if hasattr(arguments, name)}
    training = train(arguments.subject, **options)
    if arguments.json:
        print_document(training.document)
    else:
        show(training_text(training.options, training.result, arguments.timeline, training.trace), arguments)
    if unsaved := training.result.unsaved:
        raise UserError(
            f"the last checkpoint could not be written: {unsaved}; steps after step {training.result.last_saved} are not saved"
        )
    return 0
