"""``autoddl plan``: find the best plan to train a model on a cluster, and prove that it is the best."""

from __future__ import annotations

import argparse

from ._options import print_document, show
from ._planning import add_method, add_planning_arguments, cluster_of, model_of, planning_options
from ._stopping import interruptible

__all__ = ["add_parser", "run"]

_PIPELINES = ("auto", "dapple", "chimera", "wpipe")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="find the best plan to train a model on a cluster, with a proof",
        description="Find the best SBP strategy for every layer of a model on a cluster, and prove that it is the best. With "
        "--pipeline, also find the stages of a pipeline and their schedule.",
    )
    search_group = add_planning_arguments(parser, has_pipeline=True)
    add_method(search_group)
    group = parser.add_argument_group("pipeline")
    group.add_argument(
        "--pipeline",
        choices=_PIPELINES,
        help="auto: search stages, schedule, micro-batch, recomputation and strategies together; dapple, chimera, wpipe: use the "
        "planner of that paper; the plan is compared with the best plan of every schedule family (default: no pipeline)",
    )
    group.add_argument(
        "--allow-stale",
        action="store_true",
        help="also offer asynchronous schedules (pipedream, pipedream-2bw, wpipe), which compute with weights of earlier updates",
    )
    parser.add_argument(
        "--start",
        metavar="PLAN.json",
        help="start the search from the plan in this file, if it is in the space; the result is not slower",
    )
    parser.add_argument(
        "--like",
        choices=("megatron",),
        help="also print the nearest uniform configuration as Megatron-LM's flags, with what uniformity costs",
    )
    parser.add_argument("-o", "--output", metavar="PLAN.json", help="write the plan to this file")


def run(arguments: argparse.Namespace) -> int:
    """Find a plan, write it and print it."""
    from ..api.configured import nearest_uniform
    from ..api.planning import plan

    graph, cluster = model_of(arguments), cluster_of(arguments)
    options = planning_options(arguments)
    with interruptible() as interrupt:
        best = plan(
            graph,
            cluster=cluster,
            pipeline=arguments.pipeline,
            allow_stale=arguments.allow_stale,
            method=arguments.method,
            start=arguments.start,
            stop=interrupt.stop,
            **options,
        )
        uniform = nearest_uniform(best, stop=interrupt.stop) if arguments.like else None
    if arguments.output:
        best.save(arguments.output)
    if arguments.json:
        print_document({**best.document, "like": uniform.document} if uniform else best.document)
    else:
        show(best.text, arguments)
        if uniform is not None:
            print()
            show(uniform.text, arguments)
        if arguments.output:
            print(f"\nWritten to {arguments.output}")
    verdict = "it is proven optimal" if best.optimal else f"the best one may be up to {best.gap:.2%} better"
    return interrupt.exit_code(f"this is the best plan found so far, {verdict}")
