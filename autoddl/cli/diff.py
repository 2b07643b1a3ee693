"""``autoddl diff``: show the differences between two plans."""

from __future__ import annotations

import argparse

from ._options import add_edited, add_json, add_plan, add_wide, print_result

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "diff",
        help="show the differences between two plans",
        description="Show the differences between two plans: model, cluster, options, strategies and predicted figures.",
    )
    add_plan(parser, "before", "BEFORE.json")
    add_plan(parser, "after", "AFTER.json")
    add_edited(parser)
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if the plans differ")
    add_wide(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare the plans and print the differences."""
    from ..api.planning import load

    before, after = (load(path, edited=arguments.edited) for path in (arguments.before, arguments.after))
    difference = before.diff(after)
    print_result(difference, arguments)
    return 1 if arguments.exit_code and not difference.is_empty else 0
