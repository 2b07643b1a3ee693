"""A predicted training step for chrome://tracing and Perfetto.

A single stage: one row for computing and one for each network level, since nothing is taken as overlapped; the layers of each
micro-batch forward and then backward, at last the gradients' all-reduces.  Several stages: their simulated timeline, a row for each
worker, its all-reduces and its links (:func:`autoddl.pipelines.draw.to_trace`), with what is in a stage as a note on each bar.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Step
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.draw import to_trace

if TYPE_CHECKING:
    from autoddl.pipelines.joint.evaluation import Evaluation

    from ..planfile import PlanFile

__all__ = ["trace_text"]

_MICROSECONDS = 1e6
#: More bars than viewers can show.
MAX_EVENTS = 200_000


def trace_text(plan: PlanFile) -> str:
    """The trace, as JSON.

    Raises:
        UserError: it would have more than `MAX_EVENTS` bars.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> [event["name"] for event in json.loads(trace_text(plan))["traceEvents"] if event.get("cat") == "forward"]
    ['fc1 forward', 'fc2 forward']
    """
    return _pipeline_trace(plan.evaluation) if plan.num_stages > 1 else _stage_trace(plan)


def _stage_trace(plan: PlanFile) -> str:
    """The layers of a single stage, one behind the other."""
    writer, (stage,) = _Writer(plan.cluster), plan.evaluation.stages
    layers, num = stage.assessment.layers, plan.workload.num_micro_batches
    forwards = ("forward", "recomputation") if stage.recompute_s else ("forward",)
    count = num * sum(1 + len(forwards) * (1 + len(one.forward_steps)) + len(one.backward_steps) for one in layers)
    if count > MAX_EVENTS:
        raise UserError(
            f"a trace of {num} micro-batches of {len(layers)} layers would have {count:,} bars, "
            f"should have at most {MAX_EVENTS:,}"
        )
    for number in range(num):
        for phase in forwards:
            for found in layers:
                writer.steps(found, phase, found.forward_steps, number)
                writer.compute(found, phase, found.work.forward_s, number)
        for found in reversed(layers):
            writer.compute(found, "backward", found.work.backward_s, number)
            writer.steps(found, "backward", found.backward_steps, number)
    for found in reversed(layers):
        writer.steps(found, "gradient", found.work.gradient, None)
    return writer.text()


def _pipeline_trace(evaluation: Evaluation) -> str:
    """The timeline of a pipeline, with the layers of each bar's stage."""
    document = json.loads(to_trace(evaluation.timeline))
    stages = [[layer.name for layer in stage.graph.layers] for stage in evaluation.stages]
    for event in document["traceEvents"]:
        stage = event.get("args", {}).get("stage")
        if isinstance(stage, int):
            event["args"]["layers"] = f"{stages[stage][0]} to {stages[stage][-1]}"
    return json.dumps(document) + "\n"


class _Writer:
    """Writes bars one after the other."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._now = 0.0
        self._events: list[dict[str, Any]] = []
        self._rows = {"compute": 0}
        for level in cluster.levels:
            self._rows[level.name] = len(self._rows)

    def compute(self, found: LayerAssessment, phase: str, seconds: float, number: int) -> None:
        arguments = {"layer": found.layer.name, "kind": found.layer.kind, "strategy": str(found.strategy)}
        self._bar(f"{found.layer.name} {phase}", phase, "compute", seconds, {**arguments, "micro_batch": number})

    def steps(self, found: LayerAssessment, phase: str, steps: Iterable[Step], number: int | None) -> None:
        for step in steps:
            arguments: dict[str, Any] = {
                "layer": found.layer.name,
                "ranks": step.axis.size,
                "stride": step.axis.stride,
                "sent_bytes": step.sent_bytes,
            }
            if number is not None:
                arguments["micro_batch"] = number
            row = self._cluster.levels[step.axis.level].name
            name = f"{step.collective.value} {found.layer.name} {phase}"
            self._bar(name, f"{phase} communication", row, self._cluster.time(step), arguments)

    def _bar(self, name: str, category: str, row: str, seconds: float, arguments: dict[str, Any]) -> None:
        if seconds <= 0:
            return
        self._events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": self._now * _MICROSECONDS,
                "dur": seconds * _MICROSECONDS,
                "pid": 0,
                "tid": self._rows[row],
                "args": arguments,
            }
        )
        self._now += seconds

    def text(self) -> str:
        """The document; every row has its name."""
        events = list(self._events)
        for name, number in self._rows.items():
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}})
            events.append(
                {"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": number, "args": {"sort_index": number}}
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
