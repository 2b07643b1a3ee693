"""``autoddl extract``: the layer graph of an unmodified OneFlow model."""

from __future__ import annotations

import argparse
import json

from ._options import add_wide, show

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "extract", help="make a layer graph of a OneFlow model (needs OneFlow)", description=__doc__
    )
    parser.add_argument(
        "model",
        metavar="FILE.py:FUNCTION",
        help="FUNCTION, called without arguments, returns a oneflow.nn.Module and its example inputs, the batch in front",
    )
    parser.add_argument("-o", "--output", metavar="GRAPH.json", help="write the graph, for `autoddl plan GRAPH.json`")
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print the graph as one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Extract, write, print."""
    from ..api.inputs import extract
    from ..text.graphs import graph_text

    graph = extract(arguments.model)
    if arguments.output:
        graph.save(arguments.output)
    if arguments.json:
        print(json.dumps(graph.document(), indent=1, allow_nan=False))
        return 0
    show(graph_text(graph), arguments, *(["", f"Written to {arguments.output}"] if arguments.output else []))
    return 0
