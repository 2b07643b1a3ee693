"""The layer graph of a plan with its strategies and prices, as attributes of nodes and edges of a networkx graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.pricing import edge_steps
from autoddl.costmodel.strategy import PRODUCT

if TYPE_CHECKING:
    import networkx

    from ..planfile import PlanFile

__all__ = ["Value", "annotated_graph"]

#: The types of attributes: those that graph file formats can store.
Value = Union[str, int, float, bool]


@dataclass(frozen=True)
class _PlacedLayer:
    """A layer in the plan.

    Attributes:
        assessed: price of the layer.
        stage: number of its stage.
        cluster: devices of the stage.
    """

    assessed: LayerAssessment
    stage: int
    cluster: Cluster


def annotated_graph(plan: PlanFile) -> networkx.DiGraph:
    """Return the layer graph of a plan, with attributes of plain types.

    ====================  ==========================================================================================================
    object                attributes
    ====================  ==========================================================================================================
    graph                 name, sample, batch, micro_batch, num_micro_batches, num_ranks, num_stages, step_s, compute_s,
                          communication_s, sent_bytes, memory_bytes, graph_hash, cluster_hash
    node                  kind, role, block, block_index, stage, strategy, sbp_input, sbp_weight, sbp_output, parameters, flops,
                          compute_s, communication_s, sent_bytes, memory_bytes
    edge                  elements (per sample), bytes (of a micro-batch, over all devices), from_layout, to_layout, crosses
                          (whether it leads to another stage), communication_s (forward and backward); inside a stage also steps and
                          sent_bytes
    ====================  ==========================================================================================================

    Unless noted otherwise, times are seconds per training step, and bytes are bytes of one device per training step. A
    redistribution is counted at its edge and at the layer that reads the tensor. If several layers of the next stage read a tensor,
    each of these edges has the price of the boundary, although the tensor crosses the boundary once.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> graph = annotated_graph(plan)
    >>> graph.nodes["fc1"]["strategy"], graph.edges["fc1", "fc2"]["crosses"]
    ('(1,8,1)', False)
    """
    import networkx as nx

    placed = _placed_layers(plan)
    workload = plan.workload
    figures = ("step_s", "compute_s", "communication_s", "sent_bytes", "memory_bytes")
    graph = nx.DiGraph(
        name=plan.graph.name,
        sample=plan.graph.sample,
        batch=workload.batch,
        micro_batch=workload.micro_batch,
        num_micro_batches=workload.num_micro_batches,
        num_ranks=plan.cluster.num_devices,
        num_stages=plan.num_stages,
        graph_hash=plan.graph.hash,
        cluster_hash=plan.cluster.hash,
        **{name: float(getattr(plan.evaluation, name)) for name in figures},
    )
    for layer in plan.graph.layers:
        graph.add_node(layer.name, **_node(layer, placed[layer.name]))
    for source, target in plan.graph.edges:
        graph.add_edge(source, target, **_edge(plan, source, target, placed))
    return graph


def _placed_layers(plan: PlanFile) -> dict[str, _PlacedLayer]:
    """Return all layers by name."""
    mesh_of = plan.evaluation.configuration.mesh_of
    return {
        assessed.layer.name: _PlacedLayer(assessed, number, mesh_of(number).devices(plan.cluster))
        for number, stage in enumerate(plan.evaluation.stages)
        for assessed in stage.assessment.layers
    }


def _node(layer: Layer, placed: _PlacedLayer) -> dict[str, Value]:
    """Return the attributes of a node."""
    assessed = placed.assessed
    layouts = assessed.strategy.sbp(layer)
    return {
        "kind": layer.kind,
        "role": layer.role,
        "block": layer.block,
        "block_index": layer.block_index,
        "stage": placed.stage,
        "strategy": str(assessed.strategy),
        **{
            f"sbp_{name}": str(layout) if layout is not None else ""
            for name, layout in layouts.items()
            if name in PRODUCT
        },
        "parameters": layer.num_parameters,
        "flops": float(layer.flops),
        "compute_s": float(assessed.compute_s),
        "communication_s": float(assessed.communication_s),
        "sent_bytes": float(assessed.sent_bytes),
        "memory_bytes": float(assessed.memory_bytes),
    }


def _edge(plan: PlanFile, source: str, target: str, placed: Mapping[str, _PlacedLayer]) -> dict[str, Value]:
    """Return the attributes of an edge."""
    producer, workload = plan.graph[source], plan.workload
    num_micro_batches = workload.num_micro_batches
    sender, receiver = placed[source], placed[target]
    attributes: dict[str, Value] = {
        "elements": producer.output_elements,
        "bytes": float(workload.micro_batch * producer.output_elements * workload.itemsize),
        "from_layout": str(sender.assessed.strategy.activations),
        "to_layout": str(receiver.assessed.strategy.activations),
        "crosses": sender.stage != receiver.stage,
    }
    if sender.stage != receiver.stage:
        boundaries = plan.evaluation.boundaries[sender.stage : receiver.stage]
        seconds = sum(boundary.forward_s + boundary.backward_s for boundary in boundaries)
        return {**attributes, "communication_s": num_micro_batches * float(seconds)}
    steps = edge_steps(producer, sender.assessed.strategy, receiver.assessed.strategy, workload, workload.micro_batch)
    seconds = sum(receiver.cluster.time(step) + receiver.cluster.time(step.adjoint()) for step in steps)
    return {
        **attributes,
        "steps": "; ".join(map(str, steps)),
        "communication_s": num_micro_batches * float(seconds),
        "sent_bytes": 2.0 * num_micro_batches * sum(step.sent_bytes for step in steps),
    }
