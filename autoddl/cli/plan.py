"""``autoddl plan``: the best SBP strategy for every layer, proven; with ``--pipeline`` the stages and their schedule too."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from autoddl.costmodel.errors import UserError

from ._planning import add_method, add_planning_arguments, cluster_of, model_of, options_of
from ._stopping import Interruptible, interruptible

if TYPE_CHECKING:
    from ..joint.result import JointPlan
    from ..planner import Planned

__all__ = ["add_parser", "run"]

_PIPELINES = ("auto", "dapple", "chimera", "wpipe")


class _Answer(NamedTuple):
    """A plan's document for programs and its text for people, each made only where somebody asks for it; the plan; its search."""

    document: Callable[[], dict[str, Any]]
    text: Callable[[], str]
    planned: Planned | JointPlan
    asked: Interruptible


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
        "paper's planner; both are compared with the best plan found of every family (without: no pipeline)",
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
    if arguments.temperature is not None and arguments.method != "metropolis-hastings":
        raise UserError(f"--temperature is for --method metropolis-hastings; {arguments.method} has none")
    answer = _without_pipeline(arguments) if arguments.pipeline is None else _with_pipeline(arguments)
    document = answer.document() if arguments.output or arguments.json else {}
    if arguments.output:
        from ..planfile import save_plan

        save_plan(arguments.output, document)
    if arguments.json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        print(answer.text())
        if arguments.output:
            print(f"\nWritten to {arguments.output}")
    planned = answer.planned
    verdict = "it is proven optimal" if planned.optimal else f"the best one may be up to {planned.gap:.2%} better"
    return answer.asked.exit_code(f"this is the best plan until then, {verdict}")


def _without_pipeline(arguments: argparse.Namespace) -> _Answer:
    from ..joint.glance import plan_alone
    from ..tables import plan_text
    from ..trusting import trust_of

    graph, cluster, options = model_of(arguments), cluster_of(arguments), options_of(arguments, arguments.method)
    with interruptible() as asked:
        planned = plan_alone(graph, cluster, options, asked.stop)
        trusted = trust_of(planned, asked.stop)

    def document() -> dict[str, Any]:
        from ..planfile import plan_document

        return plan_document(planned, trusted)

    return _Answer(document, lambda: plan_text(planned, trusted), planned, asked)


def _with_pipeline(arguments: argparse.Namespace) -> _Answer:
    from autoddl.search import progress_bar

    from ..joint.planner import plan_jointly
    from ..joint.result import JointOptions
    from ..joint.table import joint_text
    from ..planfile import joint_document

    options = JointOptions(options_of(arguments, arguments.method), arguments.pipeline, arguments.allow_stale)
    graph, cluster = model_of(arguments), cluster_of(arguments)
    bar = progress_bar("pipelines", disable=True if arguments.quiet else None)
    with interruptible() as asked, bar as progress:
        planned = plan_jointly(graph, cluster, options, progress, asked.stop)
    return _Answer(lambda: joint_document(planned), lambda: joint_text(planned), planned, asked)
