"""The time and memory of a configuration.

**Times** of a stage's passes: :mod:`.stage_figures`.  Gradients that several workers hold (replicas of bidirectional schedules,
shared embeddings) are reduced, and transfers between stages are priced, as :mod:`.boundary` describes.

The step of a synchronous schedule is the makespan of its simulation; that of an asynchronous one is the time of N micro-batches in
the steady state.  A single stage is not simulated: its step is N (forward + backward) + all-reduce + optimizer step.

**Overlap of gradients** with the backward pass of the last micro-batch, in every stage: :mod:`autoddl.costmodel.overlap`.

**Memory** of the devices: :mod:`.worker_memory`.

**Breakdown of the step** on the busiest worker: step = compute + communication inside its stages + bubble + exposed communication.
Exposed communication is the difference of the simulated steps with and without transfers, and with and without all-reduces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from autoddl.costmodel.assessment import Assessment, LayerAssessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from ..planners.inflight import in_flight
from ..schedule import Kind, Schedule
from ..simulator import simulate
from ..single_stage import single_stage_schedule
from ..timeline import Timeline, steady_state
from ..times import Times
from .boundary import Boundary, boundary_of, divided_steps, replicated_all_reduce_steps, shared_steps
from .configuration import Configuration, PipelineSchedule, StageChoice
from .meshes import StageMesh
from .partition import ENTRY, Chain
from .stage_figures import StageFigures, all_reduce_s_of, assessments_of, figures_of
from .worker_memory import WorkerMemory, memory_of

__all__ = ["Evaluation", "evaluate", "evaluate_unpipelined", "step_of"]


@dataclass(frozen=True)
class Evaluation:
    """The time and memory of a configuration.

    Attributes:
        configuration: The configuration.
        cluster: The devices and their network.
        stages: Time and memory of every stage.
        boundaries: Transfer times between neighbouring stages; shape (stages - 1,).
        schedule: The generated schedule.
        times: Task times for the simulator.
        worker_memory: Per worker, what the memory of each of its devices is used for.
        in_flight: Per stage, the largest number of its micro-batches in flight on each of its workers.
    """

    configuration: Configuration
    cluster: Cluster
    stages: tuple[StageFigures, ...]
    boundaries: tuple[Boundary, ...]
    schedule: Schedule
    times: Times
    worker_memory: tuple[WorkerMemory, ...]
    in_flight: tuple[tuple[float, ...], ...]

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated schedule, in O(tasks) time."""
        return simulate(self.schedule, self.times)

    @property
    def has_pipeline(self) -> bool:
        """Whether there is more than one stage."""
        return len(self.stages) > 1

    @cached_property
    def step_s(self) -> float:
        """Seconds per step."""
        if self.has_pipeline:
            return step_of(self.configuration.schedule, self.timeline)
        return self._step_with(self.times)

    def _step_with(self, times: Times) -> float:
        """Seconds per step with other task times."""
        if self.has_pipeline:
            return step_of(self.configuration.schedule, simulate(self.schedule, times))
        (forward,), (backward,), (recompute,) = times.forward, times.backward, times.recompute
        passes_s = self.configuration.schedule.num_micro_batches * (forward + backward + recompute)
        return passes_s + times.all_reduce[0] + times.update[0]

    def cost(self, objective: str) -> float:
        """The value of the objective: seconds per step (``step``), or seconds per step if compute took no time
        (``communication``)."""
        return self.step_s if objective == "step" else self._step_with(self._communication_times)

    def timeline_of(self, objective: str) -> Timeline:
        """The simulated schedule: with all times (``step``), or as if compute took no time (``communication``)."""
        return self.timeline if objective == "step" else simulate(self.schedule, self._communication_times)

    @cached_property
    def _communication_times(self) -> Times:
        """The task times without compute."""
        all_reduce, update = _gradient_times(self.schedule, [stage.exposed_all_reduce_s for stage in self.stages])
        forward = [sum(layer.forward_communication_s for layer in stage.assessment.layers) for stage in self.stages]
        backward = [sum(layer.backward_communication_s for layer in stage.assessment.layers) for stage in self.stages]
        spec = self.configuration.schedule
        return replace(
            self.times,
            forward=tuple(forward),
            backward=tuple(spec.backward_passes(s) * seconds for s, seconds in enumerate(backward)),
            backward_input=tuple(spec.input_passes(s) * seconds for s, seconds in enumerate(backward)),
            recompute=tuple(seconds if stage.recompute_s else 0.0 for seconds, stage in zip(forward, self.stages)),
            all_reduce=all_reduce,
            update=update,
        )

    @property
    def worker_memory_bytes(self) -> tuple[float, ...]:
        """Per worker, peak bytes of each of its devices."""
        return tuple(memory.total_bytes for memory in self.worker_memory)

    @property
    def memory_bytes(self) -> float:
        """Peak memory of the fullest device."""
        return max(self.worker_memory_bytes)

    @cached_property
    def busiest(self) -> int:
        """The worker with the most seconds of compute and communication inside its stages; the first one of several."""
        return max(range(self.schedule.num_workers), key=lambda worker: (self._busy_s(worker), -worker))

    def micro_batches_of(self, worker: int, stage: int, pipeline: int) -> float:
        """Number of micro-batches per step that a worker computes in one of its stages."""
        schedule, total = self.schedule, self.configuration.schedule.num_micro_batches
        if schedule.num_pipelines == 1:
            return total
        return sum(
            task.part.size
            for task in schedule.workers[worker]
            if task.kind.letter in "BI" and (task.stage, task.pipeline) == (stage, pipeline)
        )

    def _sum_over_step(self, worker: int, per_micro_batch: Sequence[float]) -> float:
        """Sum values per stage and micro-batch over all stages and micro-batches of a worker in one step."""
        return sum(
            self.micro_batches_of(worker, stage, pipeline) * per_micro_batch[stage]
            for pipeline, stage in self.schedule.stages_on(worker)
        )

    def _busy_s(self, worker: int) -> float:
        return self._sum_over_step(worker, [stage.busy_s for stage in self.stages])

    @cached_property
    def compute_s(self) -> float:
        """Compute seconds of the busiest worker per step, with what it waits for of its optimizer step."""
        return self._sum_over_step(self.busiest, [stage.compute_s for stage in self.stages]) + self.update_s

    @cached_property
    def update_s(self) -> float:
        """Seconds of the optimizer step of the busiest worker, less what runs under the passes of its other stages."""
        whole = sum(self.stages[stage].update_s for _, stage in self.schedule.stages_on(self.busiest))
        is_hidden = self.schedule.is_synchronous and self._idle_s < whole * (1 - 1e-9)
        return max(0.0, self._idle_s) if is_hidden else whole

    @cached_property
    def _idle_s(self) -> float:
        """Seconds per step in which the busiest worker neither runs passes nor waits for communication."""
        return self.step_s - self._busy_s(self.busiest) - self.exposed_communication_s

    @cached_property
    def inner_communication_s(self) -> float:
        """Communication seconds inside the stages of the busiest worker per step."""
        return self._sum_over_step(self.busiest, [stage.communication_s for stage in self.stages])

    @cached_property
    def exposed_transfer_s(self) -> float:
        """Seconds by which transfers between stages lengthen the step."""
        return self._without_rounding(self.step_s - self._step_without_transfers)

    @cached_property
    def exposed_all_reduce_s(self) -> float:
        """Seconds by which gradient all-reduces lengthen the step."""
        if not self.has_pipeline:
            return self.stages[0].exposed_all_reduce_s
        return self._without_rounding(self._step_without_transfers - self._step_with(self._compute_only_times))

    @property
    def _compute_only_times(self) -> Times:
        """The task times without transfers and all-reduces."""
        all_reduce, update = _gradient_times(self.schedule, [stage.update_s for stage in self.stages])
        return replace(self._times_without_transfers, all_reduce=all_reduce, update=update)

    def _without_rounding(self, seconds: float) -> float:
        """A difference of steps; 0 if it is within the rounding errors of sums of floats."""
        return seconds if seconds > 1e-12 * self.step_s else 0.0

    @property
    def _times_without_transfers(self) -> Times:
        zeros = (0.0,) * len(self.boundaries)
        return replace(self.times, transfer_forward=zeros, transfer_backward=zeros, transfer_latency=0.0)

    @cached_property
    def _step_without_transfers(self) -> float:
        if not self.boundaries:
            return self.step_s
        return self._step_with(self._times_without_transfers)

    @property
    def exposed_communication_s(self) -> float:
        """Seconds by which transfers and all-reduces lengthen the step."""
        return self.exposed_transfer_s + self.exposed_all_reduce_s

    @property
    def communication_s(self) -> float:
        """All communication seconds that the step waits for: inside the busiest worker's stages, and exposed."""
        return self.inner_communication_s + self.exposed_communication_s

    @property
    def bubble_s(self) -> float:
        """Idle seconds of the busiest worker per step."""
        return self._without_rounding(self._idle_s - self.update_s)

    @property
    def bubble_ratio(self) -> float:
        """Share of the step in which a worker is not busy in its stages, averaged over all workers."""
        workers = range(self.schedule.num_workers)
        return 1 - sum(map(self._busy_s, workers)) / len(workers) / self.step_s if self.step_s else 0.0

    @cached_property
    def sent_bytes(self) -> float:
        """Bytes that the device with the most traffic sends per step."""
        return max(self._sent_bytes(worker) for worker in range(self.schedule.num_workers))

    def _sent_bytes(self, worker: int) -> float:
        """Bytes that each device of a worker sends per step."""
        configuration = self.configuration
        total, devices = 0.0, configuration.mesh.mesh_of(worker).num_devices
        for pipeline, stage in self.schedule.stages_on(worker):
            figures, count = self.stages[stage], self.micro_batches_of(worker, stage, pipeline)
            share, replicas = count / configuration.schedule.num_micro_batches, len(self.schedule.replicas_of(stage))
            further_passes = count * (figures.backward_passes - 1)
            for layer in figures.assessment.layers:
                # ``layer.sent_bytes`` is for all micro-batches of the step: this worker computes a share of them.
                alone = sum(step.sent_bytes for step in layer.work.gradient)
                total += share * (layer.sent_bytes - alone)
                if replicas == 1:
                    total += alone
                else:
                    between, inside = replicated_all_reduce_steps(
                        layer.layer, layer.strategy, replicas, layer.work.gradient_bytes, divided_steps(layer.work)
                    )
                    total += sum(step.sent_bytes for step in (*between, *inside))
                if figures.recompute_s:
                    total += count * sum(step.sent_bytes for step in layer.forward_steps)
                if further_passes:
                    total += further_passes * sum(step.sent_bytes for step in layer.backward_steps)
            # The output of a stage and the gradient of its input.
            for boundary in (stage - 1, stage):
                if 0 <= boundary < len(self.boundaries):
                    total += count * self.boundaries[boundary].nbytes / devices
        return total

    @cached_property
    def layers(self) -> tuple[LayerAssessment, ...]:
        """All layers of the model, in graph order."""
        return tuple(layer for stage in self.stages for layer in stage.assessment.layers)


