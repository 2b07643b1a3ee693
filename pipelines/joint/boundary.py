"""What passes between the workers of a pipeline: tensors from stage to stage, and sums of gradients that several hold.

What crosses from stage to stage is priced by the messages that bring the tensor from the sender's layout to the layout that the
receiver wants (:mod:`autoddl.costmodel.crossing`), whether both have as many devices or not:

    transfer = alpha * most messages at one rank + most bytes that one rank sends or receives * beta     (slower of both levels)

Gradients that several workers hold (both directions of bidirectional schemes, shared embeddings) are reduced over them too:
scattered inside each, all-reduced between them, gathered.
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
from autoddl.costmodel.distribution import Axis, canonical
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layerwork import LayerWork
from autoddl.costmodel.layoutprices import Layout
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from ..schedule import Schedule
from .meshes import Meshes, StageMesh
from .partition import StageGraph

__all__ = [
    "Boundary",
    "BoundaryLoad",
    "PricedLayer",
    "boundary_of",
    "least_crossing_s",
    "own_gradient_bytes",
    "replicated_all_reduce_s",
    "replicated_all_reduce_steps",
    "shared_steps",
]


class BoundaryLoad(NamedTuple):
    """What one rank sends, or receives, over the links inside nodes, or between them."""

    is_inside: bool
    messages: float
    nbytes: float

    def seconds(self, links: Sequence[tuple[float, float]]) -> float:
        """By the (latency, bandwidth) between and inside nodes."""
        latency, bandwidth = links[self.is_inside]
        return latency * self.messages + self.nbytes / bandwidth


@dataclass(frozen=True)
class Boundary:
    """What one micro-batch takes from a stage to the next one, and its gradient back; and its bytes.

    Attributes:
        forward, backward: what the rank sends or receives that takes the longest.
    """

    forward_s: float
    backward_s: float
    nbytes: float
    forward: BoundaryLoad
    backward: BoundaryLoad


class PricedLayer(Protocol):
    """A layer at its strategy, and what it does for a micro-batch."""

    @property
    def layer(self) -> Layer: ...

    @property
    def strategy(self) -> Strategy: ...

    @property
    def work(self) -> LayerWork: ...


def own_gradient_bytes(layer: PricedLayer, workload: Workload) -> float:
    """Of a layer's gradients on one device."""
    return layer.work.state_bytes * workload.itemsize / workload.bytes_per_parameter


def replicated_all_reduce_s(
    layer: Layer, strategy: Strategy, num_workers: int, link: Link, devices: Cluster, nbytes: float
) -> float:
    """All-reduce of ``nbytes`` of gradients per device over a layer's slices of the samples and over workers joined by ``link``."""
    between, inside = replicated_all_reduce_steps(layer, strategy, num_workers, nbytes)
    return sum(link.time(step) for step in between) + sum(devices.time(step) for step in inside)


