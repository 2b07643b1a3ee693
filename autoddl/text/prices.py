"""What the text of a priced configuration has besides that of a plan: throughput, utilisation, and memory by what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoddl.costmodel.units import counted, format_bytes, format_seconds
from autoddl.pipelines.joint.result import PlanResult
from autoddl.pipelines.joint.utilisation import hardware_flops, model_flops, peak_flops, tokens_per_s_per_device

from ..explain.devicememory import DeviceMemory, device_memory
from ..plandocument import NOT_SEARCHED, too_large_note
from .tables import Column, Section, Table, Text

if TYPE_CHECKING:
    from autoddl.pipelines.joint.neighbours import Change

    from ..api.configured import PlanDistance, UniformPlan
    from ..api.plans import Plan

__all__ = ["distance_text", "layout_text", "priced_sections", "uniform_text"]


def priced_sections(result: PlanResult) -> tuple[Section, ...]:
    """Return the sections on throughput, memory, and what is claimed."""
    too_large = too_large_note(result.evaluation.memory_bytes, result.memory_limit_bytes)
    verdict = [f"  {line}" for line in (f"{NOT_SEARCHED} ({layout_text(result)})", *too_large)]
    return (_throughput(result), _memory(result), ["Certificate", *verdict])


def layout_text(result: PlanResult) -> str:
    """Return the degrees of a priced configuration: ``tp 8, pp 12, dp 4, micro-batch 4 per replica``."""
    layout = result.layout
    assert layout is not None
    parts = [f"tp {layout.tensor_parallel}", f"pp {layout.num_stages}", f"dp {layout.data_parallel}"]
    if layout.expert_parallel > 1:
        parts.append(f"ep {layout.expert_parallel}")
    if layout.interleave > 1:
        parts.append(f"interleave {layout.interleave}")
    parts.append(f"micro-batch {result.workload.micro_batch // layout.data_parallel} per replica")
    return ", ".join(parts)


#: Largest number of single changes that are listed.
_MAX_CHANGES = 5


def distance_text(found: PlanDistance) -> Text:
    """Return how far a configuration is from the best plan, and which single changes of it gain most."""
    plan, best, change = found.plan, found.best, found.best_change
    proof = "proven optimal" if best.optimal else f"the best one may be up to {best.gap or 0.0:.2%} better"
    lines = [
        f"  the best plan takes {format_seconds(best.step_s)} ({proof}), the configuration {format_seconds(plan.step_s)}: "
        f"{_excess(found.excess)}",
        f"  {best.view.heading}, {_shape(best)}",
    ]
    gains = "no single change of the configuration that fits gains anything"
    if change is not None:
        gains = f"{change.name} gains most of all single changes that fit: {1 - change.step_s / plan.step_s:.1%} of the step"
    columns: tuple[Column[Change], ...] = (
        Column("change", lambda one: one.name),
        Column("step", lambda one: format_seconds(one.step_s), right=True),
        Column("", lambda one: f"{one.step_s / plan.step_s - 1:+.1%}", right=True),
        Column("memory", lambda one: format_bytes(one.memory_bytes), right=True, rank=1),
    )
    table = [Table.of(columns, found.changes[:_MAX_CHANGES])] if found.changes else []
    return Text((["Distance to the best plan", *lines], ["Single changes", f"  {gains}", *table]))


def _excess(excess: float) -> str:
    """A ratio less 1 in words."""
    return f"{excess:.1%} more" if excess < 1 else f"{1 + excess:.1f} times as long"


def uniform_text(found: UniformPlan) -> Text:
    """Return the nearest uniform configuration as Megatron-LM's flags, with its step and what uniformity costs."""
    title = "The nearest uniform configuration, as Megatron-LM's flags"
    searched = f"{counted(found.num_evaluated, 'configuration')} evaluated"
    searched += (
        ": no other can be faster" if found.is_finished else "; a faster one may exist, the time limit ended the search"
    )
    uniform = found.uniform
    if uniform is None or uniform.search is None or uniform.search.layout is None:
        return Text((["The nearest uniform configuration", f"  none fits ({searched})"],))
    layout, workload = uniform.search.layout, uniform.workload
    flags = [
        f"  {line}{' ' + chr(92) if number + 1 < len(found.flags) else ''}" for number, line in enumerate(found.flags)
    ]
    devices = f"on {counted(uniform.cluster.num_devices, 'device')}, so dp {layout.data_parallel}"
    excess = found.excess or 0.0
    costs = f"uniformity costs {excess:.1%}"
    if excess < -1e-9:
        costs = f"{-excess:.1%} less than the plan, which"
        costs += (
            " is not the best one"
            if found.plan.has_pipeline
            else " has no pipeline; pipeline='auto' searches those, too"
        )
    lines = [
        f"  {format_seconds(uniform.step_s)} per step {devices}; {costs}",
        f"  {format_bytes(uniform.memory_bytes)} of {format_bytes(uniform.memory_limit_bytes)} per device; {searched}",
    ]
    if workload.activations == "kept" or workload.gradients != "master":
        how = "gradients in float32" + (", gathered inputs gathered again" if workload.activations == "kept" else "")
        lines.append(f"  as Megatron-LM executes it ({how}): {format_seconds(found.megatron_step_s)} per step")
    return Text(([title, *flags], ["Its step", *lines]))


