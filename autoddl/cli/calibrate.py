"""``autoddl calibrate``: measure collectives, transfers and matrix products on ranks, and fit a cluster to them.

Every sample is saved as soon as it is measured, so that an interrupted run resumes if it is started again with the same
``--samples``.  The ranks run on this machine, on the given hosts, or, if ``srun``, ``mpirun`` or another launcher runs the command
on every rank of a job, in this job.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import MAX_BYTES, MAX_DEVICES
from autoddl.costmodel.reading import parse_figure, whole_number
from autoddl.costmodel.units import format_bytes, to_si

from ._options import add_connection, add_device, add_log_dir, variables_option
from .fit import add_fit_arguments, name_of, write_calibration

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure collectives on this system and fit a cluster file (requires OneFlow)",
        description="Measure collectives, transfers and matrix products, and fit a cluster file to them. The ranks run on this "
        "machine; or on several hosts, with --hosts; or they are the N ranks of a job on M hosts, if the command itself runs on "
        "each of them: srun -N M -n N autoddl calibrate ..., mpirun -np N autoddl calibrate ..., or anything that sets RANK, "
        "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. A job on several hosts measures both network levels. Requires "
        "OneFlow.",
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
    add_device(parser, default="cuda, if the base cluster has GPUs and OneFlow sees one")
    parser.add_argument(
        "--precision",
        metavar="NAME,...",
        help="precisions in which products are measured (default: all that the device of the base cluster has a speed for)",
    )
    parser.add_argument(
        "--sizes",
        metavar="B,... or A:B",
        help="message sizes, or a range from A to B in steps of a factor of 4 (default: 4KiB:16MiB, on GPUs 4KiB:256MiB)",
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
    _add_host_options(parser)
    add_fit_arguments(parser)


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several hosts, as one job")
    group.add_argument(
        "--hosts",
        metavar="H1:N,H2:N,...",
        help="start N ranks over ssh on each of these hosts, which need the same Python, AutoDDL and working directory",
    )
    add_connection(group)
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable of the ranks, such as NCCL_SOCKET_IFNAME=eth0; repeatable",
    )
    add_log_dir(group)


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit a cluster, write it and print it."""
    from autoddl.calib.measurements import COLLECTIVES

    from ..api.measuring import calibrate
    from ..launching.interrupts import Interrupted
    from ..launching.output import write_message

    path = arguments.samples or _default_samples(arguments.output)
    options: dict[str, Any] = {
        "ranks": [_whole("--ranks", part) for part in arguments.ranks.split(",")],
        "hosts": arguments.hosts.split(",") if arguments.hosts else None,
        "device": arguments.device,
        "precisions": arguments.precision.split(",") if arguments.precision else None,
        "sizes": _sizes(arguments.sizes) if arguments.sizes else None,
        "collectives": arguments.collectives.split(",") if arguments.collectives else COLLECTIVES,
        "repetitions": arguments.repetitions,
        "budget_s": arguments.budget,
        "communication_only": arguments.communication_only,
        "base": arguments.base,
        "name": name_of(arguments),
        "seed": arguments.seed,
        "quiet": arguments.quiet,
        "ssh": arguments.ssh,
        "python": arguments.python,
        "master_address": arguments.master_address,
        "environment": variables_option(arguments.env),
        "log_dir": arguments.log_dir,
    }
    try:
        calibration = calibrate(path, **options)
    except Interrupted as interrupted:
        if not interrupted.is_reported:
            write_message(
                f"interrupted by {interrupted}; all ranks have been ended, and the samples in {path} are kept"
            )
        return 128 + interrupted.number
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