def step_of(spec: PipelineSchedule, timeline: Timeline) -> float:
    """Return the seconds per step of a simulated schedule: its makespan, or the steady state if it is asynchronous."""
    if spec.synchronous:
        return timeline.makespan
    return steady_state(timeline).period * spec.num_micro_batches / timeline.schedule.update_period


def evaluate(chain: Chain, cluster: Cluster, configuration: Configuration) -> Evaluation:
    """Compute the time and memory of a configuration.

    Args:
        chain: The model as a chain of units.
        cluster: The devices and their network.
        configuration: The plan.

    Raises:
        UserError: a strategy does not fit its layer, mesh or micro-batch, or the schedule cannot be generated.
    """
    mesh, workload, choices = configuration.mesh, configuration.workload, configuration.stages
    graphs = [chain.stage(*bounds) for bounds in configuration.bounds]
    assessments = assessments_of(chain, cluster, configuration, graphs)
    if not configuration.schedule.runs_whole_passes:
        _check_shardings(configuration, assessments)
    # The schedule, and the transfers between neighbouring stages.
    recomputing = tuple(choice.recompute == "stage" for choice in choices)
    schedule = _schedule_of(configuration, recomputing)
    boundaries = tuple(
        boundary_of(
            mesh,
            cluster,
            schedule.placement,
            b,
            graph.exit,
            choice.strategies[graph.exit.name].rows_and_features,
            next_choice.strategies[ENTRY].rows_and_features,
            workload,
        )
        for b, (graph, choice, next_choice) in enumerate(zip(graphs, choices, choices[1:]))
    )
    # Gradient all-reduces: of the replicas of each stage, and of weights that stages share.
    assessed_layers = {layer.layer.name: layer for assessment in assessments for layer in assessment.layers}
    stage_of = {layer.name: s for s, graph in enumerate(graphs) for layer in graph.layers}
    shared_s: dict[int, float] = {}
    for s, workers, step in shared_steps(schedule, graphs, stage_of, assessed_layers, workload):
        shared_s[s] = shared_s.get(s, 0.0) + mesh.link_between(cluster, workers).time(step)
    stages = tuple(
        figures_of(
            configuration,
            s,
            graph,
            assessment,
            all_reduce_s_of(mesh, cluster, schedule, s, assessment.layers, workload) + shared_s.get(s, 0.0),
        )
        for s, (graph, assessment) in enumerate(zip(graphs, assessments))
    )
    # Memory of every worker.
    flights = in_flight(schedule) if schedule.num_stages > 1 else ({(0, 0): 1.0},)
    flights_of_stages = tuple(
        tuple(flights[replica.worker][replica.pipeline, s] for replica in schedule.replicas_of(s))
        for s in range(schedule.num_stages)
    )
    memory = memory_of(schedule, stages, recomputing, flights)
    return Evaluation(
        configuration,
        cluster,
        stages,
        boundaries,
        schedule,
        times_of(stages, boundaries, schedule),
        memory,
        flights_of_stages,
    )


