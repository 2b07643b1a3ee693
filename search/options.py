"""Options of the planner, what they mean on a cluster, and the checks of their values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, EXECUTORS
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.recomputation import RECOMPUTATIONS, block_limit, check_recomputation
from autoddl.costmodel.strategy import PLAIN, Choices
from autoddl.costmodel.workload import Workload

from . import METHODS

__all__ = [
    "AUTO",
    "DEFAULT_TIME_LIMIT_S",
    "USABLE_MEMORY",
    "Options",
    "base_workload",
    "default_memory_limit",
    "is_tried",
    "memory_limit_of",
    "micro_batches",
    "partial_recomputations",
    "recomputations",
]

#: The value of an option that the search chooses for each layer.
AUTO = "auto"
#: Samples per device and step if no batch is given.
DEFAULT_BATCH_PER_DEVICE = 8
#: Time limit [s] of one search if none is given: a result with a gap is better than none.
DEFAULT_TIME_LIMIT_S = 20.0
#: The fraction of a device's memory that a plan may fill if no limit is given, and the cluster does not say what the framework
#: needs.
USABLE_MEMORY = 0.9


@dataclass(frozen=True)
class Options:
    """Options of the planner.

    Attributes:
        batch: samples per step over all devices; None for 8 per device.
        micro_batch: samples per pass over all devices; None to choose it.
        method: the search, one of ``autoddl.search.METHODS``.
        objective: ``step`` or ``communication``.
        memory_limit_bytes: per device; None for :func:`default_memory_limit`.
        precision: of the training; None for the default of the cluster's device.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        recompute: what to recompute (:mod:`autoddl.costmodel.recomputation`); True for any recomputation, False for none, None
            to choose it.
        attention, gradients, overlap, bucket_bytes: as in :class:`autoddl.costmodel.workload.Workload`.
        zero: the stage of ZeRO of all layers, 0 to 3; ``auto`` to choose it for each layer.
        activations: as in :class:`autoddl.costmodel.workload.Workload`; ``auto`` to choose for each product whether its gathered
            input is kept or gathered again.
        untied: give every repetition of a block its own choice.
        summa: offer Summa meshes to linear layers.
        executor: what executes the plan, one of ``autoddl.costmodel.graph_meshes.EXECUTORS``.
        seed: of the random methods.
        temperature_s: constant temperature of Metropolis-Hastings; None for annealing.
        evaluations, time_limit_s: budgets of one search; None for the default of the method, and for 20 s.
        quiet: show no progress bar.
    """

    batch: int | None = None
    micro_batch: int | None = None
    method: str = "exact"
    objective: str = "step"
    memory_limit_bytes: float | None = None
    precision: str | None = None
    optimizer: str = "adam"
    recompute: bool | str | None = None
    attention: str = "fused"
    gradients: str = "compute"
    zero: int | str = 0
    activations: str = "kept"
    overlap: str = "none"
    bucket_bytes: int = 0
    untied: bool = False
    summa: bool = True
    executor: str = EAGER
    seed: int = 0
    temperature_s: float | None = None
    evaluations: int | None = None
    time_limit_s: float | None = None
    quiet: bool = True

    @property
    def choices(self) -> Choices:
        """What layers are offered besides splits; the graph executor leaves all of it to OneFlow."""
        if self.executor != EAGER:
            return PLAIN
        return Choices((0, 1, 2, 3) if self.zero == AUTO else (0,), regathers=self.activations == AUTO)


def default_memory_limit(cluster: Cluster) -> float:
    """The memory [bytes per device] that a plan may fill if the user gives no limit.

    It is the memory of the device without what the framework occupies, if the cluster names that; otherwise 9/10 of it.
    """
    device = cluster.device
    return (
        device.memory_bytes - device.framework_bytes if device.framework_bytes else USABLE_MEMORY * device.memory_bytes
    )


def memory_limit_of(cluster: Cluster, options: Options) -> float:
    """The memory limit of a plan [bytes per device], after a check of all options that a search takes.

    Raises:
        UserError: an option is out of range.
    """
    if options.method not in METHODS:
        raise UserError(f"method {options.method!r} is not one of {', '.join(METHODS)}")
    if options.executor not in EXECUTORS:
        raise UserError(f"executor {options.executor!r} is not one of {', '.join(EXECUTORS)}")
    limit = default_memory_limit(cluster) if options.memory_limit_bytes is None else options.memory_limit_bytes
    if options.time_limit_s is not None and not 0 < options.time_limit_s < math.inf:
        raise UserError(f"time limit {options.time_limit_s:g} should be a finite number of more than 0 s")
    if options.temperature_s is not None and options.method != "metropolis-hastings":
        raise UserError(f"temperature_s is for method='metropolis-hastings'; {options.method} has none")
    if options.temperature_s is not None and not 0 < options.temperature_s < math.inf:
        raise UserError(f"temperature {options.temperature_s:g} should be a finite number of more than 0 s")
    if options.evaluations is not None and options.evaluations < 1:
        raise UserError(f"evaluations {options.evaluations} should be at least 1")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"seed {options.seed} should be a whole number of at least 0 and less than 2^63")
    if not 0 < limit < math.inf:
        raise UserError(f"memory limit {limit / 2**30:g} GiB should be a finite number of more than 0")
    return limit


def recomputations(options: Options, graph: LayerGraph) -> tuple[str, ...]:
    """The ways of recomputation that the options allow and that make a difference for a model, the fastest first.

    Fused attention keeps too little for selective recomputation to save any of it.  Recomputation of blocks needs repeated blocks;
    its memory is that of one block, so equal layers of all blocks have to share a choice.  nn.Graph
    recomputes single layers only.
    """
    if isinstance(options.recompute, str):
        check_recomputation(options.recompute)
        return (options.recompute,)
    useless = set()
    if options.attention == "fused" or not any(kind_of(layer.kind).is_selected for layer in graph.layers):
        useless.add("selective")
    if options.untied or options.executor != EAGER or not any(layer.block for layer in graph.layers):
        useless.add("blocks")
    if options.recompute is not None:
        useless.update(RECOMPUTATIONS[:1] if options.recompute else RECOMPUTATIONS[1:])
    return tuple(name for name in RECOMPUTATIONS if name not in useless)


def partial_recomputations(options: Options, graph: LayerGraph) -> tuple[range, ...]:
    """The numbers K of ``blocks:K`` that the options allow and that differ from ``none`` and ``blocks``.

    Returns:
        Ranges in each of which memory does not increase with K: each ends with the blocks of one kind.
    """
    if isinstance(options.recompute, str) or "blocks" not in recomputations(options, graph):
        return ()
    return graph.partial_block_counts


def is_tried(recompute: str, options: Options, graph: LayerGraph) -> bool:
    """Whether the options allow a way of recomputation for a model."""
    ranges = partial_recomputations(options, graph)
    return recompute in recomputations(options, graph) or any(block_limit(recompute) in counts for counts in ranges)


def base_workload(cluster: Cluster, options: Options, recompute: str = "none") -> Workload:
    """The workload of the options, with the whole batch as one micro-batch."""
    batch = DEFAULT_BATCH_PER_DEVICE * cluster.num_devices if options.batch is None else options.batch
    precision = options.precision or cluster.default_precision
    return Workload(
        batch,
        batch,
        precision,
        options.optimizer,
        recompute,
        options.attention,
        options.gradients,
        0 if options.zero == AUTO else cast(int, options.zero),
        "kept" if options.activations == AUTO else options.activations,
        options.overlap,
        options.bucket_bytes,
    )


def micro_batches(workload: Workload, options: Options) -> list[int]:
    """The micro-batches to consider, largest first; the price book checks that a given one divides the batch."""
    return divisors(workload.batch)[::-1] if options.micro_batch is None else [options.micro_batch]
