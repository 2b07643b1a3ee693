"""Arguments of the commands that plan a model, and their values for the library."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

from autoddl.costmodel.cluster import Cluster, preset_names
from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, EXECUTORS
from autoddl.costmodel.overlap import OVERLAPS
from autoddl.costmodel.precision import PRECISIONS
from autoddl.costmodel.reading import parse_figure
from autoddl.costmodel.recomputation import RECOMPUTATIONS, check_recomputation
from autoddl.costmodel.units import to_si
from autoddl.costmodel.workload import ACTIVATIONS, ATTENTIONS, GRADIENTS, OPTIMIZERS
from autoddl.search import METHODS
from autoddl.search.options import AUTO

from ..api import inputs
from ._options import add_json, add_memory_limit, add_quiet, add_wide, memory_limit_bytes

__all__ = [
    "add_batch",
    "add_cluster_arguments",
    "add_links",
    "add_method",
    "add_model_arguments",
    "add_planning_arguments",
    "add_workload_options",
    "bucket_bytes",
    "cluster_of",
    "link_options",
    "model_of",
    "planning_options",
]


def add_model_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add MODEL and the options of built-in transformers.

    Args:
        parser: The parser of a command.
        optional: Whether MODEL may be left out.
    """
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        help="a name (gpt3-13b, bert-large, vgg13), sizes (gpt:24x1024, mlp:4096,1024,10), a HuggingFace config.json, "
        "a saved graph, or FILE.py:FUNCTION",
    )
    parser.add_argument("--heads", type=int, metavar="H", help="number of attention heads of a built-in transformer")
    parser.add_argument("--sequence", type=int, metavar="LENGTH", help="sequence length of a built-in transformer")
    parser.add_argument("--vocabulary", type=int, metavar="SIZE", help="vocabulary size of a built-in transformer")
    parser.add_argument(
        "--dropout", action="store_true", help="a built-in transformer has dropouts, as when it was published"
    )
    parser.add_argument(
        "--capacity-factor",
        type=float,
        metavar="C",
        help="slots of an expert of a mixture, as a multiple of its share of a balanced load",
    )
    parser.add_argument(
        "--batch-norm",
        metavar="SAMPLES",
        help="samples whose statistics batch norms use: local (of each device) or all (default: as the model says)",
    )


def add_cluster_arguments(parser: argparse._ActionsContainer, *, optional: bool = False) -> None:
    """Add the options that name a cluster and change its size; ``optional``: whether the cluster may be left out."""
    parser.add_argument(
        "--cluster",
        required=not optional,
        metavar="CLUSTER",
        help=f"a cluster file, or one of {', '.join(preset_names())}",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: that of the cluster)")
    parser.add_argument(
        "--devices-per-node", type=int, metavar="G", help="number of devices per node (default: that of the cluster)"
    )


def add_planning_arguments(parser: argparse.ArgumentParser, *, has_pipeline: bool) -> argparse._ArgumentGroup:
    """Add the arguments of the model, the cluster, the training and the search.

    Args:
        parser: The parser of a command.
        has_pipeline: Whether the command has the option ``--pipeline``, which changes the meaning of some other options.

    Returns:
        The group of the search options.
    """
    add_model_arguments(parser)
    group = parser.add_argument_group("cluster")
    add_cluster_arguments(group)
    add_links(group)
    _add_training_options(parser)
    search_group = _add_search_options(parser, has_pipeline)
    add_wide(parser)
    add_json(parser)
    add_quiet(parser)
    return search_group


def add_links(group: argparse._ActionsContainer) -> None:
    """Add the options that change the links of a cluster."""
    group.add_argument("--latency", metavar="TIME", help="latency of every link, such as 2us (without a unit: seconds)")
    group.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="bandwidth per device of every link, such as 10GB/s (without a unit: bytes/s)",
    )


#: Words of ``--recompute`` that leave a choice, with the option that each stands for.
_CHOICES = {"auto": None, "always": True, "never": False}


def _recomputation(text: str) -> str:
    """Check a value of ``--recompute``."""
    try:
        check_recomputation(text, (*_CHOICES, *RECOMPUTATIONS[1:]))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add_batch(group)
    group.add_argument(
        "--micro-batch",
        type=int,
        metavar="b",
        help="samples per forward pass over all devices (default: chosen by the search)",
    )
    group.add_argument(
        "--recompute",
        type=_recomputation,
        metavar="WAY",
        default="auto",
        help="what to recompute in the backward pass: auto (chosen by the search), always, never, selective (dense attention), "
        "layers, blocks, or blocks:K, the first K blocks of every stage (default: %(default)s)",
    )
    group.add_argument(
        "--activations",
        choices=(*ACTIVATIONS, AUTO),
        default=AUTO,
        help="between layers: split, with gathered inputs kept or gathered again for the backward pass (auto: chosen for each "
        "layer); or copied (default: %(default)s)",
    )
    add_workload_options(group, is_searched=True)


def add_batch(group: argparse._ActionsContainer) -> None:
    """Add the option ``--batch``."""
    group.add_argument(
        "--batch", type=int, metavar="B", help="samples per training step over all devices (default: 8 per device)"
    )