def _schedule_of(configuration: Configuration, recomputing: tuple[bool, ...]) -> Schedule:
    if len(configuration.stages) > 1:
        return configuration.schedule.schedule(configuration.widths, recomputing)
    return single_stage_schedule(
        configuration.schedule.num_micro_batches, configuration.mesh_of(0).num_devices, recomputing[0]
    )


def _check_shardings(configuration: Configuration, assessments: Sequence[Assessment]) -> None:
    """Check that no gradients are divided in every backward pass, if a schedule has several of them for a micro-batch.

    Raises:
        UserError: they are; the layer is named.
    """
    for assessment in assessments:
        for layer in assessment.layers:
            if layer.work.zero > 1:
                raise UserError(
                    f"{layer.layer.name} has zero={layer.work.zero}, which schedule {configuration.schedule.label} does not "
                    "execute: it splits or halves backward passes; at most zero=1 is possible"
                )


def evaluate_unpipelined(
    chain: Chain, cluster: Cluster, workload: Workload, strategies: Mapping[str, Strategy]
) -> Evaluation:
    """Evaluate a plan without a pipeline as a pipeline of one stage.

    The stage runs on one worker of all devices, forward and backward for one micro-batch after the other (1F1B).

    Args:
        chain: The model as a chain of units.
        cluster: The devices and their network.
        workload: Batch, micro-batch, precision, optimizer and recomputation.
        strategies: Strategy of every layer over the whole cluster, by layer name.

    Raises:
        UserError: a strategy does not fit its layer or the micro-batch.

    >>> from autoddl.costmodel.cluster import load_cluster
    >>> from autoddl.costmodel.strategy import data_parallel
    >>> from autoddl.pipelines.joint import chain_of
    >>> from autoddl.zoo import resolve_model
    >>> graph, cluster = resolve_model("mlp:64,64"), load_cluster("gcp-a100").resized(1, 2)
    >>> strategies = {layer.name: data_parallel(cluster.level_sizes) for layer in graph.layers}
    >>> workload = Workload(batch=8, micro_batch=4, precision="mixed", optimizer="adam")
    >>> evaluation = evaluate_unpipelined(chain_of(graph), cluster, workload, strategies)
    >>> evaluation.has_pipeline, evaluation.schedule.num_micro_batches, evaluation.bubble_s
    (False, 2, 0.0)
    """
    schedule = PipelineSchedule("1f1b", 1, workload.num_micro_batches)
    stage = StageChoice(chain.num_units, workload.recompute, strategies)
    return evaluate(chain, cluster, Configuration(StageMesh.whole(cluster), schedule, workload, (stage,)))


