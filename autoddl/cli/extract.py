"""``autoddl extract``: extract the layer graph of an unmodified OneFlow model."""

from __future__ import annotations

import argparse

from ._options import add_json, add_wide, print_document, show

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "extract",
        help="extract the layer graph of a OneFlow model (requires OneFlow)",
        description="Extract the layer graph of an unmodified OneFlow model. Requires OneFlow.",
    )
    parser.add_argument(
        "model",
        metavar="FILE.py:FUNCTION",
        help="function without arguments that returns a oneflow.nn.Module and its example inputs, with the batch as their first "
        "dimension",
    )
    parser.add_argument(
        "-o", "--output", metavar="GRAPH.json", help="write the graph to this file, for `autoddl plan GRAPH.json`"
    )
    add_wide(parser)
    add_json(parser, "print the graph as one JSON document instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Extract the graph, write it and print it."""
    from ..api.inputs import extract
    from ..text.graphs import graph_text

    graph = extract(arguments.model)
    if arguments.output:
        graph.save(arguments.output)
    if arguments.json:
        print_document(graph.document())
        return 0
    show(graph_text(graph), arguments, *(["", f"Written to {arguments.output}"] if arguments.output else []))
    return 0
