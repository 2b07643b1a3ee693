"""``autoddl price``: the price of a configuration, or of training runs that were measured."""

from __future__ import annotations

import argparse

from ._options import add_json, add_wide, print_result

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "price",
        help="predict measured training runs",
        description="Predict the step and the memory of training runs that were measured, and fit the efficiency of each group.",
    )
    parser.add_argument(
        "--runs", metavar="RUNS.csv", required=True, help="CSV file with a row per measured run, or 'published'"
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="predict each run with the efficiency that fits its group, in place of that of its cluster",
    )
    add_wide(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Price the runs and print the predictions."""
    from ..api.pricing import price_runs

    print_result(price_runs(arguments.runs, fit=arguments.fit), arguments)
    return 0