class StageTimes(Protocol):
    """The times of a stage that the simulator needs; attributes as in :class:`StageFigures`."""

    @property
    def forward_s(self) -> float: ...

    @property
    def backward_s(self) -> float: ...

    @property
    def backward_input_s(self) -> float: ...

    @property
    def recompute_s(self) -> float: ...

    @property
    def exposed_all_reduce_s(self) -> float: ...

    @property
    def update_s(self) -> float: ...


def times_of(stages: Sequence[StageTimes], boundaries: Sequence[Boundary], schedule: Schedule) -> Times:
    """Collect the task times for the simulator.

    The optimizer step of a stage directly follows the reduction of its gradients, beside the passes of other stages of the worker
    (:func:`_gradient_times`).
    """
    all_reduce, update = _gradient_times(schedule, [stage.exposed_all_reduce_s + stage.update_s for stage in stages])
    return Times.of(
        len(stages),
        forward=[stage.forward_s for stage in stages],
        backward=[stage.backward_s for stage in stages],
        backward_input=[stage.backward_input_s for stage in stages],
        recompute=[stage.recompute_s for stage in stages],
        all_reduce=all_reduce,
        update=update,
        transfer=[boundary.forward_s for boundary in boundaries],
        transfer_backward=[boundary.backward_s for boundary in boundaries],
    )


def _gradient_times(schedule: Schedule, seconds: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The times of the all-reduce and of the update task of each stage, if it needs some seconds behind its last backward pass.

    They are those of the all-reduce task, if there is one, and otherwise of the update task at the end of the worker's list: a
    stage on one device has no all-reduce task, but may exchange the gradients of a weight that it shares with another stage.
    """
    reduced = {0}  # of a single stage, whose tasks are too many to go through
    if schedule.num_stages > 1:
        reduced = {task.stage for tasks in schedule.workers for task in tasks if task.kind is Kind.ALL_REDUCE}
    all_reduce = tuple(value if stage in reduced else 0.0 for stage, value in enumerate(seconds))
    return all_reduce, tuple(0.0 if stage in reduced else value for stage, value in enumerate(seconds))
