"""``autoddl verify``: run a plan on ranks of this machine, and compare it with one device and with the predicted traffic."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

from autoddl.costmodel.errors import UserError

from ..executors import EXECUTORS
from ._options import add_edited, add_json, add_plan, add_quiet, add_wide, print_result

if TYPE_CHECKING:
    from ..verification.run import Progress

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="run a plan on ranks of this machine and check loss, gradients and bytes (requires OneFlow)",
        description="Run a plan on CPU ranks of this machine, with its model scaled down if it is too large, and compare losses, "
        "gradients and parameters with one device, and the bytes sent with the prediction. The exit code is 1 if anything differs "
        "or a rank fails. Requires OneFlow.",
    )
    add_plan(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        required=True,
        metavar="N",
        help="number of ranks: the number of devices of the plan; a pipeline can run on fewer, without some of its inner stages",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="MODEL",
        help="the model, as for `autoddl plan`; required as FILE.py:FUNCTION if it is not built in",
    )
    add_edited(parser)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        metavar="T",
        help="relative tolerance of losses, gradients and parameters (default: %(default)g)",
    )
    parser.add_argument(
        "--full-size", action="store_true", help="do not scale the model down, whatever memory and time it takes"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit of the whole verification (default: %(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of initial values and data (default: %(default)s)")
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        default=EXECUTORS[0],
        help="what executes the plan: AutoDDL's collectives in eager mode, or OneFlow's nn.Graph (default: %(default)s)",
    )
    add_wide(parser)
    add_json(parser)
    add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Verify the plan and print the result."""
    from autoddl.pipelines.runtime.ranks.failures import RankError

    from ..api.planning import load
    from ..api.plans import check_verification
    from ..verification.documents import failed_document

    check_verification(arguments.tolerance, arguments.timeout, arguments.seed)
    plan = load(arguments.plan, edited=arguments.edited)
    try:
        with _progress(arguments.quiet) as show_progress:
            verification = plan.verify(
                arguments.ranks,
                model=arguments.model,
                tolerance=arguments.tolerance,
                full_size=arguments.full_size,
                timeout_s=arguments.timeout,
                seed=arguments.seed,
                executor=arguments.executor,
                progress=show_progress,
            )
    except RankError as error:
        if arguments.json and not isinstance(error, UserError):
            print(json.dumps(failed_document(plan.model, error.rank, str(error)), indent=1))
        raise
    print_result(verification, arguments)
    return 0 if verification.is_right else 1


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """Show the current phase in a line on stderr, if stderr is a terminal."""
    with tqdm(bar_format="{desc} ({elapsed})", disable=True if quiet else None, leave=False) as bar:
        yield bar.set_description_str
