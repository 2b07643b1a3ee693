"""``autoddl rank``: run strategies of a model on ranks of this machine, and compare measured with predicted times."""

from __future__ import annotations

import argparse

from ._options import add_device, add_json, add_quiet, add_wide, print_document, show
from ._planning import add_model_arguments, model_of

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "rank",
        help="compare measured and predicted times of strategies (requires OneFlow)",
        description="Run strategies of a model on ranks of this machine, and compare measured with predicted times. Requires "
        "OneFlow.",
    )
    add_model_arguments(parser)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--cluster",
        default="local-cpu",
        metavar="CLUSTER",
        help="cluster that predicts the times, usually a calibrated cluster file (default: %(default)s)",
    )
    add_device(parser, default="cuda, if the cluster has GPUs and OneFlow sees one")
    parser.add_argument(
        "--precision",
        metavar="NAME",
        help="precision of the training step (default: float32, on GPUs that of the cluster's device)",
    )
    parser.add_argument(
        "--batch", type=int, metavar="B", help="samples per training step over all ranks (default: 8 per rank)"
    )
    parser.add_argument(
        "--strategies", type=int, default=40, metavar="K", help="number of strategies to run (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        metavar="R",
        help="number of rounds; every round measures each strategy once (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=3,
        metavar="K",
        help="number of repetitions of each strategy in a round (default: %(default)s)",
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no further round after this time")
    parser.add_argument(
        "--communication-only", action="store_true", help="measure the communication only, not whole training steps"
    )
    parser.add_argument(
        "--picture", metavar="FILE.svg", help="draw predicted against measured times to this file (requires matplotlib)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of strategies and of their order (default: %(default)s)"
    )
    parser.add_argument("-o", "--output", metavar="RANKING.json", help="write all measurements to this file")
    add_wide(parser)
    add_json(parser)
    add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the strategies, write the ranking and print it."""
    from autoddl.costmodel.writing import write_document

    from ..api.measuring import rank

    ranking = rank(
        model_of(arguments),
        ranks=arguments.ranks,
        cluster=arguments.cluster,
        device=arguments.device,
        precision=arguments.precision,
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
        write_document(arguments.output, ranking.document)
    if arguments.picture:
        ranking.draw(arguments.picture)
    if arguments.json:
        print_document(ranking.document)
    else:
        show(ranking.text, arguments, "")
    return 0
