"""``autoddl schedule``: generate, validate, simulate and draw a pipeline schedule."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TypeVar

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.writing import write_atomically

from ._options import (
    add_family_options,
    add_json,
    add_wide,
    fitted,
    number_option,
    terminal_width,
    whole_numbers_option,
)

__all__ = ["add_parser", "run"]

Number = TypeVar("Number", int, float)

_FORMATS = ("text", "svg", "trace", "json", "csv")
#: Options that are passed on to the schedule family.
_FAMILY_OPTIONS = ("num_pipelines", "concatenation", "policy", "max_in_flight", "warm_up", "groups")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "schedule",
        help="generate, validate, simulate and draw a pipeline schedule",
        description="Generate a pipeline schedule of a family, or read one from a CSV file; validate, simulate and draw it.",
    )
    parser.add_argument("name", metavar="NAME", help="a schedule family, 'list' to list all families, or a FILE.csv")
    parser.add_argument("--stages", type=int, metavar="D", help="depth of the pipeline, which is its number of workers")
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="micro-batches per worker and iteration; for asynchronous schedules, per weight update",
    )
    _add_shape_options(parser)
    _add_times(parser)
    parser.add_argument(
        "--format", choices=_FORMATS, default="text", help="format of the output (default: %(default)s)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to this file (default: standard output)")
    add_wide(parser)
    add_json(parser, "the same as --format json")


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shape of the schedule ('schedule list --json' lists the options of each family)")
    add_family_options(group)
    group.add_argument(
        "--max-in-flight", type=int, metavar="L", help="1f1b: maximum number of micro-batches that fit into memory"
    )
    group.add_argument(
        "--warm-up",
        type=whole_numbers_option,
        metavar="K,...",
        help="1f1b: number of warm-up forward passes of each stage, instead of a policy",
    )
    group.add_argument(
        "--iterations", type=int, metavar="I", help="number of iterations (default: 1; asynchronous schedules: 4)"
    )
    group.add_argument(
        "--width",
        type=whole_numbers_option,
        metavar="W",
        help="devices per worker: one number, or W,... for each worker (default: 1)",
    )
    group.add_argument("--recompute", action="store_true", help="recompute activations before each backward pass")
    group.add_argument(
        "--all-reduce",
        metavar="WHEN",
        help="when gradients are reduced: none, eager or eager-sync-opt (default: eager-sync-opt)",
    )
    group.add_argument(
        "--activation-limit",
        type=float,
        metavar="A",
        help="maximum number of micro-batches whose activations a worker may hold",
    )


def _add_times(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "times, in one arbitrary unit", "Each is one number, or T,... with one number per stage (or boundary)."
    )
    group.add_argument(
        "--forward",
        type=_numbers,
        default=1.0,
        metavar="F",
        help="forward pass of a micro-batch at a stage (default: 1)",
    )
    group.add_argument(
        "--backward",
        type=_numbers,
        default=1.0,
        metavar="B",
        help="backward pass of a micro-batch at a stage (default: 1)",
    )
    group.add_argument(
        "--backward-input",
        type=_numbers,
        metavar="I",
        help="part of the backward pass that computes the gradient of the input (default: half of B)",
    )
    group.add_argument(
        "--recompute-time", type=_numbers, metavar="R", help="recomputation of a forward pass (default: F)"
    )
    group.add_argument(
        "--transfer",
        type=_numbers,
        default=0.0,
        metavar="C",
        help="transfer of a micro-batch over a boundary (default: 0)",
    )
    group.add_argument(
        "--transfer-latency", type=float, default=0.0, metavar="L", help="latency of every transfer (default: 0)"
    )
    group.add_argument("--blocking-transfers", action="store_true", help="workers do not compute while they send")
    group.add_argument(
        "--all-reduce-time",
        type=_numbers,
        default=0.0,
        metavar="A",
        help="all-reduce of a stage's gradients (default: 0)",
    )
    group.add_argument(
        "--free-regions", action="store_true", help="all-reduces progress only while their workers are idle"
    )
    group.add_argument(
        "--update-time", type=_numbers, default=0.0, metavar="U", help="update of a stage's weights (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print or write the schedule, or the list of families.  The grid of an invalid schedule is printed to stderr."""
    from autoddl.pipelines.validate import InvalidScheduleError

    output_format = "json" if arguments.json else arguments.format
    width = None if arguments.output else terminal_width(arguments)
    if arguments.name == "list":
        text = _family_list(output_format == "json", width)
    else:
        try:
            text = _render(arguments, output_format, width)
        except InvalidScheduleError as error:
            print(str(error).partition("\n")[2], file=sys.stderr)
            raise UserError(error.reason) from None
    if arguments.output:
        write_atomically(arguments.output, text)
    else:
        sys.stdout.write(text)
    return 0


def _render(arguments: argparse.Namespace, output_format: str, width: int | None) -> str:
    """Return the schedule in a format; text has lines of at most ``width`` characters."""
    from ..api.schedules import schedule
    from ..text.runs import simulation_text

    generated = schedule(
        arguments.name,
        stages=arguments.stages,
        micro_batches=arguments.micro_batches,
        iterations=arguments.iterations,
        width=_one_or_list(arguments.width or [1]),
        recompute=arguments.recompute,
        all_reduce=arguments.all_reduce,
        activation_limit=arguments.activation_limit,
        **{name: getattr(arguments, name) for name in _FAMILY_OPTIONS},
    )
    if output_format == "csv":
        return generated.to_csv()
    timeline = generated.simulate(
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
    if output_format == "svg":
        return timeline.to_svg()
    if output_format == "trace":
        return timeline.to_trace()
    document = timeline.document
    if output_format == "json":
        return json.dumps(document, indent=1) + "\n"
    return fitted(simulation_text(timeline, document), width) + "\n"


def _family_list(as_json: bool, width: int | None) -> str:
    from ..api.schedules import families_document, schedule_families
    from ..text.runs import families_text

    if as_json:
        return json.dumps(families_document(), indent=1) + "\n"
    return fitted(families_text(schedule_families()), width) + "\n"


def _numbers(text: str) -> float | list[float]:
    """Parse an option that is one number, or a list of numbers."""
    return _one_or_list([number_option(word) for word in text.split(",")])


def _one_or_list(values: list[Number]) -> Number | list[Number]:
    """Return the number of a list of length 1; otherwise the list."""
    return values[0] if len(values) == 1 else values
