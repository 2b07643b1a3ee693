"""Time and memory of a plan, computed from the layer graph in one pass over layers and edges, without a cost table.

Every figure of a plan comes from here.  The verifier (:mod:`autoddl.search.verify`) compares the results of searches with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from .cluster import Cluster
from .collectives import Step
from .errors import UserError
from .graph import Layer, LayerGraph
from .kinds.registry import kind_of
from .layerwork import LayerWork, layer_work, repeats_redistributions
from .overlap import exposed_s
from .pricing import edge_steps
from .strategy import Strategy, transposed
from .workload import Workload

__all__ = ["Assessment", "LayerAssessment", "assess"]


@dataclass(frozen=True)
class LayerAssessment:
    """Cost of one layer of a plan.  The redistribution of a tensor counts at the layer that consumes it.

    Attributes:
        layer, strategy: the layer and its strategy.
        work: steps, computation and memory of the layer for one micro-batch.
        arriving: forward steps that redistribute its inputs, for one micro-batch; the backward pass mirrors them.
        repeated: the same steps if recomputation of a block repeats them in the backward pass, else none.
        forward_compute_s, backward_compute_s: seconds of local work per micro-batch.
        forward_communication_s, backward_communication_s: seconds per micro-batch.
        gradient_communication_s: seconds per training step.
        update_s: seconds of the optimizer step, per training step.
        communication_s, compute_s: seconds per training step.
        sent_bytes: bytes that each device sends per training step.
    """

    layer: Layer
    strategy: Strategy
    work: LayerWork
    arriving: tuple[Step, ...]
    repeated: tuple[Step, ...]
    forward_compute_s: float
    backward_compute_s: float
    forward_communication_s: float
    backward_communication_s: float
    gradient_communication_s: float
    update_s: float
    communication_s: float
    compute_s: float
    sent_bytes: float

    @property
    def memory_bytes(self) -> float:
        """State, and the activations of one micro-batch and of one recomputed block, on each device."""
        return self.work.state_bytes + self.work.kept_bytes + self.work.recomputed_bytes

    @property
    def forward_steps(self) -> tuple[Step, ...]:
        """All communication of one micro-batch's forward pass."""
        return (*self.arriving, *self.work.forward)

    @property
    def backward_steps(self) -> tuple[Step, ...]:
        """All communication of one micro-batch's backward pass."""
        return (*self.repeated, *self.work.backward, *(step.adjoint() for step in reversed(self.arriving)))


