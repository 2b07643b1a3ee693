"""What a configuration costs: time by simulation of its schedule, memory by what the schedule keeps alive.

**Times.**  A stage's forward and backward (compute and communication inside it, one after the other) and its gradients' all-reduce
come from the same assessment that plans without a pipeline are priced by, of the stage's graph on one worker's devices.  Gradients
that several workers hold (both directions of bidirectional schemes, shared embeddings) are reduced over them too: scattered inside
each, all-reduced between them, gathered.  What crosses from stage to stage is priced by the messages that bring the tensor from the
sender's layout to the layout that the receiver wants (:mod:`autoddl.costmodel.crossing`):

    transfer = alpha * most messages at one rank + most bytes that one rank sends or receives * beta     (slower of both levels)

A step is the makespan of a synchronous schedule, and N micro-batches of the steady state of an asynchronous one.  Of one stage,
which waits for none, it is N (forward + backward) + all-reduce, and nothing is simulated.

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
from typing import Protocol

from autoddl.costmodel.assessment import Assessment, LayerAssessment, assess
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from ..alone import schedule_alone
from ..memory import weight_versions
from ..planners.inflight import in_flight
from ..schedule import Schedule
from ..simulator import simulate
from ..timeline import Timeline, steady_state
from ..times import Times
from .boundary import Boundary, boundary_of, own_gradient_bytes, replicated_all_reduce_s, shared_steps
from .configuration import Configuration, PipelineSchedule, StageChoice
from .meshes import Meshes, StageMesh
from .partition import ENTRY, Chain, StageGraph

__all__ = ["Evaluation", "StageFigures", "evaluate", "evaluate_unpipelined", "stage_workload", "step_of"]


@dataclass(frozen=True)
class StageFigures:
    """One stage on one worker, per micro-batch where not said otherwise (seconds and bytes of each device).

    Attributes:
        graph: its layers.
        assessment: of its layers, the entry left out.
        forward_s, backward_s: compute and communication inside the stage; back all ``backward_passes`` together.
        backward_input_s: until the gradient of the input is there: the input part of a split backward pass, or all of it.
        backward_passes: how often it is gone back through (see :class:`.configuration.PipelineSchedule`).
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
    backward_passes: int
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
        return sum(self.forward_passes * one.forward_s + self.backward_passes * one.backward_s for one in work)

    @property
    def busy_s(self) -> float:
        """Of one micro-batch: compute and communication inside the stage."""
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def forward_passes(self) -> int:
        """Of one micro-batch, its recomputation included."""
        return 2 if self.recompute_s else 1

    @property
    def communication_s(self) -> float:
        """Inside the stage, of one micro-batch."""
        return sum(
            self.forward_passes * layer.forward_communication_s + self.backward_passes * layer.backward_communication_s
            for layer in self.assessment.layers
        )


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
        """When each task runs; O(tasks)."""
        return simulate(self.schedule, self.times)

    @property
    def has_pipeline(self) -> bool:
        """Whether there is more than one stage."""
        return len(self.stages) > 1

    @cached_property
    def step_s(self) -> float:
        """Seconds per batch."""
        if self.has_pipeline:
            return step_of(self.configuration.schedule, self.timeline)
        return self._step_with(self.times)

    def _step_with(self, times: Times) -> float:
        """Seconds per batch, if its tasks took these times."""
        if self.has_pipeline:
            return step_of(self.configuration.schedule, simulate(self.schedule, times))
        (forward,), (backward,), (again,) = times.forward, times.backward, times.recompute
        return self.configuration.schedule.num_micro_batches * (forward + backward + again) + times.all_reduce[0]

    def cost(self, objective: str) -> float:
        """What a search minimises: seconds per batch, or those that are left where nothing is computed."""
        return self.step_s if objective == "step" else self._step_with(self._communication_times)

    def timeline_of(self, objective: str) -> Timeline:
        """When each task runs: as it is, or where nothing is computed."""
        return self.timeline if objective == "step" else simulate(self.schedule, self._communication_times)

    @cached_property
    def _communication_times(self) -> Times:
        """Without what is computed."""
        forward = [sum(layer.forward_communication_s for layer in stage.assessment.layers) for stage in self.stages]
        backward = [sum(layer.backward_communication_s for layer in stage.assessment.layers) for stage in self.stages]
        spec = self.configuration.schedule
        return replace(
            self.times,
            forward=tuple(forward),
            backward=tuple(spec.backward_passes(s) * one for s, one in enumerate(backward)),
            backward_input=tuple(spec.input_passes(s) * one for s, one in enumerate(backward)),
            recompute=tuple(one if stage.recompute_s else 0.0 for one, stage in zip(forward, self.stages)),
        )

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
        return self._sum(self.busiest, [stage.communication_s for stage in self.stages])

    @cached_property
    def exposed_transfer_s(self) -> float:
        """By how much transfers between stages lengthen the step."""
        return self._beyond_rounding(self.step_s - self._without_transfers)

    @cached_property
    def exposed_all_reduce_s(self) -> float:
        """By how much gradient all-reduces lengthen it."""
        if not self.has_pipeline:
            return self.times.all_reduce[0]
        silent = replace(self._silent, all_reduce=(0.0,) * self.times.num_stages)
        return self._beyond_rounding(self._without_transfers - self._step_with(silent))

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
        return self._step_with(self._silent)

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

    @property
    def bubble_ratio(self) -> float:
        """The part of a step in which a worker does not work in its stages, in the mean of all workers."""
        workers = range(self.schedule.num_workers)
        return 1 - sum(map(self._busy_s, workers)) / len(workers) / self.step_s if self.step_s else 0.0

    @cached_property
    def sent_bytes(self) -> float:
        """By the device that sends the most, per step."""
        return max(self._sent_bytes(worker) for worker in range(self.schedule.num_workers))

    def _sent_bytes(self, worker: int) -> float:
        configuration, workload = self.configuration, self.configuration.workload
        total, devices = 0.0, configuration.mesh.mesh_of(worker).num_devices
        for pipeline, stage in self.schedule.stages_on(worker):
            figures, count = self.stages[stage], self.micro_batches_of(worker, stage, pipeline)
            share, replicas = count / configuration.schedule.num_micro_batches, len(self.schedule.replicas_of(stage))
            more = count * (figures.backward_passes - 1)
            for layer in figures.assessment.layers:
                gradient = sum(step.sent_bytes for step in layer.work.gradient)
                total += share * (layer.sent_bytes - gradient) + gradient
                if figures.recompute_s:
                    total += count * sum(step.sent_bytes for step in layer.forward_steps)
                if more:
                    total += more * sum(step.sent_bytes for step in layer.backward_steps)
                if replicas > 1:
                    shard = own_gradient_bytes(layer, workload) / layer.strategy.p0
                    total += 2 * (replicas - 1) / replicas * shard
            for boundary in (stage - 1, stage):
                if 0 <= boundary < len(self.boundaries):
                    total += count * self.boundaries[boundary].nbytes / devices
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
    mesh, workload, choices = configuration.mesh, configuration.workload, configuration.stages
    graphs = [chain.stage(*bounds) for bounds in configuration.bounds]
    assessed = [
        _assess(graph, configuration.mesh_of(s).devices(cluster), workload, choice)
        for s, (graph, choice) in enumerate(zip(graphs, choices))
    ]
    recomputing = tuple(choice.recompute == "stage" for choice in choices)
    schedule = _schedule_of(configuration, recomputing)
    boundaries = tuple(
        boundary_of(
            mesh,
            cluster,
            schedule.placement,
            b,
            graph.exit,
            here.strategies[graph.exit.name].rows_and_features,
            there.strategies[ENTRY].rows_and_features,
            workload,
        )
        for b, (graph, here, there) in enumerate(zip(graphs, choices, choices[1:]))
    )
    names = {layer.layer.name: layer for one in assessed for layer in one.layers}
    stage_of = {layer.name: s for s, graph in enumerate(graphs) for layer in graph.layers}
    shared: dict[int, float] = {}
    for s, workers, step in shared_steps(schedule, graphs, stage_of, names, workload):
        shared[s] = shared.get(s, 0.0) + mesh.link_between(cluster, workers).time(step)
    stages = tuple(
        _figures(
            configuration,
            s,
            graph,
            assessment,
            _all_reduce_seconds(mesh, cluster, schedule, s, assessment.layers, workload) + shared.get(s, 0.0),
        )
        for s, (graph, assessment) in enumerate(zip(graphs, assessed))
    )
    flights = in_flight(schedule) if schedule.num_stages > 1 else ({(0, 0): 1.0},)
    by_stage = tuple(
        tuple(flights[replica.worker][replica.pipeline, s] for replica in schedule.replicas_of(s))
        for s in range(schedule.num_stages)
    )
    memory = memory_of(schedule, stages, recomputing, flights)
    return Evaluation(
        configuration, cluster, stages, boundaries, schedule, times_of(stages, boundaries), memory, by_stage
    )


