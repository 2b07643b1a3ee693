"""Writes a predicted training step as a trace for chrome://tracing and Perfetto.

- A plan of one stage: a row for computation and a row for each network level. The bars follow each other, since the cost model
  overlaps nothing: for each micro-batch all forward passes and then all backward passes, at the end the gradient sums.
- A plan of several stages: the simulated timeline, with rows for each worker, its all-reduces and its links
  (:func:`autoddl.pipelines.draw.to_trace`). Each bar names the layers of its stage.
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
#: Largest number of bars of a trace; viewers cannot show many more.
MAX_EVENTS = 200_000


def trace_text(plan: PlanFile) -> str:
    """Return the trace of a plan as JSON.

    Raises:
        UserError: the trace would have more than `MAX_EVENTS` bars.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> [event["name"] for event in json.loads(trace_text(plan))["traceEvents"] if event.get("cat") == "forward"]
    ['fc1 forward', 'fc2 forward']
    """
    return _pipeline_trace(plan.evaluation) if plan.num_stages > 1 else _stage_trace(plan)


def _stage_trace(plan: PlanFile) -> str:
    """Return the trace of a plan of one stage."""
    writer, (stage,) = _TraceWriter(plan.cluster), plan.evaluation.stages
    layers, num_micro_batches = stage.assessment.layers, plan.workload.num_micro_batches
    forward_phases = ("forward", "recomputation") if stage.recompute_s else ("forward",)
    bars_per_micro_batch = sum(
        len(forward_phases) * (1 + len(layer.forward_steps)) + 1 + len(layer.backward_steps) for layer in layers
    )
    num_bars = num_micro_batches * bars_per_micro_batch
    if num_bars > MAX_EVENTS:
        raise UserError(
            f"a trace of {num_micro_batches} micro-batches of {len(layers)} layers would have {num_bars:,} bars, "
            f"should have at most {MAX_EVENTS:,}"
        )
    for number in range(num_micro_batches):
        for phase in forward_phases:
            for layer in layers:
                writer.add_steps(layer, phase, layer.forward_steps, number)
                writer.add_compute(layer, phase, layer.work.forward_s, number)
        for layer in reversed(layers):
            writer.add_compute(layer, "backward", layer.work.backward_s, number)
            writer.add_steps(layer, "backward", layer.backward_steps, number)
    for layer in reversed(layers):
        writer.add_steps(layer, "gradient", layer.work.gradient, None)
    return writer.text()


def _pipeline_trace(evaluation: Evaluation) -> str:
    """Return the timeline of a pipeline; each bar names the first and the last layer of its stage."""
    document = json.loads(to_trace(evaluation.timeline))
    layer_names = [[layer.name for layer in stage.graph.layers] for stage in evaluation.stages]
    for event in document["traceEvents"]:
        stage = event.get("args", {}).get("stage")
        if isinstance(stage, int):
            event["args"]["layers"] = f"{layer_names[stage][0]} to {layer_names[stage][-1]}"
    return json.dumps(document) + "\n"


class _TraceWriter:
    """Writes bars, each of which begins when the previous one ends."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._now_s = 0.0
        self._events: list[dict[str, Any]] = []
        self._rows = {"compute": 0}
        for level in cluster.levels:
            self._rows[level.name] = len(self._rows)

    def add_compute(self, assessed: LayerAssessment, phase: str, seconds: float, micro_batch: int) -> None:
        """Append a bar for a computation of a layer."""
        layer = assessed.layer
        arguments = {
            "layer": layer.name,
            "kind": layer.kind,
            "strategy": str(assessed.strategy),
            "micro_batch": micro_batch,
        }
        self._add_bar(f"{layer.name} {phase}", phase, "compute", seconds, arguments)

    def add_steps(self, assessed: LayerAssessment, phase: str, steps: Iterable[Step], micro_batch: int | None) -> None:
        """Append a bar for each communication step of a layer; ``micro_batch`` is None for gradient sums."""
        name = assessed.layer.name
        for step in steps:
            arguments: dict[str, Any] = {
                "layer": name,
                "ranks": step.axis.size,
                "stride": step.axis.stride,
                "sent_bytes": step.sent_bytes,
            }
            if micro_batch is not None:
                arguments["micro_batch"] = micro_batch
            row = self._cluster.levels[step.axis.level].name
            title = f"{step.collective.value} {name} {phase}"
            self._add_bar(title, f"{phase} communication", row, self._cluster.time(step), arguments)

    def _add_bar(self, name: str, category: str, row: str, seconds: float, arguments: dict[str, Any]) -> None:
        if seconds <= 0:
            return
        self._events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": self._now_s * _MICROSECONDS,
                "dur": seconds * _MICROSECONDS,
                "pid": 0,
                "tid": self._rows[row],
                "args": arguments,
            }
        )
        self._now_s += seconds

    def text(self) -> str:
        """Return the trace as JSON."""
        events = list(self._events)
        for name, number in self._rows.items():
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}})
            events.append(
                {"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": number, "args": {"sort_index": number}}
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
