"""The layer DAG with what a plan says of it: one flat table of attributes for each layer and each edge, for any graph format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.pricing import edge_steps

from ..planfile import Plan, assessment_of

if TYPE_CHECKING:
    import networkx

__all__ = ["Value", "annotated_graph", "stage_of_layers"]

Value = Union[str, int, float, bool]


@dataclass(frozen=True)
class _Placed:
    """A layer's price, the stage that it is in, and the devices that its strategy is for."""

    assessed: LayerAssessment
    stage: int
    cluster: Cluster


def stage_of_layers(plan: Plan) -> dict[str, int]:
    """The stage of every layer; 0 of a plan without a pipeline."""
    if plan.pipeline is None:
        return {layer.name: 0 for layer in plan.graph.layers}
    return {layer.name: number for number, stage in enumerate(plan.pipeline.stages) for layer in stage.graph.layers}


def annotated_graph(plan: Plan) -> networkx.DiGraph:
    """The plan's layer graph as networkx knows it, with attributes of plain types.

    ====================  ==========================================================================================================
    of                    attributes
    ====================  ==========================================================================================================
    the graph             name, sample, batch, micro_batch, num_micro_batches, num_ranks, num_stages, step_s, compute_s,
                          communication_s, sent_bytes, memory_bytes, graph_hash, cluster_hash
    a node                kind, role, block, block_index, stage, strategy, sbp_input, sbp_weight, sbp_output, parameters, flops,
                          compute_s, communication_s, sent_bytes, memory_bytes
    an edge               elements (per sample), bytes (of a micro-batch, all devices), from_layout, to_layout, crosses (whether
                          it leads to another stage), communication_s (both ways); inside a stage steps and sent_bytes too
    ====================  ==========================================================================================================

    Times are seconds of a training step, bytes those of one device in it, where not said otherwise; a redistribution counts at
    its edge and at the layer that consumes the tensor.  Of a tensor that goes to several layers of the next stage each edge bears
    the price of the boundary, which it crosses once.
    """
    import networkx as nx

    placed = _placed(plan)
    document, workload = plan.document, plan.workload
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
        **{name: float(document[name]) for name in figures},
    )
    for layer in plan.graph.layers:
        graph.add_node(layer.name, **_node(layer, placed[layer.name]))
    for source, target in plan.graph.edges:
        graph.add_edge(source, target, **_edge(plan, source, target, placed))
    return graph


def _placed(plan: Plan) -> dict[str, _Placed]:
    if plan.pipeline is None:
        return {found.layer.name: _Placed(found, 0, plan.cluster) for found in assessment_of(plan).layers}
    mesh_of = plan.pipeline.configuration.mesh_of
    return {
        found.layer.name: _Placed(found, number, mesh_of(number).devices(plan.cluster))
        for number, stage in enumerate(plan.pipeline.stages)
        for found in stage.assessment.layers
    }


def _node(layer: Layer, placed: _Placed) -> dict[str, Value]:
    found = placed.assessed
    layouts = found.strategy.sbp(layer)
    return {
        "kind": layer.kind,
        "role": layer.role,
        "block": layer.block,
        "block_index": layer.block_index,
        "stage": placed.stage,
        "strategy": str(found.strategy),
        **{f"sbp_{name}": str(layout) if layout is not None else "" for name, layout in layouts.items()},
        "parameters": layer.num_parameters,
        "flops": float(layer.flops),
        "compute_s": float(found.compute_s),
        "communication_s": float(found.communication_s),
        "sent_bytes": float(found.sent_bytes),
        "memory_bytes": float(found.work.state_bytes + found.work.kept_bytes),
    }


def _edge(plan: Plan, source: str, target: str, placed: Mapping[str, _Placed]) -> dict[str, Value]:
    producer, workload, num = plan.graph[source], plan.workload, plan.workload.num_micro_batches
    sender, receiver = placed[source], placed[target]
    attributes: dict[str, Value] = {
        "elements": producer.output_elements,
        "bytes": float(workload.micro_batch * producer.output_elements * workload.itemsize),
        "from_layout": str(sender.assessed.strategy.activations),
        "to_layout": str(receiver.assessed.strategy.activations),
        "crosses": sender.stage != receiver.stage,
    }
    if sender.stage != receiver.stage:
        assert plan.pipeline is not None
        boundaries = plan.pipeline.boundaries[sender.stage : receiver.stage]
        seconds = sum(boundary.forward_s + boundary.backward_s for boundary in boundaries)
        return {**attributes, "communication_s": num * float(seconds)}
    mine, theirs = sender.assessed.strategy, receiver.assessed.strategy
    steps = edge_steps(producer, mine, theirs, workload, workload.micro_batch)
    seconds = sum(receiver.cluster.time(step) + receiver.cluster.time(step.adjoint()) for step in steps)
    return {
        **attributes,
        "steps": "; ".join(map(str, steps)),
        "communication_s": num * float(seconds),
        "sent_bytes": 2.0 * num * sum(step.sent_bytes for step in steps),
    }
