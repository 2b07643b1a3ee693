"""The memory of the devices of a worker.

A device of worker w needs, where K(s) is the largest number of micro-batches of stage s in flight there,

    state(s) + (versions(s) - 1) weights(s) + K(s) kept(s) + recomputed(s) + largest buffer
    with recomputation of the stage: K(s) input(s) + L(s) kept(s) instead of K(s) kept(s)

where L(s) micro-batches are between their second forward pass and the end of their backward pass, and recomputed(s) are the
activations of one block, if blocks are recomputed one by one.  If a worker holds several stages, their activations are added up at
every moment, and the largest sum counts.  (The search adds up the peaks of the stages instead, :mod:`.stage_search`.  That is an
upper bound.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..memory import activations_alive, peak_activations, stashed_inputs_alive, weight_versions
from ..schedule import Schedule

__all__ = ["StageMemory", "WorkerMemory", "memory_of"]


class StageMemory(Protocol):
    """The bytes of a stage on each device; attributes as in :class:`.stage_figures.StageFigures`."""

    @property
    def state_bytes(self) -> float: ...

    @property
    def weight_bytes(self) -> float: ...

    @property
    def kept_bytes(self) -> float: ...

    @property
    def recomputed_bytes(self) -> float: ...

    @property
    def input_bytes(self) -> float: ...

    @property
    def buffer_bytes(self) -> float: ...


@dataclass(frozen=True)
class WorkerMemory:
    """What the memory of each device of one worker is used for, in bytes.

    Attributes:
        weight_bytes: Parameters, in the compute type; a part of the state.
        state_bytes: Parameters, gradients and optimizer states.
        older_weight_bytes: Older versions of the parameters, which asynchronous schedules keep.
        activation_bytes: Activations at the moment at which they need the most memory.
        buffer_bytes: Largest buffer of a layer.
    """

    weight_bytes: float
    state_bytes: float
    older_weight_bytes: float
    activation_bytes: float
    buffer_bytes: float

    @property
    def total_bytes(self) -> float:
        """The sum of all parts."""
        return self.state_bytes + self.older_weight_bytes + self.activation_bytes + self.buffer_bytes


def memory_of(
    schedule: Schedule,
    stages: Sequence[StageMemory],
    recomputing: Sequence[bool],
    flights: Sequence[dict[tuple[int, int], float]],
) -> tuple[WorkerMemory, ...]:
    """Return what the memory of each device of every worker is used for, by the formula in the module's docstring.

    Args:
        schedule: The schedule.
        stages: Memory of every stage.
        recomputing: Per stage, whether the whole stage is recomputed.
        flights: Per worker, the largest number of micro-batches in flight, by (pipeline, stage).
    """
    versions = {} if schedule.is_synchronous else weight_versions(schedule)
    common_peaks = _common_peaks(schedule, stages, recomputing)
    running = peak_activations(schedule) if any(recomputing) else ()
    memory = []
    for worker in range(schedule.num_workers):
        held = schedule.stages_on(worker)
        own = [stages[stage] for _, stage in held]
        if len(held) > 1:
            activations = common_peaks[worker]
        else:
            ((_, stage),), (figures,), count = held, own, flights[worker][held[0]]
            activations = count * figures.kept_bytes
            if recomputing[stage]:
                activations = count * figures.input_bytes + running[worker] * figures.kept_bytes
        memory.append(
            WorkerMemory(
                weight_bytes=sum(figures.weight_bytes for figures in own),
                state_bytes=sum(figures.state_bytes for figures in own),
                older_weight_bytes=sum(
                    (versions.get(key, 1) - 1) * figures.weight_bytes for key, figures in zip(held, own)
                ),
                # One block is recomputed at a time, and one layer runs at a time.
                activation_bytes=activations + max(figures.recomputed_bytes for figures in own),
                buffer_bytes=max(figures.buffer_bytes for figures in own),
            )
        )
    return tuple(memory)


def _common_peaks(schedule: Schedule, stages: Sequence[StageMemory], recomputing: Sequence[bool]) -> tuple[float, ...]:
    """The largest sum, per worker, of the activations of all its stages at any moment; zeros if workers hold one stage each."""
    if all(len(schedule.stages_on(worker)) == 1 for worker in range(schedule.num_workers)):
        return (0.0,) * schedule.num_workers
    alive = activations_alive(schedule, [figures.kept_bytes for figures in stages])
    if any(recomputing):
        inputs = stashed_inputs_alive(schedule, [figures.input_bytes for figures in stages])
        alive = tuple(one + other for one, other in zip(alive, inputs))
    return tuple(float(sums.max(initial=0.0)) for sums in alive)
