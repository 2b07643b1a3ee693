"""``autoddl diff``: what differs between two plans."""

from __future__ import annotations

import argparse
import json

from ._options import add_edited, add_wide, show

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "diff",
        help="what differs between two plans",
        description="What differs between two plans: model, cluster, options, strategies, and what comes of it.",
    )
    parser.add_argument("before", metavar="A.json", help="what `autoddl plan -o` wrote")
    parser.add_argument("after", metavar="B.json", help="the same, of another plan")
    add_edited(parser)
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 where they differ")
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print."""
    from ..api.planning import load

    before, after = (load(path, edited=arguments.edited) for path in (arguments.before, arguments.after))
    found = before.diff(after)
    if arguments.json:
        print(json.dumps(found.document, indent=1, allow_nan=False))
    else:
        show(found.text, arguments)
    return 1 if arguments.exit_code and not found.is_empty else 0
