"""Traces of launched jobs: records a step on all ranks, and writes it on rank 0."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoddl.calib.hosts import exchange_texts
from autoddl.costmodel.writing import write_document
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.pipeline.training import Traced
from autoddl.pipelines.spans import Recorded

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
        if self._num_steps == RECORDED_STEP:
            return self._recorded(step)
        return self._timed(step) if 1 < self._num_steps < RECORDED_STEP else step(None)

    def _timed(self, step: Callable[[Recorder | None], Any]) -> Any:
        """Run a step that is not recorded, and note how long it takes until all of its operations have run."""
        wait = load_oneflow()._oneflow_internal.eager.Sync
        wait()
        begun = time.monotonic()
        result = step(None)
        wait()
        self._seconds.append(time.monotonic() - begun)
        return result

    def _recorded(self, step: Callable[[Recorder | None], Any]) -> Any:
        """Record a step, and write what all ranks recorded."""
        from autoddl.pipelines.runtime.recording import Recorder

        recorder = Recorder()
        result = step(recorder)
        self._write(Traced(recorder.record(), statistics.median(self._seconds)))
        return result

    def _write(self, own: Traced) -> None:
        """Write what all ranks recorded; all ranks call."""
        document = {"recorded": own.recorded.document(), "step_s": own.step_s}
        documents = map(json.loads, exchange_texts(json.dumps(document)))
        traced = tuple(Traced(Recorded.of(each["recorded"]), each["step_s"]) for each in documents)
        if load_oneflow().env.get_rank():
            return
        trace = StepTrace(self._plan, self._schedule, traced)
        write_document(self._path, trace.document())
        sys.stdout.write(f"{trace_text(trace)}\n")
        sys.stdout.flush()
