"""``autoddl schedule``: generate, validate, simulate and draw a pipeline schedule."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.writing import write_atomically

from ._options import add_wide, fitted, number_option, terminal_width, whole_option

__all__ = ["add_parser", "run"]

_FORMATS = ("text", "svg", "trace", "json", "csv")
_OPTIONS = ("num_pipelines", "concatenation", "policy", "max_in_flight", "warm_up", "groups")
"""Arguments that are handed to the family as they are, where given."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "schedule", help="generate, validate, simulate and draw a pipeline schedule", description=__doc__
    )
    parser.add_argument("name", metavar="NAME", help="a family of schedules, 'list' for a line on each, or a FILE.csv")
    parser.add_argument("--stages", type=int, metavar="D", help="depth of the pipeline: its number of workers")
    parser.add_argument(
        "--micro-batches", type=int, metavar="N", help="per worker and iteration (asynchronous: per weight update)"
    )
    shape = parser.add_argument_group("shape (each for the families that 'schedule list --json' names it for)")
    shape.add_argument("--pipelines", dest="num_pipelines", type=int, metavar="2f", help="of chimera (default 2)")
    shape.add_argument("--concatenation", metavar="HOW", help="of chimera: direct, doubling or halving")
    shape.add_argument("--policy", metavar="P", help="of 1f1b: A or B; of zero-bubble: H1 or H2")
    shape.add_argument("--max-in-flight", type=int, metavar="L", help="of 1f1b: micro-batches that fit in memory")
    shape.add_argument("--warm-up", type=_whole_numbers, metavar="K,...", help="of 1f1b: warm-up forwards per stage")
    shape.add_argument(
        "--groups", type=int, metavar="G", help="stages per worker, of grouped and interleaved schedules"
    )
    shape.add_argument("--iterations", type=int, metavar="I", help="1 by default; 4 for asynchronous schedules")
    shape.add_argument("--width", type=_whole_numbers, metavar="W", help="devices per worker: a number, or W,...")
    shape.add_argument("--recompute", action="store_true", help="recompute activations before each backward")
    shape.add_argument("--all-reduce", metavar="WHEN", help="none, eager or eager-sync-opt (default)")
    shape.add_argument("--activation-limit", type=float, metavar="A", help="micro-batches of activations per worker")
    times = parser.add_argument_group("times, in any one unit: a number, or one per stage (boundary) as T,...")
    times.add_argument("--forward", type=_numbers, default=1.0, metavar="F", help="of a micro-batch at a stage (1)")
    times.add_argument("--backward", type=_numbers, default=1.0, metavar="B", help="input and weight part together (1)")
    times.add_argument("--backward-input", type=_numbers, metavar="I", help="of the input part (half of B)")
    times.add_argument("--recompute-time", type=_numbers, metavar="R", help="(F)")
    times.add_argument("--transfer", type=_numbers, default=0.0, metavar="C", help="over a boundary (0)")
    times.add_argument("--transfer-latency", type=float, default=0.0, metavar="C0", help="of every transfer (0)")
    times.add_argument("--blocking-transfers", action="store_true", help="workers send before they go on")
    times.add_argument("--all-reduce-time", type=_numbers, default=0.0, metavar="A", help="of a stage's gradients (0)")
    times.add_argument("--free-regions", action="store_true", help="all-reduces progress only where a worker idles")
    times.add_argument("--update-time", type=_numbers, default=0.0, metavar="U", help="of a stage's weights (0)")
    parser.add_argument("--format", choices=_FORMATS, default="text")
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of to stdout")
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="the same as --format json")


def run(arguments: argparse.Namespace) -> int:
    """Print or write what was asked for; an invalid schedule's grid goes to stderr."""
    from autoddl.pipelines.validate import InvalidScheduleError

    form = "json" if arguments.json else arguments.format
    width = None if arguments.output else terminal_width(arguments)
    if arguments.name == "list":
        text = _listing(form == "json", width)
    else:
        try:
            text = _render(arguments, form, width)
        except InvalidScheduleError as error:
            print(str(error).partition("\n")[2], file=sys.stderr)
            raise UserError(error.reason) from None
    if arguments.output:
        write_atomically(arguments.output, text)
    else:
        sys.stdout.write(text)
    return 0


def _render(arguments: argparse.Namespace, form: str, width: int | None) -> str:
    from ..api.schedules import schedule
    from ..text.runs import simulation_text

    found = schedule(
        arguments.name,
        stages=arguments.stages,
        micro_batches=arguments.micro_batches,
        iterations=arguments.iterations,
        width=1 if arguments.width is None else arguments.width[0] if len(arguments.width) == 1 else arguments.width,
        recompute=arguments.recompute,
        all_reduce=arguments.all_reduce,
        activation_limit=arguments.activation_limit,
        **{name: getattr(arguments, name) for name in _OPTIONS},
    )
    if form == "csv":
        return found.to_csv()
    timeline = found.simulate(
        forward=arguments.forward,
        backward=arguments.backward,
        backward_input=arguments.backward_input,
        recompute=arguments.recompute_time,
        all_reduce=arguments.all_reduce_time,
        update=arguments.update_time,
        transfer=arguments.transfer,
        transfer_latency=arguments.transfer_latency,
        overlap_transfers=not arguments.blocking_transfers,
        all_reduce_overlaps_compute=not arguments.free_regions,
    )
    if form == "svg":
        return timeline.to_svg()
    if form == "trace":
        return timeline.to_trace()
    facts = timeline.document
    if form == "json":
        return json.dumps(facts, indent=1) + "\n"
    return fitted(simulation_text(timeline, facts), width) + "\n"


def _listing(as_json: bool, width: int | None) -> str:
    from autoddl.pipelines.generators import families

    from ..text.runs import families_text

    if as_json:
        listed = [
            {
                "name": family.name,
                "summary": family.summary,
                "synchronous": family.synchronous,
                "options": dict(family.options),
            }
            for family in families()
        ]
        return json.dumps({"format": "autoddl-schedule-families", "version": 1, "families": listed}, indent=1) + "\n"
    return fitted(families_text(families()), width) + "\n"


def _numbers(text: str) -> Any:
    """A number, or a list of them."""
    values = [number_option(word) for word in text.split(",")]
    return values[0] if len(values) == 1 else values


def _whole_numbers(text: str) -> list[int]:
    return [whole_option(word) for word in text.split(",")]
