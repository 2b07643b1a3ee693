"""``autoddl clusters``: the clusters that are built in."""

from __future__ import annotations

import argparse
import json

from ._options import add_wide, show

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("clusters", help="the clusters that are built in", description=__doc__)
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    from autoddl.costmodel.cluster import preset_names

    from ..api.catalogue import cluster_record
    from ..text.catalogue import clusters_text

    records = [cluster_record(name) for name in preset_names()]
    if arguments.json:
        print(json.dumps({"format": "autoddl-clusters", "version": 1, "clusters": records}, indent=1, allow_nan=False))
        return 0
    show(clusters_text(records), arguments)
    return 0
