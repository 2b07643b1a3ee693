"""A verification as people and as programs read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.units import format_bytes

from ..tables import aligned, counted
from .prediction import PHASES
from .result import LayerCheck, PhaseCheck, Tolerance, ValueCheck, Verification, together, worst
from .task import NUM_STEPS

__all__ = [
    "allowed_text",
    "bytes_text",
    "deviation_text",
    "error_text",
    "finite",
    "grouped",
    "losses_document",
    "losses_row",
    "value_document",
    "verdict_lines",
    "verification_document",
    "verification_text",
    "worst_text",
]

FORMAT = "autoddl-verification"


# ---- For people --------------------------------------------------------------------------------------------------------------


def verification_text(found: Verification) -> str:
    """What ran, a line per layer or repeated block, the totals, the verdict."""
    sections = [_heading(found), _layers(found), _totals(found)]
    sections.append(verdict_lines(found.faults, "one device", found.uncounted, found.seconds))
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(found: Verification) -> list[str]:
    levels = " x ".join(f"{size} {name}" for name, size in found.levels)
    workload = found.workload
    passes = f" in {workload.num_micro_batches} micro-batches" if workload.num_micro_batches > 1 else ""
    lines = [f"{found.model} on {found.num_ranks} ranks ({levels}), against one device"]
    lines.append(f"  batch {workload.batch}{passes}, float32" + (", recomputed" if workload.recompute else ""))
    if found.changes:
        lines.append("  scaled down to fit this machine, every layer at its planned strategy:")
        lines += aligned([(f"  {c.what}", c.before, "->", c.after) for c in found.changes], right=(1, 3))
    lines += [f"  {note}" for note in found.notes]
    if found.uncounted:
        lines.append(f"  bytes were not counted: {found.uncounted}")
        lines.append("  (the steps that ran are compared with the steps that are priced all the same)")
    return lines


def _layers(found: Verification) -> list[str]:
    what = "sent" if not found.uncounted else "predicted, not counted"
    rows: list[tuple[str, ...]] = [("layer", "(p0,p1,p2)", *PHASES, "to price", "gradients", "parameters", "")]
    for name, members in grouped(found.layers):
        total = together([member.total for member in members])
        is_off = any(member.faults(found.tolerance) for member in members)
        rows.append(
            (
                f"{name} x {len(members)}" if len(members) > 1 else name,
                str(members[0].strategy),
                *(
                    bytes_text(together([member.phases[phase] for member in members]), found.tolerance)
                    for phase in PHASES
                ),
                deviation_text(total, found.tolerance),
                error_text(worst([check for member in members for check in member.gradients])),
                error_text(worst([check for member in members for check in member.parameters])),
                "<- off" if is_off else "",
            )
        )
    heading = (
        f"Per layer: bytes {what} by all ranks (of one micro-batch; gradients once per step), and the worst errors relative to "
        "one device"
    )
    return [heading, *aligned(rows, right=(2, 3, 4, 5, 6, 7))]


def grouped(layers: Sequence[LayerCheck]) -> list[tuple[str, list[LayerCheck]]]:
    """Repetitions with equal strategies as one, in the order of their first."""
    groups: dict[object, tuple[str, list[LayerCheck]]] = {}
    for layer in layers:
        key = (layer.block, layer.role, layer.strategy) if layer.block else layer.name
        name = f"{layer.block}.*.{layer.role}" if layer.block else layer.name
        groups.setdefault(key, (name, []))[1].append(layer)
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


def _totals(found: Verification) -> list[str]:
    rows = [
        losses_row(found.losses, found.loss_errors),
        ("gradients", *worst_text(found.gradients)),
        (f"parameters after {NUM_STEPS} {found.workload.optimizer} steps", *worst_text(found.parameters)),
    ]
    lines = [f"Largest errors relative to one device (allowed: {found.tolerance.values:g})", *aligned(rows, right=(1,))]
    step, largest = found.step, _largest_deviation(found)
    text = f"  predicted {format_bytes(step.predicted_bytes)}"
    if step.sent_bytes is not None:
        text += f", sent {format_bytes(step.sent_bytes)}" + (
            f" ({deviation_text(step, found.tolerance)})" if step.predicted_bytes else ""
        )
    lines += ["", "A training step, all ranks together" + allowed_text(found.tolerance, found.uncounted), text]
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


def verdict_lines(faults: Sequence[str], as_what: str, uncounted: str, seconds: float) -> list[str]:
    """Right, or what is off."""
    if faults:
        return [f"Off in {counted(len(faults), 'place')} ({seconds:.0f} s)", *(f"  {fault}" for fault in faults)]
    promised = "takes the steps that it promised" if uncounted else "sends what it promised"
    return [f"Right: the plan computes what {as_what} computes, and {promised} ({seconds:.0f} s)"]


# ---- For programs ------------------------------------------------------------------------------------------------------------


def verification_document(found: Verification) -> dict[str, Any]:
    """As one JSON document; numbers that are not finite are None."""
    return {
        "format": FORMAT,
        "version": 1,
        "model": found.model,
        "verdict": "right" if found.is_right else "off",
        "faults": list(found.faults),
        "num_ranks": found.num_ranks,
        "levels": [{"name": name, "size": size} for name, size in found.levels],
        "workload": found.workload.document(),
        "scaled": [{"what": c.what, "before": c.before, "after": c.after} for c in found.changes],
        "notes": list(found.notes),
        "bytes_not_counted": found.uncounted or None,
        "tolerance": {
            "values": found.tolerance.values,
            "relative_bytes": found.tolerance.relative_bytes,
            "noise_bytes": found.tolerance.noise_bytes,
        },
        "losses": losses_document(found.losses, found.loss_errors),
        "largest_gradient_error": finite(max((check.error for check in found.gradients), default=0.0)),
        "largest_parameter_error": finite(max((check.error for check in found.parameters), default=0.0)),
        "step": found.step.document(),
        "layers": [_layer_document(layer) for layer in found.layers],
        "seconds": found.seconds,
    }


def _layer_document(layer: LayerCheck) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "strategy": [list(split) for split in layer.strategy.splits],
        **({"summa": True} if layer.strategy.summa else {}),
        **{phase: layer.phases[phase].document() for phase in PHASES},
        "gradients": [value_document(check) for check in layer.gradients],
        "parameters": [value_document(check) for check in layer.parameters],
    }


def losses_document(losses: Sequence[tuple[float, float]], errors: Sequence[float]) -> list[dict[str, float | None]]:
    """As JSON, step by step."""
    return [
        {"one_device": expected, "ranks": finite(value), "error": finite(error)}
        for (expected, value), error in zip(losses, errors)
    ]


def value_document(check: ValueCheck) -> dict[str, Any]:
    """As JSON."""
    return {"name": check.name, "error": finite(check.error), "rank": check.rank}


def finite(value: float) -> float | None:
    """As JSON, which has no infinity."""
    return value if abs(value) < float("inf") else None
