"""What a configuration costs: time by simulation of its schedule, memory by what the schedule keeps alive.

**Times.**  A stage's forward and backward (compute and communication inside it, one after the other) and its gradients' all-reduce
come from the same assessment that plans without a pipeline are priced by, of the stage's graph on one worker's devices.  Gradients
that several workers hold (both directions of bidirectional schemes, shared embeddings) are reduced over them too: scattered inside
each, all-reduced between them, gathered.  What crosses from stage to stage is priced by the messages that bring the tensor from the
sender's layout to the layout that the receiver wants (:mod:`autoddl.costmodel.crossing`):

    transfer = alpha * most messages at one rank + most bytes that one rank sends or receives * beta     (slower of both levels)

A step is the makespan of a synchronous schedule, and N micro-batches of the steady state of an asynchronous one.

**Memory** of a device of worker w, with K(s) the most micro-batches of stage s that are in flight there:

    sum over its stages of [ state(s) + (versions(s) - 1) weights(s) + K(s) kept(s) ]  +  largest buffer
    with recomputation of the stage: K(s) input(s) + kept(s) instead of K(s) kept(s)

Where a worker holds several stages their own peaks are added up, which is never less than their common one.

**Where the time goes**, of the busiest worker: step = compute + communication inside its stages + bubble + exposed communication,
where exposed are the differences that transfers, and all-reduces, make to the simulated step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Protocol

from autoddl.costmodel.assessment import Assessment, LayerAssessment, assess
from autoddl.costmodel.cluster import Cluster, Link
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.crossing import crossing
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.layerwork import LayerWork, all_reduce_steps
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.memory import weight_versions
from autoddl.pipelines.planners.inflight import in_flight
from autoddl.pipelines.schedule import Schedule
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.timeline import Timeline, steady_state
from autoddl.pipelines.times import Times

from .configuration import Configuration, PipelineSchedule, StageChoice
from .cutting import ENTRY, Chain, StageGraph
from .meshes import StageMesh

__all__ = [
    "Boundary",
    "Evaluation",
    "PricedLayer",
    "StageFigures",
    "boundary_of",
    "evaluate",
    "own_gradient_bytes",
    "replicated_all_reduce_s",
    "shared_seconds",
    "stage_workload",
    "step_of",
]


@dataclass(frozen=True)
class StageFigures:
    """One stage on one worker, per micro-batch where not said otherwise (seconds and bytes of each device).

    Attributes:
        graph: its layers.
        assessment: of its layers, the entry left out.
        forward_s, backward_s: compute and communication inside the stage.
        recompute_s: of the forward pass that is run again (recomputation of the stage).
        all_reduce_s: of its gradients over all its replicas, per step.
        state_bytes, weight_bytes: of parameters, gradients and optimizer; of the parameters alone.
        kept_bytes, input_bytes: from the forward to the backward pass; of the tensor that enters.
        buffer_bytes: what exists only while a layer runs.
    """

    graph: StageGraph
    assessment: Assessment
    forward_s: float
    backward_s: float
    backward_input_s: float
    recompute_s: float
    all_reduce_s: float
    state_bytes: float
    weight_bytes: float
    kept_bytes: float
    input_bytes: float
    buffer_bytes: float

    @property
    def compute_s(self) -> float:
        """Of one micro-batch, its recomputation included."""
        work = [layer.work for layer in self.assessment.layers]
        again = sum(one.forward_s for one in work) if self.recompute_s else 0.0
        return sum(one.forward_s + one.backward_s for one in work) + again

    @property
    def busy_s(self) -> float:
        """Of one micro-batch: compute and communication inside the stage."""
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def communication_s(self) -> float:
        """Inside the stage, of one micro-batch."""
        return max(0.0, self.busy_s - self.compute_s)


@dataclass(frozen=True)
class Boundary:
    """What one micro-batch takes from a stage to the next one, and its gradient back; and its bytes."""

    forward_s: float
    backward_s: float
    nbytes: float


@dataclass(frozen=True)
class Evaluation:
    """The figures of a configuration."""

    configuration: Configuration
    cluster: Cluster
    stages: tuple[StageFigures, ...]
    boundaries: tuple[Boundary, ...]
    schedule: Schedule
    times: Times
    memory: tuple[float, ...]
    """Bytes of a device of every worker."""
    in_flight: tuple[tuple[float, ...], ...]
    """Per stage the most micro-batches of it in flight on each of its workers."""

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.times)

    @cached_property
    def step_s(self) -> float:
        """Seconds per batch."""
        return step_of(self.configuration.schedule, self.timeline)

    @property
    def memory_bytes(self) -> float:
        """Of the fullest device."""
        return max(self.memory)

    @cached_property
    def busiest(self) -> int:
        """The worker that computes and communicates inside its stages the longest."""
        return max(range(self.schedule.num_workers), key=lambda worker: (self._busy_s(worker), -worker))

    def micro_batches_of(self, worker: int, stage: int, pipeline: int) -> float:
        """How many micro-batches of a step a worker puts through one of its stages."""
        schedule, total = self.schedule, self.configuration.schedule.num_micro_batches
        if schedule.num_pipelines == 1:
            return total
        done = sum(
            task.part.size
            for task in schedule.workers[worker]
            if task.kind.letter in "BI" and (task.stage, task.pipeline) == (stage, pipeline)
        )
        return done

    def _sum(self, worker: int, values: Sequence[float]) -> float:
        return sum(
            self.micro_batches_of(worker, stage, pipeline) * values[stage]
            for pipeline, stage in self.schedule.stages_on(worker)
        )

    def _busy_s(self, worker: int) -> float:
        return self._sum(worker, [stage.busy_s for stage in self.stages])

    @cached_property
    def compute_s(self) -> float:
        """Of the busiest worker, per step."""
        return self._sum(self.busiest, [stage.compute_s for stage in self.stages])

    @cached_property
    def inner_communication_s(self) -> float:
        """Of the busiest worker inside its stages, per step."""
        return self._beyond_rounding(self._busy_s(self.busiest) - self.compute_s)

    @cached_property
    def exposed_transfer_s(self) -> float:
        """By how much transfers between stages lengthen the step."""
        return self._beyond_rounding(self.step_s - self._without_transfers)

    @cached_property
    def exposed_all_reduce_s(self) -> float:
        """By how much gradient all-reduces lengthen it."""
        silent = replace(self._silent, all_reduce=(0.0,) * self.times.num_stages)
        return self._beyond_rounding(
            self._without_transfers - step_of(self.configuration.schedule, simulate(self.schedule, silent))
        )

    def _beyond_rounding(self, seconds: float) -> float:
        """A difference of steps; 0 where it is no more than sums of floats differ by."""
        return seconds if seconds > 1e-12 * self.step_s else 0.0

    @property
    def _silent(self) -> Times:
        nothing = (0.0,) * len(self.boundaries)
        return replace(self.times, transfer_forward=nothing, transfer_backward=nothing, transfer_latency=0.0)

    @cached_property
    def _without_transfers(self) -> float:
        if not self.boundaries:
            return self.step_s
        return step_of(self.configuration.schedule, simulate(self.schedule, self._silent))

    @property
    def exposed_communication_s(self) -> float:
        """What is not hidden behind compute, besides communication inside the stages."""
        return self.exposed_transfer_s + self.exposed_all_reduce_s

    @property
    def communication_s(self) -> float:
        """All communication that the step waits for: inside the busiest worker's stages, and exposed."""
        return self.inner_communication_s + self.exposed_communication_s

    @property
    def bubble_s(self) -> float:
        """What is left: the busiest worker idles."""
        return self._beyond_rounding(self.step_s - self._busy_s(self.busiest) - self.exposed_communication_s)

    @cached_property
    def sent_bytes(self) -> float:
        """By the device that sends the most, per step."""
        return max(self._sent_bytes(worker) for worker in range(self.schedule.num_workers))

    def _sent_bytes(self, worker: int) -> float:
        spec, mesh = self.configuration.schedule, self.configuration.mesh
        workload, total = self.configuration.workload, 0.0
        for pipeline, stage in self.schedule.stages_on(worker):
            share = self.micro_batches_of(worker, stage, pipeline) / spec.num_micro_batches
            again = 1.0 if self.stages[stage].recompute_s else 0.0
            for layer in self.stages[stage].assessment.layers:
                gradient = sum(step.sent_bytes for step in layer.work.gradient)
                forward = sum(step.sent_bytes for step in layer.forward_steps)
                total += share * (layer.sent_bytes - gradient + again * spec.num_micro_batches * forward) + gradient
                replicas = len(self.schedule.replicas_of(stage))
                if replicas > 1:
                    shard = own_gradient_bytes(layer, workload) / layer.strategy.p0
                    total += 2 * (replicas - 1) / replicas * shard
            for boundary in (stage - 1, stage):
                if 0 <= boundary < len(self.boundaries):
                    nbytes = self.boundaries[boundary].nbytes / mesh.num_devices
                    total += share * spec.num_micro_batches * nbytes
        return total

    @cached_property
    def layers(self) -> tuple[LayerAssessment, ...]:
        """Of the whole model, in the order of its graph."""
        return tuple(layer for stage in self.stages for layer in stage.assessment.layers)