def replicated_all_reduce_steps(
    layer: Layer, strategy: Strategy, num_workers: int, nbytes: float
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of :func:`replicated_all_reduce_s` between the workers, and inside each."""
    if not nbytes:
        return (), ()
    axes = () if strategy.summa else strategy.axes(0, kind_of(layer.kind).is_lookup)
    slices = prod(axis.size for axis in axes)
    between = (Step(Collective.ALL_REDUCE, Axis(num_workers, 1), nbytes / slices),)
    if slices == 1:
        return between, ()
    # Scattered inside, gathered inside: what an all-reduce over one more, outermost, axis does but for its middle.
    steps = all_reduce_steps((Axis(num_workers, 1), *axes), nbytes)
    return between, tuple(step for step in steps if step.collective is not Collective.ALL_REDUCE)


def shared_steps(
    schedule: Schedule,
    graphs: Sequence[StageGraph],
    stage_of: Mapping[str, int],
    figures: Mapping[str, PricedLayer],
    workload: Workload,
) -> Iterator[tuple[int, tuple[int, int], Step]]:
    """How gradients of weights are exchanged that stages share with other stages, per step: stage, workers, and what they do."""
    for s, graph in enumerate(graphs):
        for here, there in graph.shared:
            other = stage_of[there]
            workers = (schedule.placement[0][s], schedule.placement[0][other])
            if workers[0] == workers[1]:
                continue
            nbytes = max(own_gradient_bytes(figures[name], workload) for name in (here, there))
            yield s, workers, Step(Collective.ALL_REDUCE, Axis(2, 1), nbytes)


def boundary_of(
    mesh: Meshes,
    cluster: Cluster,
    placement: Sequence[Sequence[int]],
    number: int,
    exit_layer: Layer,
    source: Layout,
    target: Layout,
    workload: Workload,
) -> Boundary:
    """What crosses from stage ``number`` to the next one: its last layer's output, from its layout to the wanted one.

    Args:
        placement: ``[pipeline][stage] -> worker``.
    """
    together = all(mesh.share_nodes(cluster, (workers[number], workers[number + 1])) for workers in placement)
    ends = [mesh.mesh_of(placement[0][stage]) for stage in (number, number + 1)]
    samples, features = edge_shape(exit_layer, workload.micro_batch)
    nbytes = workload.micro_batch * exit_layer.output_elements * workload.itemsize
    tensor = (samples, features, nbytes / (samples * features))
    inter, intra = cluster.links
    links = (inter.latency_s, inter.bandwidth), (intra.latency_s, intra.bandwidth)
    forward = _heaviest_load(ends[0], ends[1], links, together, source, target, tensor)
    backward = _heaviest_load(ends[1], ends[0], links, together, target, source, tensor)
    return Boundary(forward.seconds(links), backward.seconds(links), nbytes, forward, backward)


def least_crossing_s(
    ends: tuple[StageMesh, StageMesh], cluster: Cluster, share_nodes: bool, nbytes: np.ndarray
) -> np.ndarray:
    """No layouts let tensors of so many bytes cross in less: some rank has at least the mean to send, or to receive, over its
    links of both levels at once."""
    inter, intra = cluster.links
    latency, bandwidth = inter.latency_s, inter.bandwidth
    if share_nodes:
        latency = min(latency, intra.latency_s)
        bandwidth = intra.bandwidth + (inter.bandwidth if max(end.nodes for end in ends) > 1 else 0.0)
    return np.asarray(latency + nbytes / (min(end.num_devices for end in ends) * bandwidth))


@lru_cache(maxsize=1 << 16)
def _heaviest_load(
    sender: StageMesh,
    receiver: StageMesh,
    links: tuple[tuple[float, float], tuple[float, float]],
    share_nodes: bool,
    source: Layout,
    target: Layout,
    tensor: tuple[int, int, float],
) -> BoundaryLoad:
    """Of one micro-batch from one worker to another: what takes the longest (formula: module's docstring).

    Args:
        links: (latency, bandwidth) between and inside nodes.
        tensor: samples, features, bytes of an element.
    """
    samples, features, per_element = tensor
    if sender == receiver and source == target:
        return BoundaryLoad(share_nodes, 1, samples * features * per_element / sender.num_devices)
    loads: dict[tuple[bool, bool, int], list[float]] = {}
    for piece in crossing(canonical(source), canonical(target), (samples, features)):
        nodes = piece.source // sender.devices_per_node, piece.destination // receiver.devices_per_node
        inside = share_nodes and nodes[0] == nodes[1]
        for end in ((inside, False, piece.source), (inside, True, piece.destination)):
            load = loads.setdefault(end, [0.0, 0.0])
            load[0] += 1
            load[1] += piece.num_elements * per_element
    every = (BoundaryLoad(inside, messages, sent) for (inside, _, _), (messages, sent) in loads.items())
    return max(every, key=lambda load: load.seconds(links))
