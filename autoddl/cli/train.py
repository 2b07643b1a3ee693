"""``autoddl train``: train a model with a pipeline schedule, on local ranks.

The exit code is 1 if a rank failed, and 2 if the last checkpoint could not be written: the result is printed all the same, since
the training is done, but what it learned is not saved.
"""

from __future__ import annotations

import argparse
import json
from inspect import signature

from autoddl.costmodel.errors import UserError

from ._options import add_edited, add_wide, show, whole_option

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a model with a pipeline schedule, on local ranks (needs OneFlow)",
        description="Train a built-in model on the bytes of a text, or a model of your own on its data, with any pipeline "
        "schedule: each stage on a CPU rank of its own, or on several that split the micro-batches. The exit code is 1 when a rank "
        "fails, and 2 when the last checkpoint cannot be written.",
    )
    parser.add_argument(
        "subject",
        metavar="MODEL",
        help="gpt:, bert: or llama:LAYERSxWIDTH, such as gpt:6x64; mlp:WIDTH,WIDTH,...; or FILE.py:FUNCTION, where FUNCTION "
        "returns an nn.Sequential and (inputs, targets), the samples to learn from; or PLAN.json, what `autoddl plan -o` "
        "wrote: its model, stages, strategies, schedule and micro-batch",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="FILE.py:FUNCTION",
        help="of a plan: what makes its model, where that is none that is built in, and returns with it (inputs, targets), the "
        "samples to learn from",
    )
    parser.add_argument("--text", metavar="FILE", help="what a built-in model learns, byte by byte (our license)")
    parser.add_argument("--heads", type=int, help="of a transformer's attention (width / 32, at least 1)")
    parser.add_argument("--sequence", type=int, metavar="BYTES", help="of a transformer (64)")
    parser.add_argument(
        "--untied", action="store_true", help="a head of its own for gpt and bert, which asynchronous schedules need"
    )
    shape = parser.add_argument_group("schedule, as for `autoddl schedule`")
    shape.add_argument("--schedule", metavar="NAME", help="see `autoddl schedule list` (1f1b)")
    shape.add_argument("--stages", type=int, metavar="D", help="workers (2)")
    shape.add_argument("--micro-batches", type=int, metavar="N", help="per weight update (D)")
    shape.add_argument("--pipelines", dest="num_pipelines", type=int, metavar="2f", help="of chimera")
    shape.add_argument("--concatenation", metavar="HOW", help="of chimera: direct, doubling or halving")
    shape.add_argument("--policy", metavar="P", help="of 1f1b: A or B; of zero-bubble: H1 or H2")
    shape.add_argument("--groups", type=int, metavar="G", help="of grouped and interleaved schedules")
    shape.add_argument("--width", type=_whole_numbers, metavar="W", help="ranks per worker: W, or W,... (1)")
    shape.add_argument(
        "--sizes", type=_whole_numbers, metavar="L,...", help="layers per stage, embedding and head included"
    )
    shape.add_argument("--recompute", action="store_true", help="recompute activations before each backward")
    shape.add_argument(
        "--compress-boundaries",
        action="store_true",
        help="send what goes between stages in half precision, scaled, where no value is lost by that",
    )
    how = parser.add_argument_group("training")
    how.add_argument("--steps", type=int, default=50, help="weight updates (%(default)s)")
    how.add_argument("--micro-batch", type=int, metavar="B", help="samples in a micro-batch (4)")
    how.add_argument("--optimizer", default="Adam", metavar="NAME", help="one of oneflow.optim (%(default)s)")
    how.add_argument("--learning-rate", type=float, default=1e-3, metavar="LR", help="(%(default)g)")
    how.add_argument("--seed", type=int, default=0, help="of initial values and data (%(default)s)")
    how.add_argument("--checkpoints", metavar="DIR", help="save there, and go on from the newest whole one there")
    how.add_argument("--every", type=int, default=10, metavar="STEPS", help="between checkpoints (%(default)s)")
    add_edited(parser)
    parser.add_argument("--timeline", action="store_true", help="show the last run beside its simulation")
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Train, print the result."""
    from ..api.training import train
    from ..text.runs import training_text

    given = {name: getattr(arguments, name) for name in signature(train).parameters if hasattr(arguments, name)}
    result = train(arguments.subject, **given)
    if arguments.json:
        print(json.dumps(result.document, indent=1, allow_nan=False))
    else:
        show(training_text(result.options, result.found, arguments.timeline), arguments)
    if unsaved := result.found.unsaved:
        raise UserError(
            f"the last checkpoint could not be written: {unsaved}; steps after step {result.found.last_saved} are not saved"
        )
    return 0


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(whole_option, text.split(",")))