def step_of(spec: PipelineSchedule, timeline: Timeline) -> float:
    """Seconds per batch of a simulated schedule."""
    if spec.synchronous:
        return timeline.makespan
    return steady_state(timeline).period * spec.num_micro_batches / timeline.schedule.update_period


def stage_workload(workload: Workload, recompute: str) -> Workload:
    """The workload that a stage is priced for."""
    return replace(workload, recompute=recompute == "layers")


def evaluate(chain: Chain, cluster: Cluster, configuration: Configuration) -> Evaluation:
    """Price, lay out and simulate a configuration.

    Raises:
        UserError: a strategy does not fit its layer, mesh or micro-batch, or the schedule cannot be generated.
    """
    mesh, workload = configuration.mesh, configuration.workload
    devices = mesh.devices(cluster)
    choices = configuration.stages
    graphs = [chain.stage(*bounds) for bounds in configuration.bounds]
    assessed = [_assess(graph, devices, workload, choice) for graph, choice in zip(graphs, choices)]
    recomputing = tuple(choice.recompute == "stage" for choice in choices)
    schedule = configuration.schedule.schedule(mesh.num_devices, recomputing)
    boundaries = tuple(
        boundary_of(
            mesh, cluster, schedule, b, graph.exit, here.strategies[graph.exit.name], there.strategies[ENTRY], workload
        )
        for b, (graph, here, there) in enumerate(zip(graphs, choices, choices[1:]))
    )
    names = {layer.layer.name: layer for one in assessed for layer in one.layers}
    stage_of = {layer.name: s for s, graph in enumerate(graphs) for layer in graph.layers}
    shared = shared_seconds(mesh, cluster, schedule, graphs, stage_of, names, workload)
    stages = tuple(
        _figures(mesh, cluster, schedule, s, graph, assessment, choices[s], workload, shared.get(s, 0.0))
        for s, (graph, assessment) in enumerate(zip(graphs, assessed))
    )
    times = times_of(stages, boundaries)
    flights = in_flight(schedule)
    memory = memory_of(schedule, stages, recomputing, flights)
    by_stage = tuple(
        tuple(flights[replica.worker][replica.pipeline, s] for replica in schedule.replicas_of(s))
        for s in range(schedule.num_stages)
    )
    return Evaluation(configuration, cluster, stages, boundaries, schedule, times, memory, by_stage)


