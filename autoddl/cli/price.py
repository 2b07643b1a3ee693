"""``autoddl price``: the price of a configuration that the user runs, or of training runs that were measured."""

from __future__ import annotations

import argparse
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.joint.uniform import SCHEDULES

from ._options import add_json, add_quiet, add_wide, memory_limit_bytes, print_document, print_result, show
from ._planning import (
    add_batch,
    add_cluster_arguments,
    add_links,
    add_model_arguments,
    add_workload_options,
    bucket_bytes,
    link_options,
)
from ._stopping import interruptible

__all__ = ["add_parser", "run"]

#: Options that do not describe the configuration.
_OUTPUT = ("help", "runs", "fit", "json", "wide", "quiet", "output", "best", "time_limit")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "price",
        help="price a configuration that you run, or predict measured training runs",
        description="Price a configuration with the same tensor, pipeline and data parallel degrees for the whole model, without a "
        "search; the result is a plan. Model FLOP/s utilisation is 3 times the FLOPs of the forward pass (attention in full, no "
        "recomputation) over the step, the devices and their peak FLOP/s; hardware FLOP/s utilisation counts the FLOPs that are "
        "computed, with recomputation. With --runs, predict the step and the memory of training runs that were measured.",
    )
    add_model_arguments(parser, optional=True)
    group = parser.add_argument_group("cluster")
    add_cluster_arguments(group, optional=True)
    add_links(group)
    group = parser.add_argument_group("configuration")
    _add_degrees(group)
    group = parser.add_argument_group("training")
    add_batch(group)
    group.add_argument(
        "--micro-batch",
        type=int,
        default=1,
        metavar="b",
        help="samples per forward pass and replica, as Megatron-LM's --micro-batch-size; `autoddl plan` counts them over all "
        "replicas (default: %(default)s)",
    )
    group.add_argument(
        "--recompute",
        metavar="WAY",
        default="none",
        help="what to recompute in the backward pass: none; selective, attention; full or blocks, every block; blocks:K, the first "
        "K blocks of each stage, as Megatron-LM's --recompute-method block; layers (default: %(default)s)",
    )
    group.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="activations as in Megatron-LM, with its sequence parallelism or without (default: split, gathered inputs are kept)",
    )
    add_workload_options(group)
    group = parser.add_argument_group("comparison with the best plan")
    group.add_argument(
        "--best",
        action="store_true",
        help="also search for the best plan, print how far the configuration is from it, and which single change gains most",
    )
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="limit on the processor time of the search for the best plan (default: 30)",
    )
    group = parser.add_argument_group("measured runs")
    group.add_argument("--runs", metavar="RUNS.csv", help="CSV file with a row per measured run, or 'published'")
    group.add_argument(
        "--fit",
        action="store_true",
        help="predict each run with the efficiency that fits its group, in place of that of its cluster",
    )
    parser.add_argument("-o", "--output", metavar="PLAN.json", help="write the configuration as a plan to this file")
    add_wide(parser)
    add_json(parser)
    add_quiet(parser)
    defaults = {action.dest: action.default for action in parser._actions if action.dest not in _OUTPUT}
    parser.set_defaults(defaults=defaults)


def _add_degrees(group: argparse._ArgumentGroup) -> None:
    """Add the options of the configuration: its degrees and its schedule."""
    group.add_argument("--tp", type=int, default=1, metavar="T", help="tensor parallel degree (default: %(default)s)")
    group.add_argument("--pp", type=int, default=1, metavar="P", help="pipeline stages (default: %(default)s)")
    group.add_argument("--dp", type=int, metavar="D", help="replicas (default: the rest of the cluster)")
    group.add_argument(
        "--interleave",
        type=int,
        default=1,
        metavar="V",
        help="chunks of the model on each stage (default: %(default)s)",
    )
    group.add_argument(
        "--ep", type=int, default=1, metavar="E", help="parts of the experts, over replicas (default: %(default)s)"
    )
    group.add_argument(
        "--schedule", choices=tuple(SCHEDULES), default="1f1b", help="schedule of the pipeline (default: %(default)s)"
    )
    group.add_argument(
        "--from-megatron",
        metavar="FILE",
        help="take model, degrees and training options from this file of Megatron-LM's flags; dp is the rest of the devices",
    )


def run(arguments: argparse.Namespace) -> int:
    """Price the configuration or the runs, and print the result."""
    if arguments.runs is not None:
        return _price_runs(arguments)
    if arguments.fit:
        raise UserError("--fit is for --runs RUNS.csv")
    if arguments.time_limit is not None and not arguments.best:
        raise UserError("--time-limit is for --best; nothing is searched without")
    if arguments.cluster is None:
        raise UserError("--cluster is missing: a configuration is priced on a cluster, such as --cluster dgx-a100")
    if arguments.model is None and arguments.from_megatron is None:
        raise UserError("give MODEL, Megatron-LM's flags (--from-megatron FILE), or measured runs (--runs RUNS.csv)")
    return _price(arguments)


def _price_runs(arguments: argparse.Namespace) -> int:
    from ..api.pricing import price_runs

    given = [name for name, default in arguments.defaults.items() if getattr(arguments, name) != default]
    given += [name for name in ("output", "best", "time_limit") if getattr(arguments, name)]
    if given:
        name = "MODEL" if given[0] == "model" else f"--{given[0].replace('_', '-')}"
        raise UserError(f"{name} is for one configuration, leave it out with --runs: its file has all of each run")
    print_result(price_runs(arguments.runs, fit=arguments.fit), arguments)
    return 0


def _price(arguments: argparse.Namespace) -> int:
    from ..api.configured import distance, price

    same = (
        *("tp", "pp", "dp", "interleave", "schedule", "ep", "micro_batch", "recompute", "sequence_parallel"),
        *("from_megatron", "cluster", "nodes", "devices_per_node", "heads", "sequence", "vocabulary"),
        *("capacity_factor", "batch_norm", "batch", "precision", "optimizer", "attention", "gradients", "zero"),
        "overlap",
    )
    options: dict[str, Any] = {name: getattr(arguments, name) for name in same}
    options["bucket_bytes"] = bucket_bytes(arguments)
    limit = memory_limit_bytes(arguments)
    plan = price(arguments.model, memory_limit_bytes=limit, **link_options(arguments), **options)
    if arguments.output:
        plan.save(arguments.output)
    found, exit_code = None, 0
    if arguments.best:
        with interruptible() as interrupt:
            found = distance(plan, time_limit_s=arguments.time_limit, quiet=arguments.quiet, stop=interrupt.stop)
        exit_code = interrupt.exit_code("the best plan is the best one found so far")
    if arguments.json:
        figures = ("tokens_per_s_per_device", "model_flops_utilisation", "hardware_flops_utilisation")
        document = {"format": "autoddl-price", "version": 1, **{name: getattr(plan, name) for name in figures}}
        print_document({**document, "plan": plan.document, **({"best": found.document} if found else {})})
        return exit_code
    show(plan.text, arguments)
    if found is not None:
        print()
        show(found.text, arguments)
    if arguments.output:
        print(f"\nWritten to {arguments.output}")
    return exit_code
