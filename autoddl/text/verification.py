"""A verification as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller

from autoddl.costmodel.units import counted, format_bytes

from ..verification.prediction import PHASES
from ..verification.result import LayerCheck, PhaseCheck, Tolerance, ValueCheck, Verification, together, worst
from ..verification.scaling import Change
from ..verification.task import NUM_STEPS
from .layers import legend, place, repeated
from .tables import Block, Column, Section, Table, Text

__all__ = [
    "ERRORS",
    "Group",
    "allowed_text",
    "changes_table",
    "deviation_text",
    "grouped",
    "losses_row",
    "verdict_section",
    "verification_text",
    "worst_text",
]


def verification_text(found: Verification) -> Text:
    """What ran, a line per layer or repeated block, the totals, the verdict."""
    verdict = verdict_section(found.faults, "one device", found.uncounted, found.seconds)
    return Text((_heading(found), _layers(found), _errors(found), _traffic(found), verdict))


def _heading(found: Verification) -> Section:
    levels = " x ".join(f"{size} {name}" for name, size in found.levels)
    workload = found.workload
    passes = f" in {workload.num_micro_batches} micro-batches" if workload.num_micro_batches > 1 else ""
    lines: list[Block] = [f"{found.model} on {found.num_ranks} ranks ({levels}), against one device"]
    lines.append(f"  batch {workload.batch}{passes}, float32" + (", recomputed" if workload.recompute else ""))
    if found.changes:
        lines.append("  scaled down to fit this machine, every layer at its planned strategy:")
        lines.append(changes_table(found.changes))
    lines += [f"  {note}" for note in found.notes]
    if found.uncounted:
        lines.append(f"  bytes were not counted: {found.uncounted}")
        lines.append("  (the steps that ran are compared with the steps that are priced all the same)")
    return lines


_CHANGES: tuple[Column[tuple[str, ...]], ...] = (Column(), Column(right=True), Column(), Column(right=True))


def changes_table(changes: Sequence[Change]) -> Table:
    """What was scaled down: from the plan's value to the one that ran."""
    return Table(_CHANGES, tuple((c.what, c.before, "->", c.after) for c in changes), indent="    ")


# ---- Layers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Equal layers of a repeated block with equal strategies; or one layer."""

    name: str
    members: list[LayerCheck]
    tolerance: Tolerance

    @property
    def label(self) -> str:
        """The name, and how many they are."""
        return repeated(self.name, len(self.members))

    def gradient_error(self) -> str:
        """The worst one."""
        return error_text(worst([check for member in self.members for check in member.gradients]))

    def parameter_error(self) -> str:
        """The worst one."""
        return error_text(worst([check for member in self.members for check in member.parameters]))

    def phase(self, name: str) -> str:
        """The bytes of a phase, of all members."""
        return bytes_text(together([member.phases[name] for member in self.members]), self.tolerance)


def _columns(found: Verification) -> tuple[Column[Group], ...]:
    def to_price(group: Group) -> str:
        return deviation_text(together([member.total for member in group.members]), found.tolerance)

    def mark(group: Group) -> str:
        return "<- off" if any(member.faults(found.tolerance) for member in group.members) else ""

    return (
        Column("layer", lambda group: group.label),
        Column("(p0,p1,p2)", lambda group: str(group.members[0].strategy), rank=1, name="strategy"),
        *(Column(phase, methodcaller("phase", phase), right=True, rank=2) for phase in PHASES),
        Column("to price", to_price, right=True),
        Column("gradients", lambda group: group.gradient_error(), right=True),
        Column("parameters", lambda group: group.parameter_error(), right=True),
        Column("", mark),
    )


def _layers(found: Verification) -> Section:
    what = "sent" if not found.uncounted else "predicted, not counted"
    heading = (
        f"Per layer: bytes {what} by all ranks (of one micro-batch; gradients once per step), and the worst errors relative to "
        "one device"
    )
    return [heading, Table.of(_columns(found), grouped(found.layers, found.tolerance)), legend()]


