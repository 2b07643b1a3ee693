"""``autoddl models``: the models that are built in."""

from __future__ import annotations

import argparse
import json

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("models", help="the models that are built in", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    from ..api.catalogue import models
    from ..tables import aligned
    from ..zoo import FORMS

    records = [model.record() for model in models()]
    if arguments.json:
        document = {"format": "autoddl-models", "version": 1, "models": records, "forms": list(FORMS)}
        print(json.dumps(document, indent=1, allow_nan=False))
        return 0
    rows = [("model", "parameters", "layers", "sample", "GFLOPs forward")]
    rows += [
        (
            record["name"],
            f"{record['num_parameters']:,}",
            f"{record['num_layers']}",
            f"{record['sample']} of {' x '.join(map(str, record['sample_shape']))}",
            f"{record['flops'] / 1e9:,.0f}",
        )
        for record in records
    ]
    print("\n".join(aligned(rows, right=(1, 2, 4), indent="")))
    print(f"\nOthers: {', '.join(FORMS)}")
    return 0
