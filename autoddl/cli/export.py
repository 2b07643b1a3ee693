"""``autoddl export``: a plan as an annotated OneFlow model, a document, a graph or a trace."""

from __future__ import annotations

import argparse
import sys

from ..export import FORMS
from ._options import add_edited

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "export",
        help="write a plan as an annotated OneFlow model, a graph or a trace",
        description="Write a plan as a readable OneFlow file that trains the model at the plan's layouts and needs nothing of "
        "AutoDDL (oneflow), as its pretty document (json), as the annotated layer graph (graphml, dot), or as the predicted step "
        "for chrome://tracing and Perfetto (chrome-trace).",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="what `autoddl plan -o` wrote")
    parser.add_argument("--to", dest="form", choices=FORMS, required=True, help="the form")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to (standard output)")
    add_edited(parser)
    parser.add_argument(
        "--model",
        default="",
        metavar="FILE.py:FUNCTION",
        help="what makes the plain model, for --to oneflow where it is none that is built in (compared with the plan's, where "
        "OneFlow is installed)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Load, write."""
    from ..api.planning import load

    plan = load(arguments.plan, edited=arguments.edited)
    text = plan.export(arguments.output or None, form=arguments.form, model=arguments.model)
    if arguments.output:
        print(f"Written to {arguments.output}")
    else:
        sys.stdout.write(text)
    return 0