def grouped(layers: Sequence[LayerCheck], tolerance: Tolerance) -> list[Group]:
    """Repetitions with equal strategies as one, in the order of their first."""
    groups: dict[object, Group] = {}
    for layer in layers:
        groups.setdefault((place(layer), layer.strategy), Group(place(layer), [], tolerance)).members.append(layer)
    return list(groups.values())


def bytes_text(phase: PhaseCheck, tolerance: Tolerance) -> str:
    """What was sent, or where nobody counted what should be; nothing where barriers alone were."""
    value = phase.predicted_bytes if phase.sent_bytes is None else phase.sent_bytes
    if not phase.predicted_bytes and value <= tolerance.noise_bytes * phase.num_readings:
        return "-"
    return format_bytes(value)


def deviation_text(phase: PhaseCheck, tolerance: Tolerance) -> str:
    """With ~ where so few bytes are sent that barriers blur them."""
    if phase.deviation is None:
        return ""
    return ("" if tolerance.resolves(phase) else "~ ") + f"{phase.deviation:+.1%}"


def error_text(check: ValueCheck | None) -> str:
    """As it stands in tables."""
    return "" if check is None else f"{check.error:.1e}"


# ---- Totals ------------------------------------------------------------------------------------------------------------------

#: Of what; the worst error; whose it is.
ERRORS: tuple[Column[tuple[str, ...]], ...] = (Column(), Column(right=True), Column(wraps=True))


def _errors(found: Verification) -> Section:
    rows = (
        losses_row(found.losses, found.loss_errors),
        ("gradients", *worst_text(found.gradients)),
        (f"parameters after {NUM_STEPS} {found.workload.optimizer} steps", *worst_text(found.parameters)),
    )
    return [f"Largest errors relative to one device (allowed: {found.tolerance.values:g})", Table(ERRORS, rows)]


def _traffic(found: Verification) -> Section:
    step, largest = found.step, _largest_deviation(found)
    text = f"  predicted {format_bytes(step.predicted_bytes)}"
    if step.sent_bytes is not None:
        text += f", sent {format_bytes(step.sent_bytes)}" + (
            f" ({deviation_text(step, found.tolerance)})" if step.predicted_bytes else ""
        )
    lines = ["A training step, all ranks together" + allowed_text(found.tolerance, found.uncounted), text]
    if largest is not None:
        lines.append(
            f"  the layer that is farthest from its price: {largest.name} ({deviation_text(largest.total, found.tolerance)})"
        )
    return lines


def losses_row(losses: Sequence[tuple[float, float]], errors: Sequence[float]) -> tuple[str, str, str]:
    """The losses of the ranks, and the worst error of one."""
    return f"loss of {NUM_STEPS} steps", f"{max(errors):.1e}", ", ".join(f"{value:.6g}" for _, value in losses)


def allowed_text(tolerance: Tolerance, uncounted: str) -> str:
    """How far bytes may be off, where they were counted."""
    if uncounted:
        return ""
    return f" (allowed: {tolerance.relative_bytes:.0%}, and {format_bytes(tolerance.noise_bytes)} of barriers)"


def worst_text(checks: Sequence[ValueCheck]) -> tuple[str, str]:
    """The largest error, and whose it is."""
    found = worst(checks)
    if found is None:
        return "", "none"
    return f"{found.error:.1e}", f"{len(checks)} tensors; {found.name} on rank {found.rank}"


def _largest_deviation(found: Verification) -> LayerCheck | None:
    resolves = found.tolerance.resolves
    counted = [x for x in found.layers if x.total.sent_bytes is not None and resolves(x.total)]
    return max(counted, key=lambda layer: abs(layer.total.deviation or 0.0), default=None)


def verdict_section(faults: Sequence[str], as_what: str, uncounted: str, seconds: float) -> Section:
    """Right, or what is off."""
    if faults:
        return [f"Off in {counted(len(faults), 'place')} ({seconds:.0f} s)", *(f"  {fault}" for fault in faults)]
    promised = "takes the steps that it promised" if uncounted else "sends what it promised"
    return [f"Right: the plan computes what {as_what} computes, and {promised} ({seconds:.0f} s)"]
