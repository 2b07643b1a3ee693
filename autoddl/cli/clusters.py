"""``autoddl clusters``: the clusters that are built in."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autoddl.costmodel.units import format_bytes, format_seconds

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
    from ..text.tables import Column, Table, Text

    records = [cluster_record(name) for name in preset_names()]
    if arguments.json:
        print(json.dumps({"format": "autoddl-clusters", "version": 1, "clusters": records}, indent=1, allow_nan=False))
        return 0
    columns: tuple[Column[dict[str, Any]], ...] = (
        Column("cluster", lambda record: str(record["name"])),
        Column("nodes", lambda record: f"{record['num_nodes']} x {record['devices_per_node']}"),
        Column("device", lambda record: str(record["device"]), rank=1),
        Column("memory", lambda record: format_bytes(record["memory_bytes"]), right=True, rank=2),
        Column("between nodes", lambda record: _link(record["inter_node"])),
        Column("inside a node", lambda record: _link(record["intra_node"])),
    )
    others = "Other numbers of nodes and devices: --nodes, --devices-per-node. Your own cluster: autoddl calibrate, autoddl fit."
    show(Text(([Table.of(columns, records, indent="")], [others])), arguments)
    return 0


def _link(link: dict[str, Any]) -> str:
    return f"{link['bandwidth'] / 1e9:.3g} GB/s, {format_seconds(link['latency_s'])}"
