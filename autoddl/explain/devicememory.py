"""What the memory of each device is used for: parameters, gradients, optimizer states, activations and buffers."""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.units import format_ranges
from autoddl.costmodel.workload import OPTIMIZERS, Workload
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.worker_memory import WorkerMemory

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
    workers_by_use: dict[tuple[tuple[int, ...], WorkerMemory], list[int]] = {}
    for worker, memory in enumerate(evaluation.worker_memory):
        stages = tuple(sorted({stage for _, stage in schedule.stages_on(worker)}))
        workers_by_use.setdefault((stages, memory), []).append(worker)
    rows = []
    for (stages, memory), workers in workers_by_use.items():
        title = f"{'stage' if len(stages) == 1 else 'stages'} {format_ranges(stages)}"
        parameters, gradients, optimizer = _split_state(memory.state_bytes, memory.weight_bytes, workload)
        rows.append(
            DeviceMemory(
                title=title if len(evaluation.stages) > 1 else "each device",
                num_devices=sum(schedule.widths[worker] for worker in workers),
                parameters=parameters + memory.older_weight_bytes,
                gradients=gradients,
                optimizer=optimizer,
                activations=memory.activation_bytes,
                buffer=memory.buffer_bytes,
            )
        )
    return tuple(rows)


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
