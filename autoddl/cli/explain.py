"""``autoddl explain``: explain what limits a plan, and what other choices would cost."""

from __future__ import annotations

import argparse

from ._options import add_edited, add_json, add_plan, add_wide, print_result

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="explain what limits a plan, and what other choices would cost",
        description="Explain what limits the step time of a plan, and list the nearest alternatives of each layer's strategy with "
        "their regret: the additional time of a step with the alternative, if the other layers are chosen anew.",
    )
    add_plan(parser)
    parser.add_argument(
        "--layer", metavar="NAME", help="explain only this layer, or this group of layers, such as 'h.*.mlp.c_fc'"
    )
    parser.add_argument(
        "--alternatives",
        type=int,
        default=3,
        metavar="K",
        help="number of alternatives per choice (default: %(default)s)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time limit of the search for alternatives; if it is reached, regrets may be intervals (default: %(default)g)",
    )
    add_edited(parser)
    add_wide(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain the plan and print the explanation."""
    from ..api.planning import load

    explanation = load(arguments.plan, edited=arguments.edited).explain(
        count=arguments.alternatives, layer=arguments.layer, time_limit_s=arguments.time_limit
    )
    print_result(explanation, arguments)
    return 0
