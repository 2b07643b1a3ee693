"""``autoddl models``: the models that are built in."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ._options import add_wide, show

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("models", help="the models that are built in", description=__doc__)
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    from ..api.catalogue import models
    from ..text.tables import Column, Table, Text
    from ..zoo import FORMS

    records = [model.record() for model in models()]
    if arguments.json:
        document = {"format": "autoddl-models", "version": 1, "models": records, "forms": list(FORMS)}
        print(json.dumps(document, indent=1, allow_nan=False))
        return 0
    columns: tuple[Column[dict[str, Any]], ...] = (
        Column("model", lambda record: str(record["name"])),
        Column("parameters", lambda record: f"{record['num_parameters']:,}", right=True),
        Column("layers", lambda record: f"{record['num_layers']}", right=True),
        Column("sample", lambda r: f"{r['sample']} of {' x '.join(map(str, r['sample_shape']))}", rank=1),
        Column("GFLOPs forward", lambda record: f"{record['flops'] / 1e9:,.0f}", right=True, rank=2),
    )
    show(Text(([Table.of(columns, records, indent="")], [f"Others: {', '.join(FORMS)}"])), arguments)
    return 0
