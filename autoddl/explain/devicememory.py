"""What the memory of each device is used for: parameters, gradients, optimizer states, activations and buffers."""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.units import format_ranges
from autoddl.costmodel.workload import OPTIMIZERS, Workload
from autoddl.pipelines.joint.evaluation import Evaluation

__all__ = ["DeviceMemory", "device_memory"]


@dataclass(frozen=True)
class DeviceMemory:
    """What the memory of one device is used for, for a group of devices with equal use [bytes].

    Attributes:
        title: the stages of the devices; ``each device`` if the plan has one stage.
        num_devices: number of devices in the group.
        parameters: working copies and master copies of the parameters, and older versions of them (asynchronous schedules).
        gradients: gradients of the parameters.
        optimizer: states of the optimizer.
        activations: activations that are kept from the forward pass to the backward pass.
        buffer: memory that is in use only while a layer runs.
    """

    title: str
    num_devices: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffer: float

    @property
    def total(self) -> float:
        """The sum of all parts [bytes]."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffer


def device_memory(evaluation: Evaluation) -> tuple[DeviceMemory, ...]:
    """Return one entry for each group of workers with the same stages and the same use of memory.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> [(row.title, row.num_devices, row.total == plan.memory_bytes) for row in device_memory(plan.evaluation)]
    [('each device', 8, True)]
    """
    schedule, workload = evaluation.schedule, evaluation.configuration.workload
    workers_by_use: dict[tuple[tuple[int, ...], tuple[float, float, float, float]], list[int]] = {}
    for worker in range(schedule.num_workers):
        stages = tuple(sorted({stage for _, stage in schedule.stages_on(worker)}))
        workers_by_use.setdefault((stages, _worker_memory(evaluation, worker)), []).append(worker)
    rows = []
    for (stages, (state, weights, activations, buffer)), workers in workers_by_use.items():
        title = f"{'stage' if len(stages) == 1 else 'stages'} {format_ranges(stages)}"
        parameters, gradients, optimizer = _split_state(state, weights, workload)
        rows.append(
            DeviceMemory(
                title=title if len(evaluation.stages) > 1 else "each device",
                num_devices=sum(schedule.widths[worker] for worker in workers),
                parameters=parameters,
                gradients=gradients,
                optimizer=optimizer,
                activations=activations,
                buffer=buffer,
            )
        )
    return tuple(rows)


def _worker_memory(evaluation: Evaluation, worker: int) -> tuple[float, float, float, float]:
    """State, parameters, activations and buffer of a device of the worker [bytes]; older versions of weights count as state."""
    stages_on_worker = evaluation.schedule.stages_on(worker)
    state = sum(evaluation.stages[stage].state_bytes for _, stage in stages_on_worker)
    buffer = max(evaluation.stages[stage].buffer_bytes for _, stage in stages_on_worker)
    activations = 0.0
    for pipeline, stage in stages_on_worker:
        figures = evaluation.stages[stage]
        replicas = [(replica.pipeline, replica.worker) for replica in evaluation.schedule.replicas_of(stage)]
        num_in_flight = evaluation.in_flight[stage][replicas.index((pipeline, worker))]
        if figures.recompute_s:
            activations += num_in_flight * figures.input_bytes + figures.kept_bytes
        else:
            activations += num_in_flight * figures.kept_bytes + figures.recomputed_bytes
    older_versions = max(0.0, evaluation.worker_memory_bytes[worker] - state - activations - buffer)
    parameters = sum(evaluation.stages[stage].weight_bytes for _, stage in stages_on_worker)
    return state + older_versions, parameters, activations, buffer


def _split_state(state: float, parameters: float, workload: Workload) -> tuple[float, float, float]:
    """Divide the bytes of the state into parameters (working and master copies), gradients and optimizer states.

    Args:
        state: Bytes of the state.
        parameters: Bytes of the working copies of the parameters.
        workload: Supplies the types and the optimizer.
    """
    gradients = parameters / workload.itemsize * workload.gradient_itemsize
    per_element = workload.optimizer_bytes_per_parameter
    states = OPTIMIZERS[workload.optimizer] * workload.types.master_itemsize
    optimizer = (state - parameters - gradients) * states / per_element if per_element else 0.0
    return state - gradients - optimizer, gradients, optimizer
