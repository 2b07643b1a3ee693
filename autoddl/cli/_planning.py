"""The arguments that planning commands share."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

from autoddl.costmodel.cluster import Cluster, load_cluster, preset_names
from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.reading import parse_figure
from autoddl.costmodel.units import to_si
from autoddl.costmodel.workload import OPTIMIZERS, PRECISIONS
from autoddl.search import METHODS

from ..zoo import resolve_model
from ._options import add_wide

__all__ = ["add_model_arguments", "add_planning_arguments", "cluster_of", "model_of", "wishes_of"]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and what changes a built-in one."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name (gpt3-13b, bert-large, vgg13), sizes (gpt:24x1024, mlp:4096,1024,10), a HuggingFace config.json, "
        "a saved graph, or FILE.py:FUNCTION",
    )
    parser.add_argument("--heads", type=int, help="attention heads of a built-in transformer")
    parser.add_argument("--sequence", type=int, help="its sequence length")
    parser.add_argument("--vocabulary", type=int, help="its vocabulary")


def add_planning_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, cluster and options of the planner."""
    add_model_arguments(parser)
    group = parser.add_argument_group("cluster")
    group.add_argument("--cluster", required=True, metavar="C", help=f"a file, or one of {', '.join(preset_names())}")
    group.add_argument("--nodes", type=int, metavar="N", help="number of nodes")
    group.add_argument("--devices-per-node", type=int, metavar="G", help="devices in each node")
    group.add_argument(
        "--latency", metavar="A", help="latency of every link, such as 2us (a bare number is in seconds)"
    )
    group.add_argument(
        "--bandwidth", metavar="X", help="bandwidth per device, such as 10GB/s (a bare number is in bytes/s)"
    )
    group = parser.add_argument_group("training")
    group.add_argument("--batch", type=int, metavar="B", help="samples per step over all devices (8 per device)")
    group.add_argument("--micro-batch", type=int, metavar="b", help="samples per pass over all devices (chosen)")
    group.add_argument("--precision", choices=tuple(PRECISIONS), help="of training (the device's usual one)")
    group.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adam", help="(%(default)s)")
    group.add_argument(
        "--recompute", choices=("auto", "always", "never"), default="auto", help="of activations (%(default)s)"
    )
    group.add_argument("--memory-limit", type=float, metavar="GIB", help="per device (9/10 of the device's memory)")
    group = parser.add_argument_group("search")
    group.add_argument(
        "--communication-only",
        action="store_true",
        help="minimise communication time alone, as the paper does; with --pipeline, the step if computing takes no time",
    )
    group.add_argument(
        "--untied",
        action="store_true",
        help="a choice of its own for every repetition of a block; with --pipeline, for every layer of a stage",
    )
    group.add_argument(
        "--summa",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether linear layers may use Summa meshes, with --pipeline too",
    )
    group.add_argument("--seed", type=int, default=0, help="of the random methods (%(default)s)")
    group.add_argument(
        "--temperature",
        metavar="T",
        help="of metropolis-hastings, constant, such as 10ms (a bare number is in seconds); without it it anneals",
    )
    group.add_argument("--evaluations", type=int, metavar="K", help="budget of one search")
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="of one search (20); with --pipeline, processor time of its search (30)",
    )
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def add_method(parser: argparse.ArgumentParser) -> None:
    """The search method."""
    parser.add_argument("--method", choices=tuple(METHODS), default="exact", help="(%(default)s)")


def model_of(arguments: argparse.Namespace) -> LayerGraph:
    """The layer graph that the user named."""
    return resolve_model(
        arguments.model, heads=arguments.heads, sequence=arguments.sequence, vocabulary=arguments.vocabulary
    )


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The cluster that the user named, resized and relinked."""
    cluster = load_cluster(arguments.cluster).resized(arguments.nodes, arguments.devices_per_node)
    latency = _quantity("--latency", arguments.latency, "time")
    return cluster.with_links(latency, _quantity("--bandwidth", arguments.bandwidth, "rate"))


def _quantity(option: str, text: str | None, quantity: str) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/]*)\s*", text)
    value = parse_figure(match[1]) if match else math.nan
    if match is None or math.isnan(value):
        example = "2us" if quantity == "time" else "10GB/s"
        raise UserError(f"{option} {quote(text)} is not a number with a unit, such as {example}")
    base = "s" if quantity == "time" else "B/s"
    return to_si(value, match[2] or base, quantity, option)


def _temperature(arguments: argparse.Namespace) -> float | None:
    """The constant temperature of Metropolis-Hastings, in seconds."""
    return _quantity("--temperature", arguments.temperature, "time")


def wishes_of(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """What was asked of the planner, as arguments of :func:`autoddl.plan` and :func:`autoddl.compare`."""
    limit = arguments.memory_limit
    return {
        "batch": arguments.batch,
        "micro_batch": arguments.micro_batch,
        "objective": "communication" if arguments.communication_only else "step",
        "memory_limit_bytes": None if limit is None else limit * 2**30,
        "precision": arguments.precision,
        "optimizer": arguments.optimizer,
        "recompute": {"auto": None, "always": True, "never": False}[arguments.recompute],
        "untied": arguments.untied,
        "summa": arguments.summa,
        "seed": arguments.seed,
        "temperature_s": _temperature(arguments) if method == "metropolis-hastings" else None,
        "evaluations": arguments.evaluations,
        "time_limit_s": arguments.time_limit,
        "quiet": arguments.quiet,
    }
