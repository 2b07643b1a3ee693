"""What the text of a priced configuration has besides that of a plan: throughput, utilisation, and memory by what it is for."""

from __future__ import annotations

from collections.abc import Iterator

from autoddl.costmodel.units import format_bytes
from autoddl.pipelines.joint.result import PlanResult
from autoddl.pipelines.joint.utilisation import hardware_flops, model_flops, peak_flops, tokens_per_s_per_device

from ..explain.devicememory import DeviceMemory, device_memory
from ..plandocument import NOT_SEARCHED, too_large_note
from .tables import Column, Section, Table

__all__ = ["layout_text", "priced_sections"]


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
    if layout.interleave > 1:
        parts.append(f"interleave {layout.interleave}")
    parts.append(f"micro-batch {result.workload.micro_batch // layout.data_parallel} per replica")
    return ", ".join(parts)


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
