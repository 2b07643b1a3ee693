"""``autoddl calibrate``: measure collectives, transfers and products on real ranks, and fit the cost model to them.

Samples are kept as they are taken: an interrupted run continues where it was when it is started again with the same --samples.
Started by a cluster's launcher on every rank, it measures on those ranks; else it starts ranks of its own on this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import MAX_BYTES, MAX_DEVICES
from autoddl.costmodel.reading import parse_figure, whole_number
from autoddl.costmodel.units import format_bytes, to_si

from ._running import OUR_FAULT, report
from .fit import add_fit_arguments, finish, name_of

__all__ = ["add_parser", "run"]

SIZES = "4KiB:16MiB"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this system's collectives and fit a cluster file",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument("-o", "--output", metavar="CLUSTER.json", help="write the cluster file")
    parser.add_argument("--samples", metavar="FILE.csv", help="keep the samples here (next to the cluster file)")
    parser.add_argument(
        "--ranks", default="2,4", metavar="N,...", help="local ranks: a job for each number (%(default)s)"
    )
    parser.add_argument(
        "--sizes",
        default=SIZES,
        metavar="B,... or A:B",
        help="message sizes, or a range of which every power of 4 is taken (%(default)s)",
    )
    parser.add_argument("--collectives", metavar="C,...", help="which ones (all, and point-to-point)")
    parser.add_argument("--repetitions", type=int, default=100, metavar="K", help="of each measurement (%(default)s)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop measuring after this time")
    parser.add_argument("--communication-only", action="store_true", help="no products: leave the device as it is")
    add_fit_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, write, print."""
    from autoddl.calib.campaign import is_in_job
    from autoddl.calib.measurements import COLLECTIVES

    from ..api.measuring import calibrate

    path = arguments.samples or _beside(arguments.output)
    options: dict[str, Any] = {
        "ranks": [_whole("--ranks", part) for part in arguments.ranks.split(",")],
        "sizes": _sizes(arguments.sizes),
        "collectives": arguments.collectives.split(",") if arguments.collectives else COLLECTIVES,
        "repetitions": arguments.repetitions,
        "budget_s": arguments.budget,
        "communication_only": arguments.communication_only,
        "base": arguments.base,
        "name": name_of(arguments),
        "seed": arguments.seed,
        "quiet": arguments.quiet,
    }
    try:
        found = calibrate(path, **options)
    except BaseException as error:
        if not is_in_job():
            raise
        # A rank that merely raised would wait for the others when it exits, and they for it.
        code = report(error)
        sys.stderr.flush()
        os._exit(1 if code == OUR_FAULT else code)
    if found is None:  # a rank of a job that is not the first
        return 0
    if not arguments.json:
        print(f"samples: {path} ({len(found.found.samples)})\n")
    return finish(found, arguments)


def _beside(output: str | None) -> str:
    if output is None:
        return "measurements.csv"
    return (output[: -len(".json")] if output.endswith(".json") else output) + ".csv"


def _whole(option: str, text: str) -> int:
    return whole_number(text.strip(), option, 1, MAX_DEVICES)


def _sizes(text: str) -> tuple[int, ...]:
    if ":" in text:
        first, last = (_size(part) for part in text.split(":", 1))
        if first > last or first < 1:
            raise UserError(f"--sizes {quote(text)}: {format_bytes(first)} should be at most {format_bytes(last)}")
        sizes = [first]
        while sizes[-1] * 4 <= last:
            sizes.append(sizes[-1] * 4)
        return tuple(sizes)
    return tuple(_size(part) for part in text.split(","))


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise UserError(f"--sizes: {quote(text)} is not a number of bytes with a unit, such as 64KiB")
    size = to_si(parse_figure(match[1]), match[2] or "B", "size", "--sizes")
    if not size <= MAX_BYTES:
        raise UserError(f"--sizes: {quote(text)} should be at most {MAX_BYTES} bytes")
    return round(size)
