"""``autoddl rank``: run strategies of a model on real ranks, and compare their times with what was predicted."""

from __future__ import annotations

import argparse
import json

from ._options import add_wide, show
from ._planning import add_model_arguments, model_of

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "rank", help="run strategies on local ranks: predicted against measured times", description=__doc__
    )
    add_model_arguments(parser)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="local ranks")
    parser.add_argument(
        "--cluster", default="local-cpu", metavar="C", help="what to predict with: a calibrated file (%(default)s)"
    )
    parser.add_argument("--batch", type=int, metavar="B", help="samples per step over all ranks (8 per rank)")
    parser.add_argument("--strategies", type=int, default=40, metavar="K", help="how many to run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="interleaved visits of each strategy (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="in each visit (%(default)s)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no more rounds after this time")
    parser.add_argument("--communication-only", action="store_true", help="no whole training steps")
    parser.add_argument(
        "--picture", metavar="FILE.svg", help="draw predicted against measured times (needs matplotlib)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of strategies and their order (%(default)s)")
    parser.add_argument("-o", "--output", metavar="RANKING.json", help="write everything that was measured")
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print it")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Choose, run, score, print."""
    from autoddl.costmodel.writing import write_document

    from ..api.measuring import rank

    found = rank(
        model_of(arguments),
        ranks=arguments.ranks,
        cluster=arguments.cluster,
        batch=arguments.batch,
        strategies=arguments.strategies,
        rounds=arguments.rounds,
        repetitions=arguments.repetitions,
        budget_s=arguments.budget,
        communication_only=arguments.communication_only,
        seed=arguments.seed,
        quiet=arguments.quiet,
    )
    if arguments.output:
        write_document(arguments.output, found.document)
    if arguments.picture:
        found.draw(arguments.picture)
    if arguments.json:
        print(json.dumps(found.document, indent=1, allow_nan=False))
    else:
        show(found.text, arguments, "")
    return 0
