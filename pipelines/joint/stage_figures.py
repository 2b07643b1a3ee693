"""The time and memory of one stage of a configuration, on one worker.

The forward pass, backward pass and gradient all-reduce of a stage are assessed on the stage's graph and one worker's devices, by
the same function that prices plans without a pipeline.  Compute and communication inside a stage do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.assessment import Assessment, LayerAssessment, assess
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.overlap import exposed_s
from autoddl.costmodel.workload import Workload

from ..schedule import Schedule
from .boundary import divided_steps, replicated_all_reduce_s
from .configuration import Configuration, recomputed_inside
from .meshes import Meshes
from .partition import Chain, StageGraph

__all__ = ["StageFigures", "all_reduce_s_of", "assessments_of", "figures_of", "workload_of_stage"]


@dataclass(frozen=True)
class StageFigures:
    """The time and memory of one stage on one worker.  Seconds are per micro-batch unless stated otherwise; bytes are per device.

    Attributes:
        graph: Layers of the stage.
        assessment: Times and memory of the layers, without the entry.
        forward_s: Compute and communication inside the stage in the forward pass.
        backward_s: Compute and communication inside the stage in all ``backward_passes`` together.
        backward_input_s: The part of ``backward_s`` after which the gradient of the stage's input is available: the input part of a
            split backward pass, else all of it.
        backward_passes: Number of autograd passes per micro-batch (see :class:`.configuration.PipelineSchedule`).
        recompute_s: Time of the second forward pass; 0 unless the whole stage is recomputed.
        all_reduce_s: Time of the gradient all-reduce over all replicas of the stage, per step.
        exposed_all_reduce_s: The part of it that comes after the last backward pass.
        update_s: Time of the optimizer step, per step.
        state_bytes: Parameters, gradients and optimizer states.
        weight_bytes: Parameters alone.
        kept_bytes: Activations of one micro-batch that are kept from the forward to the backward pass.
        recomputed_bytes: Activations of the block that is recomputed.
        input_bytes: Input of the stage for one micro-batch.
        buffer_bytes: Largest temporary buffer of a layer.
    """

    graph: StageGraph
    assessment: Assessment
    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_passes: int
    recompute_s: float
    all_reduce_s: float
    exposed_all_reduce_s: float
    update_s: float
    state_bytes: float
    weight_bytes: float
    kept_bytes: float
    recomputed_bytes: float
    input_bytes: float
    buffer_bytes: float

    @property
    def compute_s(self) -> float:
        """Compute seconds of one micro-batch, including recomputation."""
        return sum(
            self.forward_passes * layer.forward_compute_s + self.backward_passes * layer.backward_compute_s
            for layer in self.assessment.layers
        )

    @property
    def busy_s(self) -> float:
        """Seconds of compute and communication inside the stage for one micro-batch, including recomputation."""
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def forward_passes(self) -> int:
        """Number of forward passes of one micro-batch, including recomputation."""
        return 2 if self.recompute_s else 1

    @property
    def communication_s(self) -> float:
        """Communication seconds inside the stage for one micro-batch, including recomputation."""
        return sum(
            self.forward_passes * layer.forward_communication_s + self.backward_passes * layer.backward_communication_s
            for layer in self.assessment.layers
        )


def workload_of_stage(workload: Workload, recompute: str) -> Workload:
    """Return the workload that a stage with a way of recomputation is priced for."""
    return replace(workload, recompute=recomputed_inside(recompute))


def assessments_of(
    chain: Chain, cluster: Cluster, configuration: Configuration, graphs: Sequence[StageGraph]
) -> list[Assessment]:
    """Return the assessment of each stage's layers, without the entry.

    Args:
        chain: The model as a chain of units.
        cluster: The devices and their network.
        configuration: The plan.
        graphs: Graph of each stage.

    Raises:
        UserError: a strategy does not fit its layer, mesh or micro-batch.
    """
    known_layers: dict[object, dict[object, LayerAssessment]] = {}
    known_stages: dict[object, Assessment] = {}
    assessments = []
    for number, (graph, choice, bounds) in enumerate(zip(graphs, configuration.stages, configuration.bounds)):
        mesh, workload = configuration.mesh_of(number), workload_of_stage(configuration.workload, choice.recompute)
        layers = graph.graph.layers
        # Equal stages with equal strategies differ in the names of their layers alone.
        key = mesh, workload, chain.shape(*bounds), tuple(choice.strategies.get(layer.name) for layer in layers)
        if key in known_stages:
            renamed = (replace(one, layer=layer) for one, layer in zip(known_stages[key].layers, layers))
            assessment = replace(known_stages[key], layers=tuple(renamed))
        else:
            same = known_layers.setdefault((mesh, workload), {})
            assessment = assess(graph.graph, mesh.devices(cluster), workload, choice.strategies, same)
            known_stages[key] = assessment
        assessments.append(replace(assessment, layers=assessment.layers[1:]) if graph.has_entry else assessment)
    return assessments


def figures_of(
    configuration: Configuration, number: int, graph: StageGraph, assessment: Assessment, all_reduce_s: float
) -> StageFigures:
    """Return the figures of a stage.

    Args:
        configuration: The plan.
        number: The stage.
        graph: Its layers.
        assessment: Their times and memory, without the entry.
        all_reduce_s: Seconds per step of its gradient all-reduce (:func:`all_reduce_s_of`).
    """
    layers, workload, choice = assessment.layers, configuration.workload, configuration.stages[number]
    passes = configuration.schedule.backward_passes(number)
    forward = sum(layer.forward_compute_s + layer.forward_communication_s for layer in layers)
    backward = sum(layer.backward_compute_s + layer.backward_communication_s for layer in layers)
    state = sum(layer.work.state_bytes for layer in layers)
    parameters = sum(layer.work.parameter_bytes for layer in layers)
    entry = graph.entry
    input_bytes = 0.0 if entry is None else workload.micro_batch * entry.output_elements * workload.itemsize
    return StageFigures(
        graph=graph,
        assessment=assessment,
        forward_s=forward,
        backward_s=passes * backward,
        backward_input_s=configuration.schedule.input_passes(number) * backward,
        backward_passes=passes,
        recompute_s=forward if choice.recompute == "stage" else 0.0,
        all_reduce_s=all_reduce_s,
        exposed_all_reduce_s=exposed_s(all_reduce_s, backward, workload.overlap),
        update_s=sum(layer.update_s for layer in layers),
        state_bytes=state,
        weight_bytes=parameters,
        kept_bytes=sum(layer.work.kept_bytes for layer in layers),
        recomputed_bytes=sum(layer.work.recomputed_bytes for layer in layers),
        input_bytes=input_bytes / configuration.mesh_of(number).num_devices,
        buffer_bytes=max(layer.work.buffer_bytes for layer in layers),
    )


def all_reduce_s_of(
    mesh: Meshes,
    cluster: Cluster,
    schedule: Schedule,
    stage: int,
    layers: Sequence[LayerAssessment],
    workload: Workload,
) -> float:
    """Return the seconds per step of a stage's gradient all-reduce, inside each worker and over all workers that hold the stage."""
    workers = tuple(replica.worker for replica in schedule.replicas_of(stage))
    if len(workers) == 1:
        return sum(layer.gradient_communication_s for layer in layers)
    link, devices = mesh.link_between(cluster, workers), mesh.mesh_of(workers[0]).devices(cluster)
    return sum(
        replicated_all_reduce_s(
            layer.layer,
            layer.strategy,
            len(workers),
            link,
            devices,
            layer.work.gradient_bytes,
            divided_steps(layer.work),
        )
        for layer in layers
    )
