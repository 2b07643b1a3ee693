"""``autoddl report``: write a report of a plan as one self-contained HTML page."""

from __future__ import annotations

import argparse

from ._options import add_edited, add_plan

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="write a report of a plan as one self-contained HTML page",
        description="Write a report of a plan as one HTML page that needs no network: baselines, time, layer graph, pipeline, "
        "memory, alternatives, certificate and trust.",
    )
    add_plan(parser)
    parser.add_argument("-o", "--output", required=True, metavar="REPORT.html", help="write the page to this file")
    add_edited(parser)
    parser.add_argument(
        "--alternatives",
        type=int,
        default=2,
        metavar="K",
        help="number of alternatives per choice; 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time limit of the search for alternatives; if it is reached, regrets may be intervals (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from ..api.planning import load

    plan = load(arguments.plan, edited=arguments.edited)
    page = plan.report(arguments.output, count=arguments.alternatives, time_limit_s=arguments.time_limit)
    print(f"Written to {arguments.output} ({len(page.encode()) / 1e3:,.0f} kB); open it in a browser")
    return 0
