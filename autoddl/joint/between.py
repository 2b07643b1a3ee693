"""What passes between the workers of a pipeline: tensors from stage to stage, and sums of gradients that several hold.

What crosses from stage to stage is priced by the messages that bring the tensor from the sender's layout to the layout that the
receiver wants (:mod:`autoddl.costmodel.crossing`), whether both have as many devices or not:

    transfer = alpha * most messages at one rank + most bytes that one rank sends or receives * beta     (slower of both levels)

Gradients that several workers hold (both directions of bidirectional schemes, shared embeddings) are reduced over them too:
scattered inside each, all-reduced between them, gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from autoddl.costmodel.cluster import Cluster, Link
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.crossing import crossing
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.layerwork import LayerWork, all_reduce_steps
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.schedule import Schedule

from .cutting import StageGraph
from .meshes import Meshes, StageMesh

__all__ = ["Boundary", "PricedLayer", "boundary_of", "own_gradient_bytes", "replicated_all_reduce_s", "shared_seconds"]


@dataclass(frozen=True)
class Boundary:
    """What one micro-batch takes from a stage to the next one, and its gradient back; and its bytes."""

    forward_s: float
    backward_s: float
    nbytes: float


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


def replicated_all_reduce_s(layer: PricedLayer, num_workers: int, link: Link, devices: Cluster, nbytes: float) -> float:
    """All-reduce of ``nbytes`` of gradients per device over a layer's slices of the samples and over workers joined by ``link``."""
    if not nbytes:
        return 0.0
    axes = () if layer.strategy.summa else layer.strategy.axes(0, layer.layer.kind == "embedding")
    slices = prod(axis.size for axis in axes)
    between = link.time(Step(Collective.ALL_REDUCE, Axis(num_workers, 1), nbytes / slices))
    if slices == 1:
        return between
    # Scattered inside, gathered inside: what an all-reduce over one more, outermost, axis does but for its middle.
    steps = all_reduce_steps((Axis(num_workers, 1), *axes), nbytes)
    return between + sum(devices.time(step) for step in steps if step.collective is not Collective.ALL_REDUCE)


def shared_seconds(
    mesh: Meshes,
    cluster: Cluster,
    schedule: Schedule,
    graphs: Sequence[StageGraph],
    stage_of: Mapping[str, int],
    figures: Mapping[str, PricedLayer],
    workload: Workload,
) -> dict[int, float]:
    """Per stage the seconds of exchanging gradients of weights that it shares with other stages, per step."""
    seconds: dict[int, float] = {}
    for s, graph in enumerate(graphs):
        for here, there in graph.shared:
            other = stage_of[there]
            workers = (schedule.placement[0][s], schedule.placement[0][other])
            if workers[0] == workers[1]:
                continue
            nbytes = max(own_gradient_bytes(figures[name], workload) for name in (here, there))
            link = mesh.link_between(cluster, workers)
            step = Step(Collective.ALL_REDUCE, Axis(2, 1), nbytes)
            seconds[s] = seconds.get(s, 0.0) + link.time(step)
    return seconds


def boundary_of(
    mesh: Meshes,
    cluster: Cluster,
    schedule: Schedule,
    number: int,
    exit_layer: Layer,
    source: Strategy,
    target: Strategy,
    workload: Workload,
) -> Boundary:
    """What crosses from stage ``number`` to the next one: its last layer's output, from its layout to the wanted one."""
    together = all(mesh.share_nodes(cluster, (workers[number], workers[number + 1])) for workers in schedule.placement)
    ends = [mesh.mesh_of(schedule.placement[0][stage]) for stage in (number, number + 1)]
    samples, features = edge_shape(exit_layer, workload.micro_batch)
    nbytes = workload.micro_batch * exit_layer.output_elements * workload.itemsize
    per_element = nbytes / (samples * features)
    shape = (samples, features)
    there, back = (source, target), (target, source)
    return Boundary(
        _crossing_seconds(ends, cluster, together, there, shape, per_element),
        _crossing_seconds(ends[::-1], cluster, together, back, shape, per_element),
        nbytes,
    )


def _crossing_seconds(
    meshes: Sequence[StageMesh],
    cluster: Cluster,
    share_nodes: bool,
    strategies: tuple[Strategy, Strategy],
    shape: tuple[int, int],
    per_element: float,
) -> float:
    """Of one micro-batch from one worker to another (formula: module's docstring)."""
    inter, intra = cluster.links
    (sender, receiver), (source, target) = meshes, strategies
    if sender == receiver and source.rows_and_features == target.rows_and_features:
        link = intra if share_nodes else inter
        return link.latency_s + shape[0] * shape[1] * per_element / sender.num_devices / link.bandwidth
    loads: dict[tuple[bool, bool, int], list[float]] = {}
    for piece in crossing(source.activations, target.activations, shape):
        nodes = piece.source // sender.devices_per_node, piece.destination // receiver.devices_per_node
        inside = share_nodes and nodes[0] == nodes[1]
        for end in ((inside, False, piece.source), (inside, True, piece.destination)):
            load = loads.setdefault(end, [0.0, 0.0])
            load[0] += 1
            load[1] += piece.num_elements * per_element
    return max(
        (intra if inside else inter).latency_s * messages + sent / (intra if inside else inter).bandwidth
        for (inside, _, _), (messages, sent) in loads.items()
    )
