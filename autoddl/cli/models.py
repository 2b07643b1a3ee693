"""``autoddl models``: list the built-in models."""

from __future__ import annotations

import argparse

from ._options import add_json, add_wide, print_document, show

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "models",
        help="list the built-in models",
        description="List the built-in models with their parameters and layers, and how to write models of other sizes.",
    )
    add_wide(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the models."""
    from ..api.catalogue import models_document
    from ..text.catalogue import models_text

    document = models_document()
    if arguments.json:
        print_document(document)
    else:
        show(models_text(document["models"], document["forms"]), arguments)
    return 0
