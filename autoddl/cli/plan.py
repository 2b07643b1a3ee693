"""``autoddl plan``: the best SBP strategy for every layer, proven; with ``--pipeline`` the stages and their schedule too."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from autoddl.costmodel.errors import UserError

from ._planning import add_method, add_planning_arguments, cluster_of, model_of, options_of

__all__ = ["add_parser", "run"]

_PIPELINES = ("auto", "dapple", "chimera", "wpipe")


class _Answer(NamedTuple):
    """A plan's document for programs and its text for people, each made only where somebody asks for it."""

    document: Callable[[], dict[str, Any]]
    text: Callable[[], str]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "plan", help="find the best SBP strategy for every layer, with a proof", description=__doc__
    )
    add_planning_arguments(parser)
    add_method(parser)
    group = parser.add_argument_group("pipeline")
    group.add_argument(
        "--pipeline",
        choices=_PIPELINES,
        help="auto: search stages, cut, schedule, micro-batch, recomputation and strategies together; or take the plan of a "
        "paper's planner; both are compared with the best plan of every family (without: no pipeline)",
    )
    group.add_argument(
        "--allow-stale",
        action="store_true",
        help="offer asynchronous schedules (pipedream, pipedream-2bw, wpipe), which compute with weights of earlier updates",
    )
    parser.add_argument("-o", "--output", metavar="PLAN.json", help="write the plan")


def run(arguments: argparse.Namespace) -> int:
    """Plan, write, print."""
    if arguments.pipeline is None and arguments.allow_stale:
        raise UserError("--allow-stale is for pipelines; add --pipeline auto, or leave it out")
    answer = _without_pipeline(arguments) if arguments.pipeline is None else _with_pipeline(arguments)
    document = answer.document() if arguments.output or arguments.json else {}
    if arguments.output:
        from ..plan import save_plan

        save_plan(arguments.output, document)
    if arguments.json:
        print(json.dumps(document, indent=1, allow_nan=False))
        return 0
    print(answer.text())
    if arguments.output:
        print(f"\nWritten to {arguments.output}")
    return 0


def _without_pipeline(arguments: argparse.Namespace) -> _Answer:
    from ..planner import make_plan
    from ..tables import plan_text
    from ..trusting import trust_of

    planned = make_plan(model_of(arguments), cluster_of(arguments), options_of(arguments, arguments.method))
    trusted = trust_of(planned)

    def document() -> dict[str, Any]:
        # Documents can hold pipelines, whose modules a plan without one does not need.
        from ..plan import plan_document

        return plan_document(planned, trusted)

    return _Answer(document, lambda: plan_text(planned, trusted))


def _with_pipeline(arguments: argparse.Namespace) -> _Answer:
    from autoddl.search import progress_bar

    from ..joint.planner import plan_jointly
    from ..joint.result import JointOptions
    from ..joint.table import joint_text
    from ..plan import joint_document

    options = JointOptions(options_of(arguments, arguments.method), arguments.pipeline, arguments.allow_stale)
    with progress_bar("pipelines", disable=True if arguments.quiet else None) as progress:
        planned = plan_jointly(model_of(arguments), cluster_of(arguments), options, progress)
    return _Answer(lambda: joint_document(planned), lambda: joint_text(planned))
