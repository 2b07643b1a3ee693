"""A plan without a pipeline as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoddl.costmodel.assessment import Assessment, LayerAssessment
from autoddl.costmodel.cluster import Cluster, Level
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.units import counted, format_bytes, format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.search.planner import BaselineFigures, Planned

from ..trusting import PlanTrust
from .layers import heading, layouts_of, legend, place, repeated
from .tables import Block, Column, Section, Table, Text
from .trust import trust_section

__all__ = ["heading_section", "notes_section", "plan_text"]


def plan_text(planned: Planned, trusted: PlanTrust | None = None) -> Text:
    """The whole plan: what it is for, the layers, the totals, the baselines, the certificate, and how far to trust it."""
    notes = [*planned.graph.notes, *(trusted.notes if trusted else ()), *planned.notes]
    return Text(
        (
            _heading(planned),
            _layers(planned),
            _totals(planned),
            _baselines(planned),
            _certificate(planned),
            trust_section(trusted) if trusted else (),
            notes_section(notes),
        )
    )


def notes_section(notes: Iterable[str]) -> Section:
    """A line for each; nothing where there are none."""
    lines = [f"  {note}" for note in notes]
    return ["Notes", *lines] if lines else []


def _heading(planned: Planned) -> Section:
    kept = "activations recomputed" if planned.workload.recompute else "no recomputation"
    return heading_section(planned.graph, planned.cluster, planned.workload, f", {kept}")


def heading_section(graph: LayerGraph, cluster: Cluster, workload: Workload, more: str = "") -> Section:
    """What a plan is for: the model, the cluster and the batch; ``more`` on how it is trained."""
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    passes = f"{workload.num_micro_batches} micro-batches of {workload.micro_batch}"
    if workload.num_micro_batches == 1:
        passes = "one micro-batch"
    return [
        f"{graph.name} on {cluster.name}: {nodes} of {cluster.devices_per_node} x {cluster.device.name}",
        f"  {graph.num_parameters:,} parameters; {workload.precision} precision, {workload.optimizer}{more}",
        f"  {workload.batch} {graph.sample}s per step in {passes}",
    ]


# ---- Layers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Equal layers of a repeated block with equal strategies; or one layer."""

    name: str
    members: list[LayerAssessment]

    @property
    def label(self) -> str:
        return repeated(self.name, len(self.members))

    @cached_property
    def layouts(self) -> dict[str, str]:
        return dict(layouts_of(self.members[0]))


def _layer_columns(levels: Sequence[Level]) -> tuple[Column[_Group], ...]:
    return (
        Column("layer", lambda group: group.label),
        Column(heading(levels), lambda group: str(group.members[0].strategy), name="strategy"),
        Column("input", lambda group: group.layouts["input"], rank=4),
        Column("weight", lambda group: group.layouts["weight"], rank=5),
        Column("output", lambda group: group.layouts["output"], rank=3),
        Column("compute", lambda group: format_seconds(sum(m.compute_s for m in group.members)), right=True, rank=1),
        Column(
            "communication", lambda group: format_seconds(sum(m.communication_s for m in group.members)), right=True
        ),
        Column("sent", lambda group: format_bytes(sum(m.sent_bytes for m in group.members)), right=True, rank=2),
    )


def _layers(planned: Planned) -> Section:
    levels = planned.cluster.levels
    table = Table.of(_layer_columns(levels), _grouped(planned.assessment.layers))
    return ["Per layer (time and bytes sent by each device per step)", table, legend(levels)]


def _grouped(layers: Iterable[LayerAssessment]) -> list[_Group]:
    """In the order of their first layers."""
    groups: dict[object, _Group] = {}
    for assessed in layers:
        name = place(assessed.layer)
        groups.setdefault((name, assessed.strategy), _Group(name, [])).members.append(assessed)
    return list(groups.values())


# ---- Totals and baselines ----------------------------------------------------------------------------------------------------

_TOTALS: tuple[Column[tuple[str, ...]], ...] = (Column(), Column(), Column(wraps=True))


def _totals(planned: Planned) -> Section:
    assessment, workload = planned.assessment, planned.workload
    state = sum(layer.work.state_bytes for layer in assessment.layers)
    kept = sum(layer.work.kept_bytes for layer in assessment.layers)
    buffer = max(layer.work.buffer_bytes for layer in assessment.layers)
    rate = workload.batch / assessment.step_s
    peak = planned.cluster.num_devices * planned.cluster.device.peak_flops[workload.precision]
    utilisation = 3 * planned.graph.flops * rate / peak
    rows = (
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
    )
    return ["Per step", Table(_TOTALS, rows)]


@dataclass(frozen=True)
class _Row:
    """A plan beside the one that was found: ``how`` it is made."""

    name: str
    figures: Assessment
    ours: Assessment
    how: str = ""

    def ratio(self, theirs: float, ours: float) -> str:
        """To the plan's own; nothing in its own row."""
        return f"{theirs / ours:.2f}x" if self.figures is not self.ours and ours > 0 else ""


_BASELINES: tuple[Column[_Row], ...] = (
    Column("plan", lambda row: row.name),
    Column("step", lambda row: format_seconds(row.figures.step_s), right=True),
    Column("", lambda row: row.ratio(row.figures.step_s, row.ours.step_s), right=True),
    Column("communication", lambda row: format_seconds(row.figures.communication_s), right=True, rank=3),
    Column(
        "",
        lambda row: row.ratio(row.figures.communication_s, row.ours.communication_s),
        right=True,
        rank=4,
        name="ratio of communication",
    ),
    Column("memory", lambda row: format_bytes(row.figures.memory_bytes), right=True, rank=2),
    Column("", lambda row: row.how, name="how", wraps=True, rank=1),
)


def _baselines(planned: Planned) -> Section:
    ours = planned.assessment
    rows, why = [_Row("AutoDDL", ours, ours)], []
    for figures in planned.baselines:
        if figures.assessment is None:
            why.append(f"  {figures.name}: infeasible, {figures.infeasible}")
        else:
            rows.append(_Row(figures.name, figures.assessment, ours, _how(figures)))
    return ["Compared with", Table.of(_BASELINES, rows), *why]


def _how(figures: BaselineFigures) -> str:
    assert figures.workload is not None
    again = ", recomputed" if figures.workload.recompute else ""
    return f"{figures.mesh}, micro-batch {figures.workload.micro_batch}{again}"


# ---- The certificate ---------------------------------------------------------------------------------------------------------


def _certificate(planned: Planned) -> Section:
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
    lines: list[Block] = ["Certificate", f"  {verdict}", f"  {found}; cost and memory recomputed from the layer graph"]
    return lines
