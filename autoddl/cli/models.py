"""``autoddl models``: the models that are built in."""

from __future__ import annotations

import argparse
import json

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
    from ..text.catalogue import models_text
    from ..zoo import FORMS

    records = [model.record() for model in models()]
    if arguments.json:
        document = {"format": "autoddl-models", "version": 1, "models": records, "forms": list(FORMS)}
        print(json.dumps(document, indent=1, allow_nan=False))
        return 0
    show(models_text(records, FORMS), arguments)
    return 0
