"""Tasks that sleep instead of computing, to time schedules with real communication on a machine with fewer cores than ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...schedule import Kind
from ...times import Times
from ..backend import HOST, Backend
from ..load import load_oneflow
from .actions import Agree, BoundaryTensor, Drop, Reduce, Run, Update
from .engine import execute
from .lowering import Lowered
from .transport import Transport, make_transport

flow: Any = load_oneflow()

__all__ = ["SleepingWork", "sleep_through"]

Tensor = Any


class SleepingWork:
    """Implements `Work` by tasks that sleep for given durations and send tensors of given sizes.

    Args:
        lowered: The lowered schedule, of S stages.
        rank: Number of this rank.
        times: Durations of the tasks.
        row_elements: Single-precision elements in a row of the tensor at each of the S - 1 boundaries.
        gradient_elements: Single-precision elements of each of the S stages' gradients; 0: nothing is reduced. Default: all 0.
    """

    def __init__(
        self,
        lowered: Lowered,
        rank: int,
        times: Times,
        row_elements: Sequence[int],
        gradient_elements: Sequence[int] | None = None,
    ) -> None:
        self.boundaries: Sequence[BoundaryTensor] = [
            BoundaryTensor((elements,), flow.float32) for elements in row_elements
        ]
        self.losses: dict[int, float] = {}
        self.peak_activations = 0.0
        self.peak_versions = 0
        self._lowered = lowered
        self._rows = len(lowered.ranks.rows_of(rank, lowered.slot_rows))
        self._times = times
        self._gradient_elements = gradient_elements or (0,) * times.num_stages

    def begin(self) -> None:
        pass

    def compute(self, run: Run, x: Tensor | None) -> Tensor | None:
        end_s = time.monotonic() + self._duration_s(run)
        y = self._output(run)
        time.sleep(max(0.0, end_s - time.monotonic()))
        return y

    def _duration_s(self, run: Run) -> float:
        times, stage = self._times, run.task.stage
        per_micro_batch = {
            Kind.FORWARD: times.forward[stage],
            Kind.BACKWARD: times.backward[stage],
            Kind.BACKWARD_INPUT: times.backward_input[stage],
            Kind.BACKWARD_WEIGHT: times.backward[stage] - times.backward_input[stage],
            Kind.RECOMPUTE: times.recompute[stage],
        }[run.task.kind]
        return per_micro_batch * run.num_slots / self._lowered.slots_per_micro_batch

    def _output(self, run: Run) -> Tensor | None:
        if self._lowered.schedule.destination_of(run.task) is None:
            return None
        (size,) = self.boundaries[run.task.stage - (run.task.kind is not Kind.FORWARD)].row_shape
        return HOST.tensor(np.zeros((run.num_slots * self._rows, size), dtype=np.float32))

    def total(self, action: Reduce, transport: Transport) -> Tensor | None:
        size = sum(self._gradient_elements[stage] for stage in action.stages)
        return transport.all_reduce(HOST.tensor(np.zeros(size, dtype=np.float32)), action.ranks) if size else None

    def set_gradient(self, stage: int, action: Reduce, total: Tensor) -> None:
        pass

    def agree(self, action: Agree, transport: Transport) -> None:
        pass

    def update(self, action: Update) -> None:
        time.sleep(self._times.update[action.task.stage])

    def drop(self, action: Drop) -> None:
        pass


def sleep_through(
    lowered: Lowered,
    times: Times,
    row_elements: Sequence[int],
    gradient_elements: Sequence[int],
    repeats: int,
    backend: Backend = HOST,
) -> list[Any]:
    """Execute a schedule ``repeats`` times with `SleepingWork`, and return the report of each; all ranks of the job call.

    Args:
        lowered, times, row_elements, gradient_elements: As for `SleepingWork`.
        repeats: Number of runs.
        backend: How ranks communicate.
    """
    rank = flow.env.get_rank()
    work = SleepingWork(lowered, rank, times, row_elements, gradient_elements)
    return [execute(lowered.program(rank), work, make_transport(lowered.compresses, backend)) for _ in range(repeats)]
