"""``autoddl compare``: compare search methods and baselines on a model and a cluster."""

from __future__ import annotations

import argparse

from autoddl.search import METHODS

from ._options import print_result
from ._planning import add_planning_arguments, cluster_of, model_of, planning_options
from ._stopping import interruptible

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "compare",
        help="compare search methods and baselines on a model and a cluster",
        description="Plan a model with several search methods, without a pipeline, and compare their plans with the baselines.",
    )
    search_group = add_planning_arguments(parser, has_pipeline=False)
    search_group.add_argument(
        "--methods",
        default=None,
        metavar="M,...",
        help=f"methods to compare, from {', '.join(METHODS)} (default: all; exhaustive only if the space is small enough)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan with every method and print one table."""
    from ..api.planning import compare

    methods = arguments.methods.split(",") if arguments.methods else None
    graph, cluster = model_of(arguments), cluster_of(arguments)
    options = planning_options(arguments)
    with interruptible() as interrupt:
        comparison = compare(graph, cluster=cluster, methods=methods, stop=interrupt.stop, **options)
    print_result(comparison, arguments)
    return interrupt.exit_code("these are the best plans found so far")
