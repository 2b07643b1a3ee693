"""``autoddl verify``: run a plan on local ranks; loss, gradients and bytes against one device and the price."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

from autoddl.costmodel.errors import UserError

from ._options import add_edited, add_wide, show

if TYPE_CHECKING:
    from ..verification.run import Progress

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "verify",
        help="run a plan on local ranks: loss, gradients and bytes against one device (needs OneFlow)",
        description="Run a plan's model on local CPU ranks, scaled down where it is too large for the machine, and compare it "
        "with one device and with the plan's price. The exit code is 1 when anything is off or a rank fails.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="what `autoddl plan -o` wrote")
    parser.add_argument(
        "--ranks",
        type=int,
        required=True,
        metavar="N",
        help="as many as the plan has devices; of a plan with a pipeline fewer will do, without some of its inner stages",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="MODEL",
        help="the model, as for `autoddl plan`; FILE.py:FUNCTION where it is none that is built in",
    )
    add_edited(parser)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        metavar="T",
        help="relative, of loss, gradients, parameters (%(default)g)",
    )
    parser.add_argument(
        "--full-size", action="store_true", help="do not scale the model down, whatever memory and time it takes"
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for everything (%(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and data (%(default)s)")
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Verify, print."""
    from autoddl.pipelines.runtime.failures import RankError

    from ..api.planning import load
    from ..api.plans import check_verification
    from ..verification.documents import failed_document

    check_verification(arguments.tolerance, arguments.timeout, arguments.seed)
    plan = load(arguments.plan, edited=arguments.edited)
    try:
        with _progress(arguments.quiet) as say:
            found = plan.verify(
                arguments.ranks,
                model=arguments.model,
                tolerance=arguments.tolerance,
                full_size=arguments.full_size,
                timeout_s=arguments.timeout,
                seed=arguments.seed,
                progress=say,
            )
    except RankError as error:
        if arguments.json and not isinstance(error, UserError):
            print(json.dumps(failed_document(plan.model, error.rank, str(error)), indent=1))
        raise
    if arguments.json:
        print(json.dumps(found.document, indent=1, allow_nan=False))
    else:
        show(found.text, arguments)
    return 0 if found.is_right else 1


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """A line on stderr that says what is going on; quiet where that is no terminal."""
    with tqdm(bar_format="{desc} ({elapsed})", disable=True if quiet else None, leave=False) as bar:
        yield bar.set_description_str