def _schedule_of(configuration: Configuration, recomputing: tuple[bool, ...]) -> Schedule:
    if len(configuration.stages) > 1:
        return configuration.schedule.schedule(configuration.widths, recomputing)
    return schedule_alone(
        configuration.schedule.num_micro_batches, configuration.mesh_of(0).num_devices, recomputing[0]
    )


def evaluate_unpipelined(
    chain: Chain, cluster: Cluster, workload: Workload, strategies: Mapping[str, Strategy]
) -> Evaluation:
    """A plan without a pipeline as a pipeline of one stage: one worker of all devices, which carries one micro-batch after the
    other forward and back (1F1B).

    Args:
        workload: with ``recompute`` every layer keeps only its evenly split input.

    Raises:
        UserError: as :func:`evaluate`.
    """
    schedule = PipelineSchedule("1f1b", 1, workload.num_micro_batches)
    stage = StageChoice(chain.num_units, "layers" if workload.recompute else "none", strategies)
    return evaluate(chain, cluster, Configuration(StageMesh.whole(cluster), schedule, workload, (stage,)))


def _assess(graph: StageGraph, devices: Cluster, workload: Workload, choice: StageChoice) -> Assessment:
    whole = assess(graph.graph, devices, stage_workload(workload, choice.recompute), choice.strategies)
    return Assessment(whole.layers[1:]) if graph.has_entry else whole


