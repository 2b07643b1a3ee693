"""The layer DAG with what a plan says of it: one flat table of attributes for each layer and each edge, for any graph format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.pricing import edge_steps

if TYPE_CHECKING:
    import networkx

    from ..planfile import PlanFile

__all__ = ["Value", "annotated_graph"]

Value = Union[str, int, float, bool]


@dataclass(frozen=True)
class _PlacedLayer:
    """A layer's price, the stage that it is in, and the devices that its strategy is for."""

    assessed: LayerAssessment
    stage: int
    cluster: Cluster


def annotated_graph(plan: PlanFile) -> networkx.DiGraph:
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

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> graph = annotated_graph(plan)
    >>> graph.nodes["fc1"]["strategy"], graph.edges["fc1", "fc2"]["crosses"]
    ('(1,8,1)', False)
    """
    import networkx as nx

    placed = _placed(plan)
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


def _placed(plan: PlanFile) -> dict[str, _PlacedLayer]:
    """Every layer by name."""
    mesh_of = plan.evaluation.configuration.mesh_of
    return {
        found.layer.name: _PlacedLayer(found, number, mesh_of(number).devices(plan.cluster))
        for number, stage in enumerate(plan.evaluation.stages)
        for found in stage.assessment.layers
    }


def _node(layer: Layer, placed: _PlacedLayer) -> dict[str, Value]:
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
        "memory_bytes": float(found.memory_bytes),
    }


def _edge(plan: PlanFile, source: str, target: str, placed: Mapping[str, _PlacedLayer]) -> dict[str, Value]:
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
        boundaries = plan.evaluation.boundaries[sender.stage : receiver.stage]
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
