"""``autoddl clusters``: list the built-in clusters."""

from __future__ import annotations

import argparse

from ._options import add_json, add_wide, print_document, show

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "clusters",
        help="list the built-in clusters",
        description="List the built-in clusters with their nodes, devices and links.",
    )
    add_wide(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the clusters."""
    from ..api.catalogue import clusters_document
    from ..text.catalogue import clusters_text

    document = clusters_document()
    if arguments.json:
        print_document(document)
    else:
        show(clusters_text(document["clusters"]), arguments)
    return 0
