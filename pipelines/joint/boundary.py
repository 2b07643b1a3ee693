"""Communication between the workers of a pipeline: transfers of tensors between stages, and all-reduces of gradients that several
workers hold.

**Transfers.**  A tensor crosses a boundary in the messages that bring it from the sender's layout to the receiver's
(:mod:`autoddl.costmodel.crossing`); both workers may have different numbers of devices.  With the latency alpha and the inverse
bandwidth beta of messages on a network level (inside or between nodes; :meth:`autoddl.costmodel.cluster.Link.message_time`),

    transfer = max over ranks, levels and {send, receive} of  [ alpha * messages of the rank + beta * bytes of the rank ]

**All-reduces.**  Gradients that several workers hold (replicas of bidirectional schedules) are also reduced over these workers:
reduce-scatter inside each worker, all-reduce between the workers, all-gather inside each worker.

**Weights that two stages share.**  Each stage first sums its own gradient over its devices and replicas.  Then every device
receives the other stage's sum for the elements that it updates: its part of the weight, or its shard of the part if the devices
divide the optimizer states (ZeRO 1).  This is priced as an all-reduce over the two workers, of the greater number of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from autoddl.costmodel.cluster import Cluster, Link
from autoddl.costmodel.collectives import Collective, Step, all_reduce_steps
from autoddl.costmodel.crossing import crossing
from autoddl.costmodel.distribution import Axis, RowsAndFeatures, canonical
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.kinds.kind import Number
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layerwork import LayerWork
from autoddl.costmodel.pricing import moved_shape
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.strategygroup import StrategyGroup
from autoddl.costmodel.workload import Workload

from ..schedule import Schedule
from .meshes import Meshes, StageMesh
from .partition import StageGraph

__all__ = [
    "Boundary",
    "BoundaryLoad",
    "PricedLayer",
    "boundary_of",
    "divided_steps",
    "least_crossing_s",
    "replicated_all_reduce_s",
    "replicated_all_reduce_steps",
    "shared_steps",
]


class BoundaryLoad(NamedTuple):
    """The messages that one rank sends, or receives, over the links of one network level.

    Attributes:
        is_inside: Whether the links are inside nodes, rather than between nodes.
        messages: Number of messages.
        nbytes: Bytes of all messages.
    """

    is_inside: bool
    messages: float
    nbytes: float

    def seconds(self, links: tuple[Link, Link]) -> float:
        """The time of the messages; ``links`` are those between nodes and inside nodes."""
        return links[self.is_inside].message_time(self.messages, self.nbytes)


@dataclass(frozen=True)
class Boundary:
    """The transfer of one micro-batch from a stage to the next one, and of its gradient back.

    Attributes:
        forward_s: Seconds of the forward transfer.
        backward_s: Seconds of the backward transfer.
        nbytes: Bytes of the tensor.
        forward: Slowest load of a rank in the forward transfer.
        backward: Slowest load of a rank in the backward transfer.
    """

    forward_s: float
    backward_s: float
    nbytes: float
    forward: BoundaryLoad
    backward: BoundaryLoad


class PricedLayer(Protocol):
    """A layer with its strategy, and its work for a micro-batch."""

    @property
    def layer(self) -> Layer: ...

    @property
    def strategy(self) -> Strategy: ...

    @property
    def work(self) -> LayerWork: ...


def replicated_all_reduce_s(
    layer: Layer,
    strategy: Strategy | StrategyGroup,
    num_workers: int,
    link: Link,
    devices: Cluster,
    nbytes: Number,
    divided: Sequence[Step] | None = None,
) -> Number:
    """Return the seconds of a gradient all-reduce over the data-parallel axes inside each worker and over several workers.

    Args:
        layer: The layer.
        strategy: Its strategy inside each worker, or a group of strategies; then numbers are arrays of shape (strategies,).
        num_workers: Number of workers that hold the layer.
        link: The link that joins the workers.
        devices: The devices of one worker.
        nbytes: Bytes of the layer's gradients on each device.
        divided: The steps inside a worker if its devices divide states (ZeRO); None if they do not.
    """
    between, inside = replicated_all_reduce_steps(layer, strategy, num_workers, nbytes, divided)
    return sum(link.time(step) for step in between) + sum(devices.time(step) for step in inside)


def replicated_all_reduce_steps(
    layer: Layer,
    strategy: Strategy | StrategyGroup,
    num_workers: int,
    nbytes: Number,
    divided: Sequence[Step] | None = None,
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps of :func:`replicated_all_reduce_s`: (steps between the workers, steps inside each worker)."""
    if not layer.num_parameters:
        return (), ()
    axes = () if strategy.summa else strategy.copy_axes(kind_of(layer.kind).is_lookup)
    slices = prod(axis.size for axis in axes)
    between = (Step(Collective.ALL_REDUCE, Axis(num_workers, 1), nbytes / slices),)
    if not axes:
        return between, ()
    if divided is not None:
        return between, tuple(divided)
    # Reduce-scatter and all-gather inside each worker: an all-reduce over one more, outermost axis, without its middle step.
    steps = all_reduce_steps((Axis(num_workers, 1), *axes), nbytes)
    return between, tuple(step for step in steps if step.collective is not Collective.ALL_REDUCE)