def _zero(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def add_workload_options(group: argparse._ActionsContainer, is_searched: bool = False) -> None:
    """Add the options of training that planning and pricing share.

    Args:
        group: The group of options.
        is_searched: Whether a search may choose their values.
    """
    group.add_argument(
        "--precision", choices=tuple(PRECISIONS), help="numeric precision (default: the usual one of the device)"
    )
    group.add_argument(
        "--optimizer", choices=tuple(OPTIMIZERS), default="adam", help="optimizer (default: %(default)s)"
    )
    group.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default="fused",
        help="fused attention keeps no scores and skips masked ones, dense attention computes and keeps all (default: %(default)s)",
    )
    group.add_argument(
        "--gradients",
        choices=GRADIENTS,
        default="compute",
        help="type of gradients that are accumulated and summed over devices; master: float32 (default: %(default)s)",
    )
    group.add_argument(
        "--zero",
        type=_zero,
        choices=(0, 1, 2, 3, AUTO) if is_searched else (0, 1, 2, 3),
        default=AUTO if is_searched else 0,
        help="what devices with the same parameters divide in all layers: 1 optimizer states, 2 also gradients, 3 also parameters"
        + ("; auto: chosen for each layer" if is_searched else "")
        + " (default: %(default)s)",
    )
    group.add_argument(
        "--overlap",
        choices=OVERLAPS,
        default="none",
        help="communication beside computation: all-reduces of gradients in the backward pass, or also the communication of "
        "linear layers under their products (default: %(default)s)",
    )
    group.add_argument(
        "--bucket",
        metavar="SIZE",
        help="sum gradients of several layers together, those of fewer bytes, in buckets of at least so many, such as 4MiB "
        "(default: layer by layer)",
    )
    add_memory_limit(group, "the device's memory without the framework's share")


def _add_search_options(parser: argparse.ArgumentParser, has_pipeline: bool) -> argparse._ArgumentGroup:
    def with_pipeline(text: str) -> str:
        return f"; with --pipeline, {text}" if has_pipeline else ""

    group = parser.add_argument_group("search")
    group.add_argument(
        "--communication-only",
        action="store_true",
        help="minimize communication time instead of step time"
        + with_pipeline("minimize the step time without computation"),
    )
    group.add_argument(
        "--untied",
        action="store_true",
        help="choose a strategy for every repetition of a block separately"
        + with_pipeline("for every layer of a stage"),
    )
    group.add_argument(
        "--summa",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="offer Summa meshes to linear layers",
    )
    group.add_argument(
        "--executor",
        choices=EXECUTORS,
        default=EAGER,
        help="what executes the plan: eager executes all strategies; graph, OneFlow's nn.Graph, those on meshes of at most two "
        "axes (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of the random search methods (default: %(default)s)")
    group.add_argument(
        "--temperature",
        metavar="TIME",
        help="constant temperature of metropolis-hastings, such as 10ms (without a unit: seconds; default: annealing)",
    )
    group.add_argument(
        "--evaluations",
        type=int,
        metavar="K",
        help="maximum number of evaluations of one search (default: that of the method)",
    )
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="time limit of one search (default: 20)"
        + with_pipeline("limit on the processor time of the whole search (default: 30)"),
    )
    return group


def add_method(group: argparse._ArgumentGroup) -> None:
    """Add the option ``--method``."""
    group.add_argument(
        "--method",
        choices=tuple(METHODS),
        default="exact",
        help="search method without --pipeline (default: %(default)s)",
    )


def model_of(arguments: argparse.Namespace) -> LayerGraph:
    """Return the layer graph of MODEL."""
    return inputs.graph_of(
        arguments.model,
        heads=arguments.heads,
        sequence=arguments.sequence,
        vocabulary=arguments.vocabulary,
        dropout=arguments.dropout,
        capacity_factor=arguments.capacity_factor,
        batch_norm=arguments.batch_norm,
    )


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """Return the cluster with the size and the links of the options."""
    return inputs.cluster_of(arguments.cluster, arguments.nodes, arguments.devices_per_node, **link_options(arguments))


def link_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of links in SI units, as arguments of the library."""
    return {
        "latency_s": _quantity("--latency", arguments.latency, "time"),
        "bandwidth": _quantity("--bandwidth", arguments.bandwidth, "rate"),
    }


def _quantity(option: str, text: str | None, quantity: str) -> float | None:
    """Parse a number with a unit and return it in SI units; None if the option is not given."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/]*)\s*", text)
    value = parse_figure(match[1]) if match else math.nan
    if match is None or math.isnan(value):
        example = {"time": "2us", "rate": "10GB/s", "size": "4MiB"}[quantity]
        raise UserError(f"{option} {quote(text)} is not a number with a unit, such as {example}")
    return to_si(value, match[2] or {"time": "s", "rate": "B/s", "size": "B"}[quantity], quantity, option)


def bucket_bytes(arguments: argparse.Namespace) -> int:
    """Return the bytes of ``--bucket``; 0 if it is not given."""
    return round(_quantity("--bucket", arguments.bucket, "size") or 0)


def planning_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of training and search as arguments of :func:`autoddl.plan` and :func:`autoddl.compare`."""
    return {
        "batch": arguments.batch,
        "micro_batch": arguments.micro_batch,
        "objective": "communication" if arguments.communication_only else "step",
        "memory_limit_bytes": memory_limit_bytes(arguments),
        "precision": arguments.precision,
        "optimizer": arguments.optimizer,
        "recompute": _CHOICES.get(arguments.recompute, arguments.recompute),
        "attention": arguments.attention,
        "gradients": arguments.gradients,
        "zero": arguments.zero,
        "activations": arguments.activations,
        "overlap": arguments.overlap,
        "bucket_bytes": bucket_bytes(arguments),
        "untied": arguments.untied,
        "summa": arguments.summa,
        "executor": arguments.executor,
        "seed": arguments.seed,
        "temperature_s": _quantity("--temperature", arguments.temperature, "time"),
        "evaluations": arguments.evaluations,
        "time_limit_s": arguments.time_limit,
        "quiet": arguments.quiet,
    }