@dataclass(frozen=True)
class Assessment:
    """Cost of a plan, per layer and per training step.

    Attributes:
        layers: the cost of each layer, in the order of the graph.
        overlap: which communication runs beside computation (:mod:`.overlap`).
    """

    layers: tuple[LayerAssessment, ...]
    overlap: str = "none"

    @cached_property
    def communication_s(self) -> float:
        """Seconds of communication per training step that do not run beside computation."""
        total = sum(layer.communication_s for layer in self.layers)
        if self.overlap == "none":
            return total
        all_reduce = sum(layer.gradient_communication_s for layer in self.layers)
        backward = sum(layer.backward_compute_s + layer.backward_communication_s for layer in self.layers)
        return total - all_reduce + exposed_s(all_reduce, backward, self.overlap)

    @cached_property
    def compute_s(self) -> float:
        """Seconds of computation per training step."""
        return sum(layer.compute_s for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Seconds per training step."""
        return self.communication_s + self.compute_s

    def cost(self, objective: str) -> float:
        """Seconds per training step that a search minimises under ``objective`` (``step`` or ``communication``)."""
        return self.communication_s if objective == "communication" else self.step_s

    @cached_property
    def sent_bytes(self) -> float:
        """Bytes that each device sends per training step."""
        return sum(layer.sent_bytes for layer in self.layers)

    @cached_property
    def memory_bytes(self) -> float:
        """Peak bytes on each device: what stays, and the largest buffer."""
        resident = sum(layer.memory_bytes for layer in self.layers)
        return resident + max(layer.work.buffer_bytes for layer in self.layers)


def assess(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    strategies: Mapping[str, Strategy],
    known: dict[object, LayerAssessment] | None = None,
) -> Assessment:
    """Compute the cost of a plan.

    Args:
        graph, cluster, workload: what the plan is for.
        strategies: the strategy of every layer, by name.
        known: keeps the costs of layers for other graphs on the same cluster with the same workload, since equal layers at equal
            places have equal costs; None: for this graph alone.

    Raises:
        UserError: a layer has no strategy, or its strategy does not fit the layer's shape, the cluster or the micro-batch.
    """
    assessed = []
    known = {} if known is None else known
    for layer in graph.layers:
        strategy = strategies.get(layer.name)
        if strategy is None:
            raise UserError(f"layer {layer.name!r} has no strategy")
        place = graph.place(layer.name, workload.recompute)
        sources = tuple((graph[name].signature(), strategies.get(name)) for name in graph.inputs(layer.name))
        key = (layer.signature(), place, strategy, sources)
        is_tied = any(parameter.tied_to is not None for parameter in layer.parameters)
        if key not in known or is_tied:  # a shared weight has to fit the strategy of its partner, too
            _check(graph, layer, cluster, workload, strategies)
        if key in known:
            assessed.append(replace(known[key], layer=layer))
            continue
        work = layer_work(layer, strategy, workload, workload.micro_batch, place)
        arriving = tuple(
            step
            for producer in graph.inputs(layer.name)
            for step in edge_steps(graph[producer], strategies[producer], strategy, workload, workload.micro_batch)
        )
        repeated = arriving if repeats_redistributions(workload, place) else ()
        known[key] = _assess_layer(layer, strategy, work, (arriving, repeated), cluster, workload)
        assessed.append(known[key])
    return Assessment(tuple(assessed), workload.overlap)


def _assess_layer(
    layer: Layer,
    strategy: Strategy,
    work: LayerWork,
    redistributions: tuple[tuple[Step, ...], tuple[Step, ...]],
    cluster: Cluster,
    workload: Workload,
) -> LayerAssessment:
    works = work.forward_work, work.backward_work, work.update_work
    forward_s, backward_s, update_s = (cluster.local_time(local, workload.precision) for local in works)
    arriving, repeated = redistributions
    backward_steps = (*repeated, *work.backward, *(step.adjoint() for step in arriving))
    exposed = cluster.exposed_part(work)
    forward = sum(cluster.time(step) for step in arriving) + exposed * sum(cluster.time(step) for step in work.forward)
    moving = sum(cluster.time(step) for step in (*repeated, *(step.adjoint() for step in arriving)))
    backward = moving + exposed * sum(cluster.time(step) for step in work.backward)
    gradient = sum(cluster.time(step) for step in work.gradient)
    num = workload.num_micro_batches
    per_micro_batch = sum(s.sent_bytes for s in (*arriving, *work.forward, *backward_steps))
    return LayerAssessment(
        layer=layer,
        strategy=strategy,
        work=work,
        arriving=arriving,
        repeated=repeated,
        forward_compute_s=forward_s,
        backward_compute_s=backward_s,
        forward_communication_s=forward,
        backward_communication_s=backward,
        gradient_communication_s=gradient,
        update_s=update_s,
        communication_s=num * (forward + backward) + gradient,
        compute_s=num * (forward_s + backward_s) + update_s,
        sent_bytes=num * per_micro_batch + sum(step.sent_bytes for step in work.gradient),
    )


def _check(
    graph: LayerGraph, layer: Layer, cluster: Cluster, workload: Workload, strategies: Mapping[str, Strategy]
) -> None:
    strategy = strategies[layer.name]
    sizes = tuple(p0 * p1 * p2 for p0, p1, p2 in strategy.splits)
    if sizes != cluster.level_sizes:
        raise UserError(
            f"{layer.describe()}: {strategy} is for {sizes} devices per level, the cluster has {cluster.level_sizes}"
        )
    if not strategy.fits(layer, workload.micro_batch):
        raise UserError(f"{layer.describe()}: {strategy} does not divide a micro-batch of {workload.micro_batch}")
    if not strategy.divides(layer):
        raise UserError(f"{layer.describe()}: {strategy} does not divide its shape")
    if strategy.columns and layer.name in graph.at_boundaries:
        raise UserError(
            f"{layer.describe()}: {strategy} has tiles of images, which cross to another stage as rows of pixels"
        )
    for parameter in layer.parameters:
        if parameter.tied_to is not None:
            partner = fitting = strategies.get(parameter.tied_to)
            # The table of an embedding is the transposed matrix of a linear layer.
            if (
                partner is not None
                and kind_of(graph[parameter.tied_to].kind).is_lookup != kind_of(layer.kind).is_lookup
            ):
                fitting = transposed(partner)
            if strategy != fitting:
                raise UserError(
                    f"{layer.describe()}: {strategy} does not fit {partner} of {parameter.tied_to}, whose weight it shares"
                )
