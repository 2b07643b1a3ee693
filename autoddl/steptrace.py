"""Where the time of a training step went on the ranks, beside where the price expects it.

Both have the names of the layers and the communication steps that the cost model prices (:func:`.export.traces.bars_of_pass`), and
both are compared by layer and phase:

===============  ===============================================================================================================
phase            content
===============  ===============================================================================================================
forward          the passes of all micro-batches
backward         the same, with what is computed again
gradient         sums of gradients, and the gathering of divided weights: of all layers together, since ranks move them together
optimizer step   of all layers together
===============  ===============================================================================================================

Times are means over the ranks that run the layer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autoddl.pipelines.runtime.pipeline.slots import RankMap
from autoddl.pipelines.schedule import Kind, Schedule
from autoddl.pipelines.spans import Span, with_waiting

from .export.traces import bars_of_pass, trace_text

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.pipeline.training import Traced

    from .planfile import PlanFile

__all__ = ["TRACE_VARIABLE", "Difference", "StepTrace"]

#: Environment variable of launched ranks: the file to write a trace of a step to.
TRACE_VARIABLE = "AUTODDL_TRACE"

#: Phases that are those of all layers of a stage together.
_JOINT_PHASES = ("gradient", "optimizer step")
_MICROSECONDS = 1e6
#: Rows of a rank in the trace.
_ROWS = ("computation", "communication", "waiting", "dispatch")


@dataclass(frozen=True)
class Difference:
    """Predicted and measured time of a layer in a phase, per step of a rank.

    Attributes:
        layer: name of the layer; "" for all layers of the stage.
        phase: see the module's docstring.
        kind: ``computation`` or ``communication``.
        predicted_s: predicted time.
        measured_s: measured time, without waiting for other ranks.
        waiting_s: time in which the rank waited for others of its group.
        dispatch_s: part of the measured time in which Python launched operations.
        predicted_bytes, sent_bytes: bytes that the rank sends, as priced and as executed.
    """

    layer: str
    phase: str
    kind: str
    predicted_s: float
    measured_s: float
    waiting_s: float
    dispatch_s: float
    predicted_bytes: float
    sent_bytes: float

    @property
    def seconds(self) -> float:
        """Measured less predicted time, waiting included."""
        return self.measured_s + self.waiting_s - self.predicted_s


@dataclass(frozen=True)
class StepTrace:
    """A measured step of a plan, beside the predicted one.

    Attributes:
        plan: the plan.
        schedule: the schedule that the ranks ran.
        traced: what each rank recorded.
    """

    plan: PlanFile
    schedule: Schedule
    traced: tuple[Traced, ...]

    @property
    def recorded_s(self) -> float:
        """Duration of the recorded step on the slowest rank [s]."""
        return max(each.recorded.seconds for each in self.traced)

    @property
    def step_s(self) -> float | None:
        """Median duration of steps that were not recorded [s]; None if there were none."""
        known = [each.step_s for each in self.traced if each.step_s is not None]
        return max(known) if known else None

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """What each rank did, with waiting apart from communication."""
        ranks = RankMap(self.schedule.widths)
        result: dict[int, list[Span]] = {}
        for worker in range(self.schedule.num_workers):
            members = ranks.ranks_of(worker)
            divided = with_waiting({rank - members.start: self.traced[rank].recorded.spans for rank in members})
            result.update({members.start + index: spans for index, spans in divided.items()})
        return tuple(tuple(result[rank]) for rank in sorted(result))

    def totals(self) -> dict[str, float]:
        """Seconds of computation, communication, waiting and dispatch, mean over the ranks; dispatch is a part of the first two."""
        totals = dict.fromkeys(_ROWS, 0.0)
        for spans in self.spans:
            for span in spans:
                totals[span.kind] += span.seconds / len(self.spans)
                totals["dispatch"] += span.dispatch_s / len(self.spans) if span.kind != "waiting" else 0.0
        return totals

    def differences(self) -> list[Difference]:
        """Predicted and measured times by layer and phase, the largest difference first."""
        predicted, measured = self._predicted(), self._measured()
        update = ("", "optimizer step", "computation")
        if update not in measured:  # the script makes the optimizer's step itself
            predicted.pop(update, None)
        rows = []
        for key in {**predicted, **measured}:
            seconds, sent = predicted.get(key, (0.0, 0.0))
            own, waiting, dispatch, own_sent = measured.get(key, (0.0, 0.0, 0.0, 0.0))
            rows.append(Difference(*key, seconds, own, waiting, dispatch, sent, own_sent))
        return sorted(rows, key=lambda row: -abs(row.seconds))

    def _predicted(self) -> dict[tuple[str, str, str], tuple[float, float]]:
        """(Seconds, bytes) that the price expects of a rank, by (layer, phase, kind)."""
        evaluation = self.plan.evaluation
        totals: dict[tuple[str, str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for number, stage in enumerate(evaluation.stages):
            cluster = evaluation.configuration.mesh_of(number).devices(evaluation.cluster)
            layers = stage.assessment.layers
            passes = ["forward", *(["recomputation"] if stage.recompute_s else []), "backward"]
            times = self._passes_of(number)
            for phase, count in [*((phase, times) for phase in passes), ("gradient", self.schedule.num_updates)]:
                for bar in bars_of_pass(layers, cluster, phase):
                    kind = "computation" if bar.level is None else "communication"
                    key = self._key(bar.arguments["layer"], phase, kind)
                    seconds, sent = totals[key]
                    sent_bytes = bar.arguments.get("sent_bytes", 0.0)
                    totals[key] = seconds + bar.seconds * count, sent + sent_bytes * count
            key = self._key("", "optimizer step", "computation")
            update_s = sum(layer.update_s for layer in layers) * self.schedule.num_updates
            # Of several stages, a rank has one.
            totals[key] = totals[key][0] + update_s / len(evaluation.stages), 0.0
        return totals

    def _passes_of(self, stage: int) -> float:
        """Number of forward passes of a stage that a rank runs, in micro-batches, mean over its replicas."""
        workers = {workers[stage] for workers in self.schedule.placement}
        tasks = [task for worker in workers for task in self.schedule.workers[worker]]
        return sum(t.part.size for t in tasks if t.kind is Kind.FORWARD and t.stage == stage) / len(workers)

    def _measured(self) -> dict[tuple[str, str, str], tuple[float, float, float, float]]:
        """(Seconds, waiting, dispatch, bytes sent) of a rank, by (layer, phase, kind): mean over the ranks that have the key."""
        totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0] * 4)
        holders: dict[tuple[str, str, str], set[int]] = defaultdict(set)
        for rank, spans in enumerate(self.spans):
            for span in spans:
                if span.kind == "waiting" and not span.layer and span.phase not in _JOINT_PHASES:
                    continue  # for another stage
                key = self._key(span.layer, span.phase, "communication" if span.kind == "waiting" else span.kind)
                holders[key].add(rank)
                total = totals[key]
                total[int(span.kind == "waiting")] += span.seconds
                total[2] += span.dispatch_s
                total[3] += span.what.sent_bytes if span.what is not None else 0.0
        return {
            key: tuple(value / len(holders[key]) for value in total)  # type: ignore[misc]
            for key, total in totals.items()
        }

    @staticmethod
    def _key(layer: str, phase: str, kind: str) -> tuple[str, str, str]:
        """The row of a time; see the module's docstring."""
        phase = "backward" if phase == "recomputation" else phase
        if kind == "communication" and not layer and phase in ("optimizer step", "forward"):
            phase = "gradient"  # divided weights are gathered after their update, or before the next forward pass
        return ("" if phase in _JOINT_PHASES else layer), phase, kind

    def document(self) -> dict[str, Any]:
        """The trace for Perfetto and chrome://tracing: a process for each rank, and the predicted step behind them."""
        events: list[dict[str, Any]] = []
        for rank, spans in enumerate(self.spans):
            events += _names(rank, f"rank {rank}, measured", _ROWS)
            events += [event for span in spans for event in _events(rank, span)]
        predicted = json.loads(trace_text(self.plan))["traceEvents"]
        first = len(self.spans)
        for event in predicted:
            events.append({**event, "pid": event["pid"] + first})
        for pid in sorted({event["pid"] for event in predicted}):
            events += _names(pid + first, "predicted", ())
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(pid: int, process: str, rows: Sequence[str]) -> list[dict[str, Any]]:
    """The names of a process and its rows."""
    events = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": process}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]
    events += [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": row, "args": {"name": name}}
        for row, name in enumerate(rows)
    ]
    return events


def _events(rank: int, span: Span) -> list[dict[str, Any]]:
    """The bar of a span, and that of its dispatch."""
    arguments: dict[str, Any] = {"layer": span.layer}
    name = " ".join(filter(None, [span.layer, span.phase]))
    if span.what is not None:
        name = f"{span.what.collective} {name}"
        arguments.update(ranks=span.what.size, stride=span.what.stride, sent_bytes=span.what.sent_bytes)
    category = span.phase if span.kind == "computation" else f"{span.phase} {span.kind}"
    bar: Mapping[str, Any] = {"name": name, "cat": category, "ph": "X", "pid": rank, "args": arguments}
    times = {"ts": span.start * _MICROSECONDS, "dur": span.seconds * _MICROSECONDS}
    events = [{**bar, **times, "tid": _ROWS.index(span.kind)}]
    if span.kind != "waiting" and span.dispatch_s > 0:
        dispatch = {"ts": span.start * _MICROSECONDS, "dur": span.dispatch_s * _MICROSECONDS}
        events.append({**bar, **dispatch, "cat": f"{span.phase} dispatch", "tid": _ROWS.index("dispatch")})
    return events
