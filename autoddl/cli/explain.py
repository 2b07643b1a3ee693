"""``autoddl explain``: why a plan is as it is: what limits it, and what every other choice would cost."""

from __future__ import annotations

import argparse
import json

from ._options import add_edited, add_wide, show

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "explain",
        help="what limits a plan, and what every other choice would cost",
        description="What limits a plan, and for each layer the nearest alternatives with their regret: how much longer the best "
        "plan with that choice takes.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="what `autoddl plan -o` wrote")
    parser.add_argument("--layer", metavar="NAME", help="of this layer or group of layers alone")
    parser.add_argument("--alternatives", type=int, default=3, metavar="K", help="per choice (%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=30.0, metavar="SECONDS", help="after it regrets are bounds (%(default)g)"
    )
    add_edited(parser)
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Explain, print."""
    from ..api.planning import load

    found = load(arguments.plan, edited=arguments.edited).explain(
        count=arguments.alternatives, layer=arguments.layer, time_limit_s=arguments.time_limit
    )
    if arguments.json:
        print(json.dumps(found.document, indent=1, allow_nan=False))
    else:
        show(found.text, arguments)
    return 0
