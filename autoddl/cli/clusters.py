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
    from autoddl.costmodel.cluster import preset_names

    from ..api.catalogue import cluster_record
    from ..text.catalogue import clusters_text

    records = [cluster_record(name) for name in preset_names()]
    if arguments.json:
        print_document({"format": "autoddl-clusters", "version": 1, "clusters": records})
        return 0
    show(clusters_text(records), arguments)
    return 0
