"""Plans as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.units import format_bytes, format_seconds

from .planner import BaselineFigures, Planned
from .trusting import PlanTrust, trust_lines

__all__ = ["aligned", "counted", "plan_text"]


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """The rows as lines with aligned columns; columns in ``right`` are set flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def plan_text(planned: Planned, trusted: PlanTrust | None = None) -> str:
    """The whole plan: what it is for, the layers, the totals, the baselines, the certificate, and how far to trust it."""
    sections = [_heading(planned), _layers(planned), _totals(planned), _baselines(planned), certificate(planned)]
    notes = list(planned.graph.notes)
    if trusted is not None:
        sections.append(trust_lines(trusted))
        notes += trusted.notes
    notes += planned.notes
    if notes:
        sections.append(["Notes", *(f"  {note}" for note in notes)])
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(planned: Planned) -> list[str]:
    cluster, workload = planned.cluster, planned.workload
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    kept = "activations recomputed" if workload.recompute else "no recomputation"
    passes = f"{workload.num_micro_batches} micro-batches of {workload.micro_batch}"
    if workload.num_micro_batches == 1:
        passes = "one micro-batch"
    return [
        f"{planned.graph.name} on {cluster.name}: {nodes} of {cluster.devices_per_node} x {cluster.device.name}",
        f"  {planned.graph.num_parameters:,} parameters; {workload.precision} precision, {workload.optimizer}, {kept}",
        f"  {workload.batch} {planned.graph.sample}s per step in {passes}",
    ]


def _layers(planned: Planned) -> list[str]:
    levels = " | ".join(level.name for level in planned.cluster.levels)
    rows = [("layer", f"(p0,p1,p2) {levels}", "input", "weight", "output", "compute", "communication", "sent")]
    for name, members in _grouped(planned.assessment.layers):
        first = members[0]
        layouts = first.strategy.sbp(first.layer)
        sbp = {name: str(layout.without_unit_axes()) if layout else "-" for name, layout in layouts.items()}
        rows.append(
            (
                f"{name} x {len(members)}" if len(members) > 1 else name,
                str(first.strategy),
                sbp["input"],
                sbp["weight"],
                sbp["output"],
                format_seconds(sum(layer.compute_s for layer in members)),
                format_seconds(sum(layer.communication_s for layer in members)),
                format_bytes(sum(layer.sent_bytes for layer in members)),
            )
        )
    return ["Per layer (time and bytes sent by each device per step)", *aligned(rows, right=(5, 6, 7))]


def _grouped(layers: Sequence[LayerAssessment]) -> list[tuple[str, list[LayerAssessment]]]:
    """Equal layers of a repeated block with equal strategies, as one row; in the order of their first."""
    groups: dict[object, tuple[str, list[LayerAssessment]]] = {}
    for assessed in layers:
        layer = assessed.layer
        if layer.block:
            key: object = (layer.block, layer.role, assessed.strategy)
            name = f"{layer.block}.*.{layer.role}"
        else:
            key = name = layer.name
        groups.setdefault(key, (name, []))[1].append(assessed)
    return list(groups.values())


def _totals(planned: Planned) -> list[str]:
    assessment, workload = planned.assessment, planned.workload
    state = sum(layer.work.state_bytes for layer in assessment.layers)
    kept = sum(layer.work.kept_bytes for layer in assessment.layers)
    buffer = max(layer.work.buffer_bytes for layer in assessment.layers)
    rate = workload.batch / assessment.step_s
    peak = planned.cluster.num_devices * planned.cluster.device.peak_flops[workload.precision]
    utilisation = 3 * planned.graph.flops * rate / peak
    rows = [
        (
            "step",
            format_seconds(assessment.step_s),
            f"{rate:,.1f} {planned.graph.sample}s/s, {utilisation:.0%} of peak FLOP/s",
        ),
        ("compute", format_seconds(assessment.compute_s), ""),
        (
            "communication",
            format_seconds(assessment.communication_s),
            f"each device sends {format_bytes(assessment.sent_bytes)}",
        ),
        (
            "memory",
            format_bytes(assessment.memory_bytes),
            f"of {format_bytes(planned.memory_limit_bytes)}: {format_bytes(state)} parameters, gradients and optimizer, "
            f"{format_bytes(kept)} activations, {format_bytes(buffer)} buffer",
        ),
    ]
    return ["Per step", *aligned(rows)]


def _baselines(planned: Planned) -> list[str]:
    ours = planned.assessment
    rows = [("plan", "step", "", "communication", "", "memory", "")]
    rows.append(
        (
            "AutoDDL",
            format_seconds(ours.step_s),
            "",
            format_seconds(ours.communication_s),
            "",
            format_bytes(ours.memory_bytes),
            "",
        )
    )
    why = []
    for figures in planned.baselines:
        if figures.assessment is None:
            why.append(f"  {figures.name}: infeasible, {figures.infeasible}")
            continue
        theirs = figures.assessment
        rows.append(
            (
                figures.name,
                format_seconds(theirs.step_s),
                _ratio(theirs.step_s, ours.step_s),
                format_seconds(theirs.communication_s),
                _ratio(theirs.communication_s, ours.communication_s),
                format_bytes(theirs.memory_bytes),
                _how(figures),
            )
        )
    return ["Compared with", *aligned(rows, right=(1, 2, 3, 4, 5)), *why]


def _ratio(theirs: float, ours: float) -> str:
    return f"{theirs / ours:.2f}x" if ours > 0 else ""


def _how(figures: BaselineFigures) -> str:
    assert figures.workload is not None
    again = ", recomputed" if figures.workload.recompute else ""
    return f"{figures.mesh}, micro-batch {figures.workload.micro_batch}{again}"


def counted(number: int, what: str) -> str:
    """``1 simulation``, ``1,234 simulations``: a number and what is counted, in the plural where it is not one."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def certificate(planned: Planned) -> list[str]:
    """What is proven, and how."""
    what = "communication time" if planned.options.objective == "communication" else "step time"
    space = planned.result.space_size
    size = f"{space:,}" if space < 10**9 else f"10^{len(str(space)) - 1}"
    settings = counted(len(planned.candidates), "micro-batch setting")
    found = f"{planned.options.method} search, {format_seconds(planned.search_s)}, {settings}"
    if planned.optimal:
        verdict = f"proven: none of the {size} assignments of strategies that fit has a smaller {what}"
    else:
        remedy = "; raise --time-limit" if planned.options.method in ("exact", "exhaustive") else "; use --method exact"
        why, remedy = ("interrupted, ", "") if planned.is_interrupted else ("", remedy)
        verdict = (
            f"not proven: {why}the best assignment may be up to {planned.gap:.2%} better "
            f"(lower bound {format_seconds(planned.lower_bound)}; {size} assignments){remedy}"
        )
    if planned.left_out:
        verdict += f"; {planned.left_out}"
    if planned.taken_from:
        found += f", which found nothing better than {planned.taken_from}"
    return ["Certificate", f"  {verdict}", f"  {found}; cost and memory recomputed from the layer graph"]
