"""Traces of launched jobs: records a step on all ranks, and writes it on rank 0."""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoddl.costmodel.devices import CPU
from autoddl.costmodel.writing import write_document
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.pipeline.training import Traced

from ..steptrace import TRACE_VARIABLE, StepTrace
from ..text.steptrace import trace_text

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.recording import Recorder
    from autoddl.pipelines.schedule import Schedule

    from ..planfile import PlanFile

__all__ = ["RECORDED_STEP", "StepTracer"]

#: The step that is recorded. The first one is warm-up, those between show how long a step takes that is not recorded.
RECORDED_STEP = 4


class StepTracer:
    """Records one step of a training on all ranks; rank 0 writes the trace and prints the largest differences.

    Args:
        plan: Plan of the job.
        schedule: Schedule that the ranks run.
        path: File of the trace.
    """

    def __init__(self, plan: PlanFile, schedule: Schedule, path: Path) -> None:
        self._plan, self._schedule, self._path = plan, schedule, path
        self._num_steps = 0
        self._seconds: list[float] = []

    @classmethod
    def of_job(cls, plan: PlanFile, schedule: Schedule) -> StepTracer | None:
        """The tracer of this job; None if it was launched without ``--trace``."""
        path = os.environ.get(TRACE_VARIABLE)
        return cls(plan, schedule, Path(path)) if path else None

    def run(self, step: Callable[[Recorder | None], Any]) -> Any:
        """Run a step, and return its result; all ranks call."""
        self._num_steps += 1
        if self._num_steps != RECORDED_STEP:
            begun = time.monotonic()
            result = step(None)
            if 1 < self._num_steps < RECORDED_STEP:
                self._seconds.append(time.monotonic() - begun)
            return result
        from autoddl.pipelines.runtime.recording import Recorder

        recorder = Recorder()
        result = step(recorder)
        self._write(Traced(recorder.record(), statistics.median(self._seconds)))
        return result

    def _write(self, own: Traced) -> None:
        """Write what all ranks recorded; all ranks call."""
        traced = tuple(_all_gathered(own))
        if load_oneflow().env.get_rank():
            return
        trace = StepTrace(self._plan, self._schedule, traced)
        write_document(self._path, trace.document())
        sys.stdout.write(f"{trace_text(trace)}\n")
        sys.stdout.flush()


def _all_gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order; all ranks of the job call."""
    flow = load_oneflow()
    rank, num_ranks = flow.env.get_rank(), flow.env.get_world_size()
    data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    if num_ranks == 1:
        return [value]
    sizes = _sum_over_ranks(data.size * (np.arange(num_ranks) == rank))
    # All-gather as a sum: each rank fills its own row of a table of zeros, four bytes in an element.
    table = np.zeros((num_ranks, -(-max(sizes) // 4) * 4), dtype=np.uint8)
    table[rank, : data.size] = data
    rows = _sum_over_ranks(table.view(np.int32)).astype(np.int32).view(np.uint8)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]  # of ranks of this job


def _sum_over_ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the sum of integer arrays over all ranks of the job, on each of them."""
    flow = load_oneflow()
    tensor = flow.tensor(np.ascontiguousarray(values), device=CPU)
    flow.comm.all_reduce(tensor)
    result: np.ndarray[Any, Any] = tensor.numpy()
    return result
