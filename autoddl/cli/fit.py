"""``autoddl fit``: from measurements to a cluster file."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.writing import write_document

from ._options import add_wide, show

if TYPE_CHECKING:
    from autoddl.calib.clusterfile import Fit

__all__ = ["add_fit_arguments", "add_parser", "finish", "run"]


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
    """What every fit can be told."""
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
    from autoddl.calib.clusterfile import fit_samples
    from autoddl.calib.measurements import numbered, read_samples

    from ..text.fits import errors_text

    samples = numbered([sample for path in arguments.measurements for sample in read_samples(path)])
    if arguments.against:
        show(errors_text(load_cluster(arguments.against), samples), arguments, "")
        return 0
    base = load_cluster(arguments.base)
    return finish(fit_samples(samples, arguments.seed), base, arguments)


def finish(fit: Fit, base: Cluster, arguments: argparse.Namespace) -> int:
    """Write the cluster file and the picture, and print what was found."""
    from autoddl.calib.clusterfile import calibrated_document
    from autoddl.calib.pictures import draw

    from ..text.fits import fit_text

    stem = os.path.basename(arguments.output).rpartition(".")[0] if arguments.output else ""
    document = calibrated_document(fit, base, arguments.cluster_name or stem or f"{base.name} calibrated")
    if arguments.output:
        write_document(arguments.output, document)
    if arguments.picture:
        draw(fit, arguments.picture)
    if arguments.json:
        print(json.dumps(document, indent=1, allow_nan=False))
        return 0
    show(fit_text(fit), arguments, "")
    for what, path in (("cluster", arguments.output), ("picture", arguments.picture)):
        if path:
            print(f"{what}: {path}")
    return 0
