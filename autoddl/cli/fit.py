"""``autoddl fit``: from measurements to a cluster file."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from ._options import add_wide, show

if TYPE_CHECKING:
    from ..api.measuring import Calibration

__all__ = ["add_fit_arguments", "add_parser", "finish", "name_of", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("fit", help="fit a cluster file to measurements", description=__doc__)
    parser.add_argument(
        "measurements",
        nargs="+",
        metavar="MEASUREMENTS",
        help="CSV of autoddl calibrate, any CSV with the columns collective, ranks, bytes and seconds, or output of nccl-tests",
    )
    parser.add_argument("-o", "--output", metavar="CLUSTER.json", help="write the cluster file")
    parser.add_argument(
        "--against", metavar="CLUSTER.json", help="do not fit: say how well this cluster file predicts the measurements"
    )
    add_fit_arguments(parser)


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Options shared by all fits."""
    parser.add_argument(
        "--base",
        default="local-cpu",
        metavar="C",
        help="the cluster that what was not measured is taken from: a file or a preset (%(default)s)",
    )
    parser.add_argument("--name", dest="cluster_name", metavar="NAME", help="of the cluster (that of the output file)")
    parser.add_argument(
        "--picture", metavar="FILE.svg", help="draw measured points and fitted lines (needs matplotlib)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (%(default)s)")
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print the cluster file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Read, fit, write, print."""
    from ..api.measuring import fit, predict

    if arguments.against:
        show(predict(arguments.measurements, cluster=arguments.against), arguments, "")
        return 0
    name = name_of(arguments)
    return finish(fit(arguments.measurements, base=arguments.base, name=name, seed=arguments.seed), arguments)


def name_of(arguments: argparse.Namespace) -> str:
    """What the cluster is to be called; empty for its usual name."""
    stem = os.path.basename(arguments.output).rpartition(".")[0] if arguments.output else ""
    return str(arguments.cluster_name or stem)


def finish(found: Calibration, arguments: argparse.Namespace) -> int:
    """Write the cluster file and the picture, and print what was found."""
    if arguments.output:
        found.save(arguments.output)
    if arguments.picture:
        found.draw(arguments.picture)
    if arguments.json:
        print(json.dumps(found.document, indent=1, allow_nan=False))
        return 0
    show(found.text, arguments, "")
    for what, path in (("cluster", arguments.output), ("picture", arguments.picture)):
        if path:
            print(f"{what}: {path}")
    return 0
