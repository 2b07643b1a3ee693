"""``autoddl compare``: baselines and search methods side by side."""

from __future__ import annotations

import argparse
import json

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.suggestions import did_you_mean
from autoddl.search import METHODS

from ._options import show
from ._planning import add_planning_arguments, cluster_of, model_of, wishes_of
from ._stopping import interruptible

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("compare", help="baselines and search methods side by side", description=__doc__)
    add_planning_arguments(parser)
    parser.add_argument(
        "--methods",
        default=None,
        metavar="M,...",
        help=f"of {', '.join(METHODS)} (all; exhaustive only where the space is small enough)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan with every method, print one table."""
    from ..api.planning import compare

    methods = arguments.methods.split(",") if arguments.methods else None
    for method in methods or ():
        if method not in METHODS:
            hint = did_you_mean(method, METHODS)
            raise UserError(
                f"--methods names {method!r}, should name some of {', '.join(METHODS)}{hint and '; ' + hint}"
            )
    if arguments.temperature is not None and methods is not None and "metropolis-hastings" not in methods:
        raise UserError("--temperature is for metropolis-hastings, which --methods does not name")
    graph, cluster = model_of(arguments), cluster_of(arguments)
    wishes = wishes_of(arguments, "metropolis-hastings")
    with interruptible("a plan") as asked:
        found = compare(graph, cluster=cluster, methods=methods, stop=asked.stop, **wishes)
    if arguments.json:
        print(json.dumps(found.document, indent=1, allow_nan=False))
    else:
        show(found.text, arguments)
    return asked.exit_code("these are the best plans until then")
