"""What fills the devices of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.units import format_ranges
from autoddl.costmodel.workload import OPTIMIZERS, Workload
from autoddl.pipelines.joint.evaluation import Evaluation

__all__ = ["DeviceMemory", "device_memory"]


@dataclass(frozen=True)
class DeviceMemory:
    """What fills each of some devices [bytes]."""

    title: str
    num_devices: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffer


def device_memory(evaluation: Evaluation) -> tuple[DeviceMemory, ...]:
    """A row for workers that have the same stages and are filled alike.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> [(row.title, row.num_devices, row.total == plan.memory_bytes) for row in device_memory(plan.evaluation)]
    [('each device', 8, True)]
    """
    schedule, workload = evaluation.schedule, evaluation.configuration.workload
    alike: dict[tuple[tuple[int, ...], tuple[float, float, float]], list[int]] = {}
    for worker in range(schedule.num_workers):
        stages = tuple(sorted({stage for _, stage in schedule.stages_on(worker)}))
        alike.setdefault((stages, _of_worker(evaluation, worker)), []).append(worker)
    rows = []
    for (stages, (state, activations, buffer)), workers in alike.items():
        title = f"{'stage' if len(stages) == 1 else 'stages'} {format_ranges(stages)}"
        rows.append(
            DeviceMemory(
                title if len(evaluation.stages) > 1 else "each device",
                sum(schedule.widths[worker] for worker in workers),
                *_divided(state, workload),
                activations,
                buffer,
            )
        )
    return tuple(rows)


def _of_worker(evaluation: Evaluation, worker: int) -> tuple[float, float, float]:
    """State, activations and buffer [bytes] of a device of one worker; extra versions of weights count as state."""
    on_worker = evaluation.schedule.stages_on(worker)
    state = sum(evaluation.stages[stage].state_bytes for _, stage in on_worker)
    buffer = max(evaluation.stages[stage].buffer_bytes for _, stage in on_worker)
    activations = 0.0
    for direction, stage in on_worker:
        figures = evaluation.stages[stage]
        places = [(replica.pipeline, replica.worker) for replica in evaluation.schedule.replicas_of(stage)]
        count = evaluation.in_flight[stage][places.index((direction, worker))]
        activations += (
            count * figures.input_bytes + figures.kept_bytes if figures.recompute_s else count * figures.kept_bytes
        )
    versions = max(0.0, evaluation.memory[worker] - state - activations - buffer)
    return state + versions, activations, buffer


def _divided(state: float, workload: Workload) -> tuple[float, float, float]:
    """State into parameters (working copies and masters), gradients and optimizer."""
    per_element = workload.bytes_per_parameter
    gradients = state * workload.itemsize / per_element
    optimizer = state * OPTIMIZERS[workload.optimizer] / per_element
    return state - gradients - optimizer, gradients, optimizer
