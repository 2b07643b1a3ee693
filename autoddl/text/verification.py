"""The verification of a plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller

from autoddl.costmodel.units import counted, format_bytes
from autoddl.pipelines.joint.result import recomputed_text
from autoddl.pipelines.runtime.pipeline.slots import slots_per_micro_batch

from ..executors import GRAPH
from ..verification.prediction import PHASES
from ..verification.result import LayerCheck, PhaseCheck, Tolerance, ValueCheck, Verification, largest_error, total_of
from .layers import legend, place, repeated
from .tables import Block, Column, Section, Table, Text

__all__ = ["verification_text"]


def verification_text(result: Verification) -> Text:
    """Return what ran, a table of the layers, the largest errors, the traffic of a step, and the verdict."""
    return Text((_heading(result), _layers(result), _errors(result), _traffic(result), _verdict(result)))


def _heading(result: Verification) -> Section:
    schedule, workload = result.schedule, result.workload
    if schedule.num_stages == 1:
        where = f"on {result.num_ranks} ranks ({' x '.join(f'{size} {name}' for name, size in result.levels)})"
    else:
        have_equal_widths = len(set(schedule.widths)) == 1
        widths = str(schedule.widths[0]) if have_equal_widths else ", ".join(map(str, schedule.widths))
        where = f"in {schedule.num_stages} stages on {schedule.num_workers} workers of {widths} ranks, {schedule.name}"
    passes = f" in {workload.num_micro_batches} micro-batches" if workload.num_micro_batches > 1 else ""
    lines: list[Block] = [f"{result.model} {where}, against one device"]
    lines.append(f"  batch {workload.batch}{passes}, {workload.types.compute}" + recomputed_text(workload.recompute))
    if result.changes:
        stages = "every layer" if schedule.num_stages == 1 else "every stage and layer"
        lines.append(f"  scaled down to fit this machine, {stages} at its planned strategy:")
        changes = tuple((change.what, change.before, "->", change.after) for change in result.changes)
        lines.append(Table(_CHANGES, changes, indent="    "))
    lines += [f"  {note}" for note in result.notes]
    if result.executor == GRAPH:
        lines.append("  executed inside OneFlow's nn.Graph; bytes are counted for the whole step only")
    if result.not_counted_because:
        lines.append(f"  bytes were not counted: {result.not_counted_because}")
        if result.executor != GRAPH:
            lines.append("  (the steps that ran are still compared with the priced steps)")
    return lines


_CHANGES: tuple[Column[tuple[str, ...]], ...] = (Column(), Column(right=True), Column(), Column(right=True))


# ---- Layers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LayerRow:
    """A row of the table of layers: the repetitions of a layer with equal strategies.

    Attributes:
        first, last: the first and the last of the equal stages that the row stands for.
        name: block and role of the layer, or its name.
        members: the checks of the repetitions.
        tolerance: the tolerance of the verification.
    """

    first: int
    last: int
    name: str
    members: Sequence[LayerCheck]
    tolerance: Tolerance

    @property
    def stages(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def phase(self, name: str) -> str:
        """The bytes of a phase, summed over all members."""
        return _bytes_text(total_of([member.phases[name] for member in self.members]), self.tolerance)


def _columns(result: Verification) -> tuple[Column[_LayerRow], ...]:
    def to_price(row: _LayerRow) -> str:
        return _deviation_text(total_of([member.total for member in row.members]), result.tolerance)

    def mark(row: _LayerRow) -> str:
        return "<- off" if result.is_off(row.members) else ""

    stage: Column[_LayerRow] = Column("stage", lambda row: row.stages, right=True)
    return (
        *([stage] if len(result.stages) > 1 else []),
        Column("layer", lambda row: repeated(row.name, len(row.members))),
        Column("(p0,p1,p2)", lambda row: str(row.members[0].strategy), rank=1, name="strategy"),
        *(Column(phase, methodcaller("phase", phase), right=True, rank=2) for phase in _phases(result)),
        Column("to price", to_price, right=True),
        Column("gradients", lambda row: _error_text(result.gradients_of(row.members)), right=True),
        Column("parameters", lambda row: _error_text(result.parameters_of(row.members)), right=True),
        Column("", mark),
    )


def _phases(result: Verification) -> Sequence[str]:
    return [phase for phase in PHASES if phase in result.layers[0].phases]


def _layers(result: Verification) -> Section:
    is_counted = not (result.not_counted_because or result.layers_not_counted_because)
    what = "sent" if is_counted else "predicted, not counted"
    where = "by all ranks" if len(result.stages) == 1 else "inside the stage by its ranks"
    of = "half a micro-batch" if slots_per_micro_batch(result.schedule) > 1 else "one micro-batch"
    once = "; gradients once per step" if "gradient" in _phases(result) else ""
    heading = f"Per layer: bytes {what} {where} (of {of}{once}), and the worst errors relative to one device"
    return [heading, Table.of(_columns(result), _rows(result)), legend((), [layer.strategy for layer in result.layers])]


def _rows(result: Verification) -> list[_LayerRow]:
    """The rows of the table of layers.  Neighbouring stages share their rows if layers and strategies are equal."""
    # Each run of equal stages: their numbers, and the layers by place and strategy.
    runs: list[tuple[list[int], dict[object, list[LayerCheck]]]] = []
    signature: object = None
    for number, stage in enumerate(result.stages):
        groups: dict[object, list[LayerCheck]] = {}
        for layer in stage.layers:
            groups.setdefault((place(layer), layer.strategy), []).append(layer)
        previous, signature = signature, [(key, len(members)) for key, members in groups.items()]
        if signature == previous:
            numbers, run_groups = runs[-1]
            numbers.append(number)
            for key, members in groups.items():
                run_groups[key] += members
        else:
            runs.append(([number], groups))
    return [
        _LayerRow(numbers[0], numbers[-1], place(members[0]), members, result.tolerance)
        for numbers, groups in runs
        for members in groups.values()
    ]


def _bytes_text(phase: PhaseCheck, tolerance: Tolerance) -> str:
    """The bytes sent, or the predicted bytes if they were not counted; ``-`` if nothing but barriers was sent."""
    value = phase.predicted_bytes if phase.sent_bytes is None else phase.sent_bytes
    if not phase.predicted_bytes and value <= tolerance.noise_bytes * phase.num_readings:
        return "-"
    return format_bytes(value)


def _deviation_text(phase: PhaseCheck, tolerance: Tolerance) -> str:
    """The deviation of the bytes sent from the price; after ``~`` if so few bytes were sent that barriers blur it."""
    if phase.deviation is None:
        return ""
    return ("" if tolerance.resolves(phase) else "~ ") + f"{phase.deviation:+.1%}"


def _error_text(checks: Sequence[ValueCheck]) -> str:
    """The largest of the errors."""
    check = largest_error(checks)
    return "" if check is None else f"{check.error:.1e}"


# ---- Totals ------------------------------------------------------------------------------------------------------------------

#: What is compared, the largest error, and the tensor and rank that have it.
_ERRORS: tuple[Column[tuple[str, ...]], ...] = (Column(), Column(right=True), Column(wraps=True))


def _errors(result: Verification) -> Section:
    stale = "" if result.schedule.is_synchronous else ", those of stale weights"
    losses = ", ".join(f"{value:.6g}" for _, value in result.losses)
    rows = [(f"loss of {len(result.losses)} steps", f"{max(result.loss_errors):.1e}", losses)]
    for what, checks in (
        (f"gradients of step {result.gradient_step}{stale}", result.gradients),
        (f"parameters after {len(result.losses)} {result.workload.optimizer} steps", result.parameters),
    ):
        check = largest_error(checks)
        whose = "none" if check is None else f"{len(checks)} tensors; {check.name} on rank {check.rank}"
        rows.append((what, _error_text(checks), whose))
    heading = f"Largest errors relative to {_reference(result)} (allowed: {result.tolerance.values:g})"
    return [heading, Table(_ERRORS, tuple(rows))]


_TRAFFIC: tuple[Column[tuple[str, ...]], ...] = (
    Column(),
    Column("predicted", right=True),
    Column("sent", right=True),
    Column(right=True),
)


def _traffic(result: Verification) -> Section:
    num_steps, has_pipeline = result.schedule.num_updates, len(result.stages) > 1
    rows: list[tuple[str, ...]] = [
        ("inside stages" if has_pipeline else "inside layers", *_predicted([s.inside_bytes for s in result.stages])),
        ("sums of gradients", *_predicted([s.gradient_bytes for s in result.stages])),
    ]
    between_stages = [("between stages", result.between)] if has_pipeline else []
    for name, phase in (*between_stages, ("in all", result.step)):
        sent = "" if phase.sent_bytes is None else format_bytes(phase.sent_bytes)
        rows.append((name, format_bytes(phase.predicted_bytes), sent, _deviation_text(phase, result.tolerance)))
    allowed = f"{result.tolerance.relative_bytes:.0%}, and {format_bytes(result.tolerance.noise_bytes)} of barriers"
    lines: list[Block] = [
        ("A training step" if num_steps == 1 else f"{num_steps} training steps")
        + ", all ranks together"
        + ("" if result.not_counted_because else f" (allowed: {allowed})"),
        Table(_TRAFFIC, tuple(rows)),
    ]
    largest = _largest_deviation(result)
    if largest is not None:
        deviation = _deviation_text(largest.total, result.tolerance)
        lines.append(f"  the layer that is farthest from its price: {largest.name} ({deviation})")
    return lines


def _predicted(parts: Sequence[float]) -> tuple[str, str, str]:
    """The cells of a row with a predicted number of bytes and no measured one."""
    return format_bytes(sum(parts)), "", ""


def _largest_deviation(result: Verification) -> LayerCheck | None:
    """The layer with the largest deviation, among the layers that send enough bytes to compare; None if there is none."""
    resolves = result.tolerance.resolves
    resolved = [layer for layer in result.layers if layer.total.sent_bytes is not None and resolves(layer.total)]
    return max(resolved, key=lambda layer: abs(layer.total.deviation or 0.0), default=None)


def _verdict(result: Verification) -> Section:
    duration = f"({result.seconds:.0f} s)"
    if result.faults:
        return [f"Off in {counted(len(result.faults), 'place')} {duration}", *(f"  {fault}" for fault in result.faults)]
    traffic = "takes the steps that it promised" if result.not_counted_because else "sends what it promised"
    return [f"Right: the plan computes what {_reference(result)} computes, and {traffic} {duration}"]


def _reference(result: Verification) -> str:
    """What the results are compared with."""
    return "one device" if result.schedule.is_synchronous else "one device with the same delays"