def divided_steps(work: LayerWork) -> tuple[Step, ...] | None:
    """Return the steps of a layer's gradients if its devices divide states (ZeRO), else None."""
    return work.gradient if work.zero else None


def shared_steps(
    schedule: Schedule,
    graphs: Sequence[StageGraph],
    stage_of: Mapping[str, int],
    figures: Mapping[str, PricedLayer],
    workload: Workload,
) -> Iterator[tuple[int, tuple[int, int], Step]]:
    """Iterate over the gradient all-reduces of weights that two stages share.

    Args:
        schedule: The schedule.
        graphs: Graph of every stage.
        stage_of: Stage of every layer, by layer name.
        figures: Every layer with its strategy, by layer name.
        workload: Precision and optimizer.

    Yields:
        (stage, its worker and the other stage's worker, the step), once for each of both stages.
    """
    for s, graph in enumerate(graphs):
        for here, there in graph.shared:
            other = stage_of[there]
            workers = (schedule.placement[0][s], schedule.placement[0][other])
            if workers[0] == workers[1]:
                continue
            nbytes = max(figures[name].work.shared_gradient_bytes for name in (here, there))
            yield s, workers, Step(Collective.ALL_REDUCE, Axis(2, 1), nbytes)


def boundary_of(
    mesh: Meshes,
    cluster: Cluster,
    placement: Sequence[Sequence[int]],
    number: int,
    exit_layer: Layer,
    source: RowsAndFeatures,
    target: RowsAndFeatures,
    workload: Workload,
) -> Boundary:
    """Return the transfer from stage ``number`` to the next one.

    Args:
        mesh: Devices of all workers.
        cluster: The devices and their network.
        placement: ``[pipeline][stage] -> worker``.
        number: Number of the sending stage.
        exit_layer: Last layer of the sending stage, whose output is transferred.
        source: Layout of the output on the sender.
        target: Layout of the output on the receiver.
        workload: Micro-batch and precision.
    """
    share_nodes = all(mesh.share_nodes(cluster, (workers[number], workers[number + 1])) for workers in placement)
    ends = [mesh.mesh_of(placement[0][stage]) for stage in (number, number + 1)]
    rows, features = moved_shape(exit_layer, (source, target), workload.micro_batch)
    nbytes = workload.micro_batch * exit_layer.output_elements * workload.itemsize
    tensor = (rows, features, nbytes / (rows * features))
    forward = _slowest_load(ends[0], ends[1], cluster.links, share_nodes, source, target, tensor)
    backward = _slowest_load(ends[1], ends[0], cluster.links, share_nodes, target, source, tensor)
    return Boundary(forward.seconds(cluster.links), backward.seconds(cluster.links), nbytes, forward, backward)


def least_crossing_s(
    ends: tuple[StageMesh, StageMesh], cluster: Cluster, share_nodes: bool, nbytes: np.ndarray
) -> np.ndarray:
    """Return lower bounds on the seconds of transfers, whatever the layouts.

    Some rank sends (or receives) at least the mean number of bytes; it may use the links of both levels at once.

    Args:
        ends: The rectangles of the sender and the receiver.
        cluster: The devices and their network.
        share_nodes: Whether both workers are in the same nodes.
        nbytes: Bytes of the tensors; any shape.
    """
    inter, intra = cluster.links
    latency, bandwidth = inter.latency_s, inter.bandwidth
    if share_nodes:
        latency = min(latency, intra.latency_s)
        bandwidth = intra.bandwidth + (inter.bandwidth if max(end.nodes for end in ends) > 1 else 0.0)
    return np.asarray(latency + nbytes / (min(end.num_devices for end in ends) * bandwidth))


@lru_cache(maxsize=1 << 16)
def _slowest_load(
    sender: StageMesh,
    receiver: StageMesh,
    links: tuple[Link, Link],
    share_nodes: bool,
    source: RowsAndFeatures,
    target: RowsAndFeatures,
    tensor: tuple[int, int, float],
) -> BoundaryLoad:
    """The load of a rank that takes longest when one micro-batch is sent from one worker to another (formula: module's docstring).

    Args:
        links: Links between nodes, and inside nodes.
        tensor: Number of samples (or of rows, if ranks share samples), number of features, bytes per element.
    """
    rows, features, itemsize = tensor
    if sender == receiver and source == target:
        # Every rank sends its own part to the rank in the same place.
        return BoundaryLoad(share_nodes, 1, rows * features * itemsize / sender.num_devices)
    # Messages and bytes by (level, direction, rank).
    totals: dict[tuple[bool, bool, int], list[float]] = {}
    for piece in crossing(canonical(source), canonical(target), (rows, features)):
        nodes = piece.source // sender.devices_per_node, piece.destination // receiver.devices_per_node
        is_inside = share_nodes and nodes[0] == nodes[1]
        for end in ((is_inside, False, piece.source), (is_inside, True, piece.destination)):
            total = totals.setdefault(end, [0.0, 0.0])
            total[0] += 1
            total[1] += piece.num_elements * itemsize
    loads = (BoundaryLoad(is_inside, messages, sent) for (is_inside, _, _), (messages, sent) in totals.items())
    return max(loads, key=lambda load: load.seconds(links))