def _assess(graph: StageGraph, devices: Cluster, workload: Workload, choice: StageChoice) -> Assessment:
    whole = assess(graph.graph, devices, stage_workload(workload, choice.recompute), choice.strategies)
    return Assessment(whole.layers[1:]) if graph.has_entry else whole


def times_of(stages: Sequence[StageFigures], boundaries: Sequence[Boundary]) -> Times:
    """What the simulator needs to know."""
    return Times.of(
        len(stages),
        forward=[stage.forward_s for stage in stages],
        backward=[stage.backward_s for stage in stages],
        backward_input=[stage.backward_input_s for stage in stages],
        recompute=[stage.recompute_s for stage in stages],
        all_reduce=[stage.all_reduce_s for stage in stages],
        transfer=[boundary.forward_s for boundary in boundaries],
        transfer_backward=[boundary.backward_s for boundary in boundaries],
    )


def _figures(
    mesh: StageMesh,
    cluster: Cluster,
    schedule: Schedule,
    number: int,
    graph: StageGraph,
    assessment: Assessment,
    choice: StageChoice,
    workload: Workload,
    shared_s: float,
) -> StageFigures:
    layers = assessment.layers
    forward_compute = sum(layer.work.forward_s for layer in layers)
    backward_compute = sum(layer.work.backward_s for layer in layers)
    forward = forward_compute + sum(layer.forward_communication_s for layer in layers)
    backward = backward_compute + sum(layer.backward_communication_s for layer in layers)
    # The weight part of a backward pass is one of its two products: half of what it computes for the first time.
    again = forward_compute if choice.recompute == "layers" else 0.0
    weight_part = max(0.0, backward_compute - again) / 2
    state = sum(layer.work.state_bytes for layer in layers)
    entry = graph.entry
    arriving = 0.0 if entry is None else workload.micro_batch * entry.output_elements * workload.itemsize
    return StageFigures(
        graph=graph,
        assessment=assessment,
        forward_s=forward,
        backward_s=backward,
        backward_input_s=backward - weight_part,
        recompute_s=forward if choice.recompute == "stage" else 0.0,
        all_reduce_s=_all_reduce_seconds(mesh, cluster, schedule, number, layers, workload) + shared_s,
        state_bytes=state,
        weight_bytes=state * workload.itemsize / workload.bytes_per_parameter,
        kept_bytes=sum(layer.work.kept_bytes for layer in layers),
        input_bytes=arriving / mesh.num_devices,
        buffer_bytes=max(layer.work.buffer_bytes for layer in layers),
    )


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


