"""``autoddl plan``: the best SBP strategy for every layer, proven."""

from __future__ import annotations

import argparse
import json

from ._planning import add_method, add_planning_arguments, cluster_of, model_of, options_of

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "plan", help="find the best SBP strategy for every layer, with a proof", description=__doc__
    )
    add_planning_arguments(parser)
    add_method(parser)
    parser.add_argument("-o", "--output", metavar="PLAN.json", help="write the plan")


def run(arguments: argparse.Namespace) -> int:
    """Plan, write, print."""
    from ..plan import plan_document, save_plan
    from ..planner import make_plan
    from ..tables import plan_text
    from ..trusting import trust_of

    planned = make_plan(model_of(arguments), cluster_of(arguments), options_of(arguments, arguments.method))
    trusted = trust_of(planned)
    if arguments.output or arguments.json:
        document = plan_document(planned, trusted)
    if arguments.output:
        save_plan(arguments.output, document)
    if arguments.json:
        print(json.dumps(document, indent=1, allow_nan=False))
        return 0
    print(plan_text(planned, trusted))
    if arguments.output:
        print(f"\nWritten to {arguments.output}")
    return 0
