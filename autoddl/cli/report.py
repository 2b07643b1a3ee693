"""``autoddl report``: a plan as one self-contained HTML page."""

from __future__ import annotations

import argparse

from ._options import add_edited

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "report",
        help="a plan as one self-contained HTML page",
        description="Write a plan as one HTML page that needs no network: baselines, time, layer graph, pipeline, memory, "
        "alternatives, certificate, trust.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="what `autoddl plan -o` wrote")
    parser.add_argument("-o", "--output", required=True, metavar="REPORT.html", help="write the page")
    add_edited(parser)
    parser.add_argument("--alternatives", type=int, default=2, metavar="K", help="per choice, 0 for none (%(default)s)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="of the search for alternatives; after it regrets are bounds (%(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Explain, write."""
    from ..api.planning import load

    plan = load(arguments.plan, edited=arguments.edited)
    page = plan.report(arguments.output, count=arguments.alternatives, time_limit_s=arguments.time_limit)
    print(f"Written to {arguments.output} ({len(page.encode()) / 1e3:,.0f} kB); open it in a browser")
    return 0
