"""``autoddl export``: write a plan as a OneFlow model, a document, a graph or a trace."""

from __future__ import annotations

import argparse
import sys

from ..export import FORMS
from ._options import add_edited, add_plan

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "export",
        help="write a plan as a OneFlow model, a graph or a trace",
        description="Write a plan in another form. oneflow: a readable Python file that trains the model with the layouts of the "
        "plan and does not need AutoDDL. oneflow-graph: the same for OneFlow's nn.Graph, "
        "with global tensors. json: the document of the plan, indented. graphml, dot: the layer graph with the "
        "strategies. chrome-trace: the predicted step, for chrome://tracing and Perfetto.",
    )
    add_plan(parser)
    parser.add_argument("--to", dest="form", choices=FORMS, required=True, help="form of the file")
    parser.add_argument("-o", "--output", metavar="FILE", help="write to this file (default: standard output)")
    add_edited(parser)
    parser.add_argument(
        "--model",
        default="",
        metavar="FILE.py:FUNCTION",
        help="function that returns the model and its example inputs, for --to oneflow with a model that is not built in; if "
        "OneFlow is installed, the model is compared with that of the plan",
    )


def run(arguments: argparse.Namespace) -> int:
    """Load the plan and write it in the form."""
    from ..api.planning import load

    plan = load(arguments.plan, edited=arguments.edited)
    text = plan.export(arguments.output or None, form=arguments.form, model=arguments.model)
    if arguments.output:
        print(f"Written to {arguments.output}")
    else:
        sys.stdout.write(text)
    return 0