def _shape(plan: Plan) -> str:
    """Stages, micro-batch and recomputation of a plan in a few words."""
    stages = f"{plan.num_stages} stages" if plan.has_pipeline else "no pipeline"
    return f"{stages}, micro-batch {plan.workload.micro_batch} over all replicas, recomputed: {plan.view.recomputation}"


def _throughput(result: PlanResult) -> Section:
    evaluation = result.evaluation
    peak = peak_flops(result.cluster, result.workload.precision)
    rows: list[tuple[str, str, str]] = []
    tokens = tokens_per_s_per_device(result.graph, evaluation)
    if tokens is not None:
        word = "tokens" if result.graph.reads_tokens else "rows"
        rows.append((f"{word}/s per device", f"{tokens:,.1f}", f"{tokens * result.cluster.num_devices:,.0f} on all"))
    for name, flops, remark in (
        ("model", model_flops(result.graph, result.workload.batch), "3 x forward pass, attention in full"),
        ("hardware", hardware_flops(evaluation), "what is computed, with recomputation"),
    ):
        per_device = flops / evaluation.step_s / result.cluster.num_devices
        share = f"{flops / evaluation.step_s / peak:.1%}"
        rows.append((f"{name} FLOP/s utilisation", share, f"{per_device / 1e12:,.1f} TFLOP/s per device: {remark}"))
    columns: tuple[Column[object], ...] = (Column(), Column(right=True), Column(wraps=True))
    return ["Throughput", Table(columns, tuple(rows))]


_MEMORY: tuple[Column[DeviceMemory], ...] = (
    Column("devices", lambda row: row.title),
    Column("parameters", lambda row: format_bytes(row.parameters), right=True),
    Column("gradients", lambda row: format_bytes(row.gradients), right=True),
    Column("optimizer", lambda row: format_bytes(row.optimizer), right=True),
    Column("activations", lambda row: format_bytes(row.activations), right=True),
    Column("buffer", lambda row: format_bytes(row.buffer), right=True, rank=1),
    Column("total", lambda row: format_bytes(row.total), right=True),
)


def _memory(result: PlanResult) -> Section:
    return ["Memory of a device", Table.of(_MEMORY, _joined(device_memory(result.evaluation)))]


def _joined(rows: tuple[DeviceMemory, ...]) -> Iterator[DeviceMemory]:
    """The first and the last row of a pipeline and the fullest one: those between differ only in their activations."""
    fullest = max(rows, key=lambda row: row.total)
    for number, row in enumerate(rows):
        if number in (0, len(rows) - 1) or row is fullest:
            yield row