def _all_reduce_seconds(
    mesh: StageMesh,
    cluster: Cluster,
    schedule: Schedule,
    stage: int,
    layers: Sequence[LayerAssessment],
    workload: Workload,
) -> float:
    """Over the samples' slices inside each worker, and over the workers that hold the stage."""
    workers = tuple(replica.worker for replica in schedule.replicas_of(stage))
    if len(workers) == 1:
        return sum(layer.gradient_communication_s for layer in layers)
    link = mesh.link_between(cluster, workers)
    devices = mesh.devices(cluster)
    return sum(
        replicated_all_reduce_s(layer, len(workers), link, devices, own_gradient_bytes(layer, workload))
        for layer in layers
    )


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
    mesh: StageMesh,
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
    mesh: StageMesh,
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
    samples, features = edge_shape(exit_layer, workload.micro_batch)
    nbytes = workload.micro_batch * exit_layer.output_elements * workload.itemsize
    per_element = nbytes / (samples * features)
    shape = (samples, features)
    return Boundary(
        _crossing_seconds(mesh, cluster, together, source, target, shape, per_element),
        _crossing_seconds(mesh, cluster, together, target, source, shape, per_element),
        nbytes,
    )


def _crossing_seconds(
    mesh: StageMesh,
    cluster: Cluster,
    share_nodes: bool,
    source: Strategy,
    target: Strategy,
    shape: tuple[int, int],
    per_element: float,
) -> float:
    """Of one micro-batch between two workers (formula: module's docstring)."""
    inter, intra = cluster.links
    if source.rows_and_features == target.rows_and_features:
        link = intra if share_nodes else inter
        return link.latency_s + shape[0] * shape[1] * per_element / mesh.num_devices / link.bandwidth
    loads: dict[tuple[bool, bool, int], list[float]] = {}
    for piece in crossing(source.activations, target.activations, shape):
        node, other = piece.source // mesh.devices_per_node, piece.destination // mesh.devices_per_node
        inside = share_nodes and node == other
        for end in ((inside, False, piece.source), (inside, True, piece.destination)):
            load = loads.setdefault(end, [0.0, 0.0])
            load[0] += 1
            load[1] += piece.num_elements * per_element
    return max(
        (intra if inside else inter).latency_s * messages + sent / (intra if inside else inter).bandwidth
        for (inside, _, _), (messages, sent) in loads.items()
    )


def memory_of(
    schedule: Schedule,
    stages: Sequence[StageFigures],
    recomputing: Sequence[bool],
    flights: Sequence[dict[tuple[int, int], float]],
) -> tuple[float, ...]:
    """Bytes of a device of every worker (formula: module's docstring)."""
    versions = {} if schedule.is_synchronous else weight_versions(schedule)
    found = []
    for worker in range(schedule.num_workers):
        resident = buffer = 0.0
        for pipeline, stage in schedule.stages_on(worker):
            figures, count = stages[stage], flights[worker][pipeline, stage]
            resident += figures.state_bytes + (versions.get((pipeline, stage), 1) - 1) * figures.weight_bytes
            if recomputing[stage]:
                resident += count * figures.input_bytes + figures.kept_bytes
            else:
                resident += count * figures.kept_bytes
            buffer = max(buffer, figures.buffer_bytes)
        found.append(resident + buffer)
    return tuple(found)
