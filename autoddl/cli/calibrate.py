"""``autoddl calibrate``: measure collectives, transfers and matrix products on ranks, and fit a cluster to them.

Every sample is saved as soon as it is measured, so that an interrupted run resumes if it is started again with the same
``--samples``.  If a launcher runs the command on every rank of a job, it measures on these ranks; otherwise it starts ranks on this
machine.
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

from ._running import INTERNAL_ERROR, report
from .fit import add_fit_arguments, name_of, write_calibration

__all__ = ["add_parser", "run"]

#: Default of ``--sizes``.
SIZES = "4KiB:16MiB"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure collectives on this system and fit a cluster file (requires OneFlow)",
        description="Measure collectives, transfers and matrix products on ranks of this machine, or on the ranks of a job that a "
        "launcher has started, and fit a cluster file to them. Requires OneFlow.",
    )
    parser.add_argument("-o", "--output", metavar="CLUSTER.json", help="write the cluster to this file")
    parser.add_argument(
        "--samples",
        metavar="FILE.csv",
        help="save every sample to this file, and do not measure samples that it already contains (default: the name of the "
        "cluster file with .csv)",
    )
    parser.add_argument(
        "--ranks",
        default="2,4",
        metavar="N,...",
        help="numbers of ranks on this machine, each measured in a job of its own (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        default=SIZES,
        metavar="B,... or A:B",
        help="message sizes, or a range from A to B in steps of a factor of 4 (default: %(default)s)",
    )
    parser.add_argument(
        "--collectives", metavar="NAME,...", help="collectives to measure (default: all, and point-to-point transfers)"
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=100,
        metavar="K",
        help="number of repetitions of each measurement (default: %(default)s)",
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop measuring after this time")
    parser.add_argument(
        "--communication-only",
        action="store_true",
        help="measure no matrix products; take the device from the base cluster",
    )
    add_fit_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit a cluster, write it and print it."""
    from autoddl.calib.campaign import is_in_job
    from autoddl.calib.measurements import COLLECTIVES

    from ..api.measuring import calibrate

    path = arguments.samples or _default_samples(arguments.output)
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
        calibration = calibrate(path, **options)
    except BaseException as error:
        if not is_in_job():
            raise
        # Exit at once: a normal exit would wait for the other ranks, which wait for this one.
        code = report(error)
        sys.stderr.flush()
        os._exit(1 if code == INTERNAL_ERROR else code)
    if calibration is None:  # in a job, only rank 0 has the result
        return 0
    if not arguments.json:
        print(f"samples: {path} ({len(calibration.result.samples)})\n")
    write_calibration(calibration, arguments)
    return 0


def _default_samples(output: str | None) -> str:
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