class StageTimes(Protocol):
    """Seconds of a stage that the simulator needs to know."""

    @property
    def forward_s(self) -> float: ...

    @property
    def backward_s(self) -> float: ...

    @property
    def backward_input_s(self) -> float: ...

    @property
    def recompute_s(self) -> float: ...

    @property
    def all_reduce_s(self) -> float: ...


def times_of(stages: Sequence[StageTimes], boundaries: Sequence[Boundary]) -> Times:
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
    configuration: Configuration, number: int, graph: StageGraph, assessment: Assessment, all_reduce_s: float
) -> StageFigures:
    layers, workload, choice = assessment.layers, configuration.workload, configuration.stages[number]
    passes = configuration.schedule.backward_passes(number)
    forward = sum(layer.work.forward_s + layer.forward_communication_s for layer in layers)
    backward = sum(layer.work.backward_s + layer.backward_communication_s for layer in layers)
    state = sum(layer.work.state_bytes for layer in layers)
    entry = graph.entry
    arriving = 0.0 if entry is None else workload.micro_batch * entry.output_elements * workload.itemsize
    return StageFigures(
        graph=graph,
        assessment=assessment,
        forward_s=forward,
        backward_s=passes * backward,
        backward_input_s=configuration.schedule.input_passes(number) * backward,
        backward_passes=passes,
        recompute_s=forward if choice.recompute == "stage" else 0.0,
        all_reduce_s=all_reduce_s,
        state_bytes=state,
        weight_bytes=state * workload.itemsize / workload.bytes_per_parameter,
        kept_bytes=sum(layer.work.kept_bytes for layer in layers),
        input_bytes=arriving / configuration.mesh_of(number).num_devices,
        buffer_bytes=max(layer.work.buffer_bytes for layer in layers),
    )


def _all_reduce_seconds(
    mesh: Meshes,
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
    link, devices = mesh.link_between(cluster, workers), mesh.mesh_of(workers[0]).devices(cluster)
    return sum(
        replicated_all_reduce_s(
            layer.layer, layer.strategy, len(workers), link, devices, own_gradient_bytes(layer, workload)
        )
        for layer in layers
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
