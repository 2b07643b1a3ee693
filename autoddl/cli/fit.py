"""``autoddl fit``: fit a cluster to measurements."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ._options import add_json, add_quiet, add_wide, print_document, show

if TYPE_CHECKING:
    from ..api.measuring import Calibration

__all__ = ["add_fit_arguments", "add_parser", "name_of", "run", "write_calibration"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "fit",
        help="fit a cluster file to measurements",
        description="Fit latencies, bandwidths and device rates to measurements, and write them as a cluster file.",
    )
    parser.add_argument(
        "measurements",
        nargs="*",
        metavar="MEASUREMENTS",
        help="CSV files of `autoddl calibrate`, any CSV files with the columns collective, ranks, bytes and seconds, or outputs of "
        "nccl-tests",
    )
    parser.add_argument(
        "--runs",
        metavar="RUNS.csv",
        help="fit the efficiency of the runs' cluster to measured training steps, one row each (columns: docs/published.md)",
    )
    parser.add_argument("-o", "--output", metavar="CLUSTER.json", help="write the cluster to this file")
    parser.add_argument(
        "--against",
        metavar="CLUSTER.json",
        help="do not fit; print how well this cluster file predicts the measurements",
    )
    add_fit_arguments(parser)


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands that fit a cluster."""
    parser.add_argument(
        "--base",
        default="local-cpu",
        metavar="CLUSTER",
        help="cluster that supplies every parameter that was not measured: a file or the name of a built-in cluster (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--name", dest="cluster_name", metavar="NAME", help="name of the cluster (default: that of the output file)"
    )
    parser.add_argument(
        "--picture",
        metavar="FILE.svg",
        help="draw measured points and fitted lines to this file (requires matplotlib)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the bootstrap, which estimates confidence intervals (default: %(default)s)",
    )
    add_wide(parser)
    add_json(parser, "print the cluster file instead of text")
    add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the measurements, fit a cluster, write it and print it."""
    from autoddl.costmodel.errors import UserError

    from ..api.measuring import fit, predict

    if bool(arguments.runs) == bool(arguments.measurements):
        raise UserError("give either measurements of collectives and products, or --runs RUNS.csv")
    if arguments.runs:
        _fit_runs(arguments)
        return 0
    if arguments.against:
        show(predict(arguments.measurements, cluster=arguments.against), arguments, "")
        return 0
    name = name_of(arguments)
    write_calibration(fit(arguments.measurements, base=arguments.base, name=name, seed=arguments.seed), arguments)
    return 0


def _fit_runs(arguments: argparse.Namespace) -> None:
    """Fit a cluster to measured training steps, write it and print how well it predicts them."""
    from autoddl.costmodel.writing import write_document

    from ..api.pricing import fit_runs, price_runs

    cluster = fit_runs(arguments.runs, name=name_of(arguments))
    if arguments.output:
        write_document(arguments.output, cluster.document)
    if arguments.json:
        print_document(cluster.document)
        return
    show(price_runs(arguments.runs, fit=True).text, arguments, "", f"efficiency {cluster.device.efficiency:.3f}")
    if arguments.output:
        print(f"cluster: {arguments.output}")


def name_of(arguments: argparse.Namespace) -> str:
    """Return the name of the fitted cluster; empty for the default name."""
    stem = os.path.basename(arguments.output).rpartition(".")[0] if arguments.output else ""
    return str(arguments.cluster_name or stem)


def write_calibration(calibration: Calibration, arguments: argparse.Namespace) -> None:
    """Write the cluster file and the picture, and print the calibration."""
    if arguments.output:
        calibration.save(arguments.output)
    if arguments.picture:
        calibration.draw(arguments.picture)
    if arguments.json:
        print_document(calibration.document)
        return
    show(calibration.text, arguments, "")
    for content, path in (("cluster", arguments.output), ("picture", arguments.picture)):
        if path:
            print(f"{content}: {path}")
