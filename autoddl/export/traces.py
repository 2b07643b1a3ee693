"""Writes a predicted training step as a trace for chrome://tracing and Perfetto.

A pass of a stage is drawn layer by layer (`bars_of_pass`), one bar after the other, since the cost model overlaps nothing.

- A plan of one stage: a row for computation and a row for each network level. For each micro-batch come all forward passes and then
  all backward passes, at the end the gradient sums.
- A plan of several stages: the simulated timeline, with rows for each worker, its all-reduces and its links
  (:func:`autoddl.pipelines.draw.to_trace`). The layers are drawn inside the tasks of a worker, in its row. Halves of
  a split backward pass are not divided into layers, because the cost model prices only the whole backward pass of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Step
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.draw import MICROSECONDS, to_trace

if TYPE_CHECKING:
    from autoddl.pipelines.joint.evaluation import Evaluation

    from ..planfile import PlanFile

__all__ = ["Bar", "bars_of_pass", "trace_text"]

#: The passes that are divided into layers, by the category of their tasks.
_PHASES = {"forward": "forward", "backward": "backward", "recompute": "recomputation"}
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


@dataclass(frozen=True)
class Bar:
    """A computation or a communication step of a layer.

    Attributes:
        name: title of the bar.
        category: the pass; for a communication step followed by "communication".
        level: index of the network level; None for a computation.
        seconds: duration.
        arguments: details that viewers show.
    """

    name: str
    category: str
    level: int | None
    seconds: float
    arguments: dict[str, Any]


def bars_of_pass(layers: Sequence[LayerAssessment], cluster: Cluster, phase: str) -> list[Bar]:
    """Return the bars of a pass of a stage in their order.

    Args:
        layers: the layers of the stage.
        cluster: devices of the stage.
        phase: "forward", "recomputation", "backward" or "gradient".
    """
    bars = []
    for layer in layers if phase in ("forward", "recomputation") else reversed(layers):
        if phase == "gradient":
            bars += _step_bars(layer, cluster, phase, layer.work.gradient)
        elif phase == "backward":
            bars += [_compute_bar(layer, phase, layer.backward_compute_s)]
            bars += _step_bars(layer, cluster, phase, layer.backward_steps)
        else:
            bars += _step_bars(layer, cluster, phase, layer.forward_steps)
            bars += [_compute_bar(layer, phase, layer.forward_compute_s)]
    return [bar for bar in bars if bar.seconds > 0]


def _compute_bar(assessed: LayerAssessment, phase: str, seconds: float) -> Bar:
    layer = assessed.layer
    arguments = {"layer": layer.name, "kind": layer.kind, "strategy": str(assessed.strategy)}
    return Bar(f"{layer.name} {phase}", phase, None, seconds, arguments)


def _step_bars(assessed: LayerAssessment, cluster: Cluster, phase: str, steps: Iterable[Step]) -> list[Bar]:
    """Return a bar for each communication step of a layer."""
    name = assessed.layer.name
    return [
        Bar(
            f"{step.collective.value} {name} {phase}",
            f"{phase} communication",
            step.axis.level,
            cluster.time(step),
            {"layer": name, "ranks": step.axis.size, "stride": step.axis.stride, "sent_bytes": step.sent_bytes},
        )
        for step in steps
    ]


def _event(bar: Bar, start_us: float, duration_us: float, row: int, micro_batch: int | None) -> dict[str, Any]:
    """Return a bar as an event of the trace; ``micro_batch`` is None for gradient sums."""
    number = {} if micro_batch is None else {"micro_batch": micro_batch}
    return {
        "name": bar.name,
        "cat": bar.category,
        "ph": "X",
        "ts": start_us,
        "dur": duration_us,
        "pid": 0,
        "tid": row,
        "args": {**bar.arguments, **number},
    }


def _stage_trace(plan: PlanFile) -> str:
    """Return the trace of a plan of one stage."""
    (stage,), cluster, num_micro_batches = plan.evaluation.stages, plan.cluster, plan.workload.num_micro_batches
    layers = stage.assessment.layers
    phases = ("forward", *(("recomputation",) if stage.recompute_s else ()), "backward")
    bars_of_micro_batch = [bar for phase in phases for bar in bars_of_pass(layers, cluster, phase)]
    num_bars = num_micro_batches * len(bars_of_micro_batch)
    if num_bars > MAX_EVENTS:
        raise UserError(
            f"a trace of {num_micro_batches} micro-batches of {len(layers)} layers would have {num_bars:,} bars, "
            f"should have at most {MAX_EVENTS:,}"
        )
    bars: list[tuple[Bar, int | None]] = [
        (bar, number) for number in range(num_micro_batches) for bar in bars_of_micro_batch
    ]
    bars += [(bar, None) for bar in bars_of_pass(layers, cluster, "gradient")]
    updates = (_compute_bar(layer, "optimizer step", layer.update_s) for layer in layers)
    bars += [(bar, None) for bar in updates if bar.seconds > 0]
    events, now_s = [], 0.0
    for bar, number in bars:
        row = 0 if bar.level is None else 1 + bar.level
        events.append(_event(bar, now_s * MICROSECONDS, bar.seconds * MICROSECONDS, row, number))
        now_s += bar.seconds
    for row, name in enumerate(["compute", *(level.name for level in cluster.levels)]):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": row, "args": {"sort_index": row}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _pipeline_trace(evaluation: Evaluation) -> str:
    """Return the timeline of a pipeline with the layers of each task; each task names the first and the last layer of its stage.

    The layers are left out if the trace would have more than `MAX_EVENTS` bars with them.
    """
    document = json.loads(to_trace(evaluation.timeline))
    tasks = [event for event in document["traceEvents"] if isinstance(event.get("args", {}).get("stage"), int)]
    for task in tasks:
        layers = evaluation.stages[task["args"]["stage"]].graph.layers
        task["args"]["layers"] = f"{layers[0].name} to {layers[-1].name}"
    passes = {
        (number, category): bars_of_pass(stage.assessment.layers, devices, phase)
        for number, stage in enumerate(evaluation.stages)
        for devices in [evaluation.configuration.mesh_of(number).devices(evaluation.cluster)]
        for category, phase in _PHASES.items()
    }
    events = [event for task in tasks for event in _layer_events(task, passes)]
    if len(document["traceEvents"]) + len(events) <= MAX_EVENTS:
        document["traceEvents"] += events
    return json.dumps(document) + "\n"


def _layer_events(task: dict[str, Any], passes: Mapping[tuple[int, str], Sequence[Bar]]) -> list[dict[str, Any]]:
    """Return the layers of a task as events inside of its bar.

    A task of several micro-batches, or of half of one, is a scaled pass of one micro-batch.

    Args:
        task: event of the task.
        passes: the bars of a pass by (stage, category of the event).
    """
    bars = passes.get((task["args"]["stage"], task["cat"]), ())
    scale = task["dur"] / total if (total := sum(bar.seconds for bar in bars)) else 0.0
    events, now_s = [], 0.0
    for bar in bars:
        start = task["ts"] + now_s * scale
        events.append(_event(bar, start, bar.seconds * scale, task["tid"], task["args"]["micro_batch"]))
        now_s += bar.seconds
    return events
