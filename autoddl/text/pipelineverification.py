"""The verification of a plan with a pipeline as text."""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.units import format_bytes
from autoddl.pipelines.runtime.pipeline.slots import slots_per_micro_batch

from ..verification.pipeline_result import PipelineVerification
from ..verification.result import together
from ..verification.task import NUM_STEPS
from .layers import legend
from .tables import Block, Column, Section, Table, Text
from .verification import (
    ERRORS,
    Group,
    allowed_text,
    changes_table,
    deviation_text,
    grouped,
    losses_row,
    verdict_section,
    worst_text,
)

__all__ = ["pipeline_text"]


def pipeline_text(found: PipelineVerification) -> Text:
    """What ran, a line per layer or repeated block of each stage, the totals, the verdict."""
    return Text((_heading(found), _layers(found), _errors(found), _traffic(found), _verdict(found)))


def _heading(found: PipelineVerification) -> Section:
    schedule = found.schedule
    same = len(set(schedule.widths)) == 1
    widths = str(schedule.widths[0]) if same else ", ".join(map(str, schedule.widths))
    lines: list[Block] = [
        f"{found.model} in {schedule.num_stages} stages on {schedule.num_workers} workers of {widths} ranks, {schedule.name}, "
        "against one device",
        f"  batch {found.workload.batch} in {found.workload.num_micro_batches} micro-batches, float32",
    ]
    if found.changes:
        lines.append("  scaled down, every stage and layer at its planned strategy:")
        lines.append(changes_table(found.changes))
    lines += [f"  {note}" for note in found.notes]
    if found.uncounted:
        lines.append(f"  bytes were counted between stages alone: {found.uncounted}")
        lines.append("  (the steps that ran are compared with the steps that are priced all the same)")
    return lines


# ---- Layers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """A group of layers in stages ``first`` to ``last``."""

    first: int
    last: int
    group: Group

    @property
    def stages(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def _columns(found: PipelineVerification) -> tuple[Column[_Row], ...]:
    def to_price(row: _Row) -> str:
        phases = [phase for member in row.group.members for phase in member.phases.values()]
        return deviation_text(together(phases), found.tolerance)

    return (
        Column("stage", lambda row: row.stages, right=True),
        Column("layer", lambda row: row.group.label),
        Column("(p0,p1,p2)", lambda row: str(row.group.members[0].strategy), rank=1, name="strategy"),
        Column("forward", lambda row: row.group.phase("forward"), right=True, rank=2),
        Column("backward", lambda row: row.group.phase("backward"), right=True, rank=2),
        Column("to price", to_price, right=True),
        Column("gradients", lambda row: row.group.gradient_error(), right=True),
        Column("parameters", lambda row: row.group.parameter_error(), right=True),
        Column("", lambda row: "<- off" if found.is_off(row.group.members) else ""),
    )


def _layers(found: PipelineVerification) -> Section:
    what = "sent" if not found.uncounted else "predicted, not counted"
    halves = "half a micro-batch" if _works_on_halves(found) else "one micro-batch"
    heading = f"Per layer: bytes {what} inside the stage by its ranks, of {halves}, and the worst errors relative to one device"
    return [heading, Table.of(_columns(found), _rows(found)), legend()]


def _rows(found: PipelineVerification) -> list[_Row]:
    """Neighbouring stages with as many layers of each kind, at equal strategies, as one."""
    runs: list[tuple[list[int], list[Group]]] = []
    shape: object = None
    for number, layers in enumerate(found.layers):
        groups = grouped(layers, found.tolerance)
        before, shape = shape, [(group.name, len(group.members), group.members[0].strategy) for group in groups]
        if shape == before:
            numbers, known = runs[-1]
            numbers.append(number)
            for group, more in zip(known, groups):
                group.members.extend(more.members)
        else:
            runs.append(([number], groups))
    return [_Row(numbers[0], numbers[-1], group) for numbers, groups in runs for group in groups]


def _works_on_halves(found: PipelineVerification) -> bool:
    return slots_per_micro_batch(found.schedule) > 1


# ---- Totals ------------------------------------------------------------------------------------------------------------------


def _errors(found: PipelineVerification) -> Section:
    rows = [losses_row(found.losses, found.loss_errors)]
    stale = "" if found.schedule.is_synchronous else ", those of stale weights"
    for what, checks in (
        (f"gradients of step {found.gradient_step}{stale}", found.gradients),
        (f"parameters after {NUM_STEPS} {found.workload.optimizer} steps", found.parameters),
    ):
        rows.append((what, *worst_text(checks)))
    device = "one device" if found.schedule.is_synchronous else "one device with the same delays"
    return [f"Largest errors relative to {device} (allowed: {found.tolerance.values:g})", Table(ERRORS, tuple(rows))]


_TRAFFIC: tuple[Column[tuple[str, ...]], ...] = (
    Column(),
    Column("predicted", right=True),
    Column("sent", right=True),
    Column(right=True),
)


def _traffic(found: PipelineVerification) -> Section:
    what = "A training step" if found.schedule.num_updates == 1 else f"{found.schedule.num_updates} training steps"
    rows: list[tuple[str, ...]] = []
    for name, parts in (("inside stages", found.traffic.inside), ("sums of gradients", found.traffic.gradients)):
        rows.append((name, format_bytes(sum(sent.num_bytes for sent in parts)), "", ""))
    for name, phase in (("between stages", found.between), ("in all", found.run)):
        sent = "" if phase.sent_bytes is None else format_bytes(phase.sent_bytes)
        rows.append((name, format_bytes(phase.predicted_bytes), sent, deviation_text(phase, found.tolerance)))
    return [
        f"{what}, all ranks together{allowed_text(found.tolerance, found.uncounted)}",
        Table(_TRAFFIC, tuple(rows)),
    ]


def _verdict(found: PipelineVerification) -> Section:
    as_what = "one device" if found.schedule.is_synchronous else "one device with the same delays"
    return verdict_section(found.faults, as_what, found.uncounted, found.seconds)
