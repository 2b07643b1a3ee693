"""``autoddl plan``: the best SBP strategy for every layer, proven; with ``--pipeline`` the stages and their schedule too."""

from __future__ import annotations

import argparse
import json

from autoddl.costmodel.errors import UserError

from ._options import show
from ._planning import add_method, add_planning_arguments, cluster_of, model_of, wishes_of
from ._stopping import interruptible

__all__ = ["add_parser", "run"]

_PIPELINES = ("auto", "dapple", "chimera", "wpipe")


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
    from ..api.planning import plan

    graph, cluster = model_of(arguments), cluster_of(arguments)
    wishes = wishes_of(arguments, arguments.method)
    with interruptible() as asked:
        found = plan(
            graph,
            cluster=cluster,
            pipeline=arguments.pipeline,
            allow_stale=arguments.allow_stale,
            method=arguments.method,
            stop=asked.stop,
            **wishes,
        )
    if arguments.output:
        found.save(arguments.output)
    if arguments.json:
        print(json.dumps(found.document, indent=1, allow_nan=False))
    else:
        show(found.text, arguments, *(["", f"Written to {arguments.output}"] if arguments.output else []))
    verdict = "it is proven optimal" if found.optimal else f"the best one may be up to {found.gap:.2%} better"
    return asked.exit_code(f"this is the best plan until then, {verdict}")
