"""The verification of a plan with a pipeline as people and as programs read it."""

from __future__ import annotations

from typing import Any

from autoddl.costmodel.units import format_bytes
from autoddl.pipelines.runtime.pipeline.slots import slots_per_micro_batch

from ..tables import aligned
from .pipeline_result import PipelineVerification
from .report import (
    allowed_text,
    bytes_text,
    deviation_text,
    error_text,
    grouped,
    losses_document,
    losses_row,
    value_document,
    verdict_lines,
    worst_text,
)
from .result import LayerCheck, together, worst
from .task import NUM_STEPS

__all__ = ["pipeline_document", "pipeline_text"]

FORMAT = "autoddl-pipeline-verification"
_PHASES = ("forward", "backward")


# ---- For people --------------------------------------------------------------------------------------------------------------


def pipeline_text(found: PipelineVerification) -> str:
    """What ran, a line per layer or repeated block of each stage, the totals, the verdict."""
    sections = [_heading(found), _layers(found), _values(found), _traffic(found), _verdict(found)]
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(found: PipelineVerification) -> list[str]:
    schedule = found.schedule
    same = len(set(schedule.widths)) == 1
    widths = str(schedule.widths[0]) if same else ", ".join(map(str, schedule.widths))
    lines = [
        f"{found.model} in {schedule.num_stages} stages on {schedule.num_workers} workers of {widths} ranks, {schedule.name}, "
        "against one device",
        f"  batch {found.workload.batch} in {found.workload.num_micro_batches} micro-batches, float32",
    ]
    if found.changes:
        lines.append("  scaled down, every stage and layer at its planned strategy:")
        lines += aligned([(f"  {c.what}", c.before, "->", c.after) for c in found.changes], right=(1, 3))
    lines += [f"  {note}" for note in found.notes]
    if found.uncounted:
        lines.append(f"  bytes were counted between stages alone: {found.uncounted}")
        lines.append("  (the steps that ran are compared with the steps that are priced all the same)")
    return lines


def _layers(found: PipelineVerification) -> list[str]:
    what = "sent" if not found.uncounted else "predicted, not counted"
    rows: list[tuple[str, ...]] = [
        ("stage", "layer", "(p0,p1,p2)", *_PHASES, "to price", "gradients", "parameters", "")
    ]
    for numbers, groups in _alike(found):
        label = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        for name, members in groups:
            rows.append(
                (
                    label,
                    f"{name} x {len(members)}" if len(members) > 1 else name,
                    str(members[0].strategy),
                    *(
                        bytes_text(together([member.phases[phase] for member in members]), found.tolerance)
                        for phase in _PHASES
                    ),
                    deviation_text(together([phase for m in members for phase in m.phases.values()]), found.tolerance),
                    error_text(worst([check for member in members for check in member.gradients])),
                    error_text(worst([check for member in members for check in member.parameters])),
                    "<- off" if found.is_off(members) else "",
                )
            )
    halves = "half a micro-batch" if _works_on_halves(found) else "one micro-batch"
    heading = f"Per layer: bytes {what} inside the stage by its ranks, of {halves}, and the worst errors relative to one device"
    return [heading, *aligned(rows, right=(0, 3, 4, 5, 6, 7))]


def _alike(found: PipelineVerification) -> list[tuple[list[int], list[tuple[str, list[LayerCheck]]]]]:
    """Neighbouring stages with as many layers of each kind, at equal strategies, as one: their numbers, and their layers."""
    result: list[tuple[list[int], list[tuple[str, list[LayerCheck]]]]] = []
    shape: object = None
    for number, layers in enumerate(found.layers):
        groups = grouped(layers)
        before, shape = shape, [(name, len(members), members[0].strategy) for name, members in groups]
        if shape == before:
            numbers, known = result[-1]
            numbers.append(number)
            for (_, members), (_, more) in zip(known, groups):
                members += more
        else:
            result.append(([number], groups))
    return result


def _works_on_halves(found: PipelineVerification) -> bool:
    return slots_per_micro_batch(found.schedule) > 1


def _values(found: PipelineVerification) -> list[str]:
    rows = [losses_row(found.losses, found.loss_errors)]
    stale = "" if found.schedule.is_synchronous else ", those of stale weights"
    for what, checks in (
        (f"gradients of step {found.gradient_step}{stale}", found.gradients),
        (f"parameters after {NUM_STEPS} {found.workload.optimizer} steps", found.parameters),
    ):
        rows.append((what, *worst_text(checks)))
    device = "one device" if found.schedule.is_synchronous else "one device with the same delays"
    return [f"Largest errors relative to {device} (allowed: {found.tolerance.values:g})", *aligned(rows, right=(1,))]


def _traffic(found: PipelineVerification) -> list[str]:
    what = "A training step" if found.schedule.num_updates == 1 else f"{found.schedule.num_updates} training steps"
    rows: list[tuple[str, ...]] = [("", "predicted", "sent", "")]
    for name, parts in (("inside stages", found.traffic.inside), ("sums of gradients", found.traffic.gradients)):
        rows.append((name, format_bytes(sum(sent.num_bytes for sent in parts)), "", ""))
    for name, phase in (("between stages", found.between), ("in all", found.run)):
        sent = "" if phase.sent_bytes is None else format_bytes(phase.sent_bytes)
        rows.append((name, format_bytes(phase.predicted_bytes), sent, deviation_text(phase, found.tolerance)))
    return [
        f"{what}, all ranks together{allowed_text(found.tolerance, found.uncounted)}",
        *aligned(rows, right=(1, 2, 3)),
    ]


def _verdict(found: PipelineVerification) -> list[str]:
    as_what = "one device" if found.schedule.is_synchronous else "one device with the same delays"
    return verdict_lines(found.faults, as_what, found.uncounted, found.seconds)


# ---- For programs ------------------------------------------------------------------------------------------------------------


def pipeline_document(found: PipelineVerification) -> dict[str, Any]:
    """As one JSON document; numbers that are not finite are None."""
    return {
        "format": FORMAT,
        "version": 2,
        "model": found.model,
        "verdict": "right" if found.is_right else "off",
        "faults": list(found.faults),
        "schedule": found.schedule.name,
        "num_stages": found.schedule.num_stages,
        "num_ranks": found.num_ranks,
        "widths": list(found.schedule.widths),
        "workload": found.workload.document(),
        "scaled": [{"what": c.what, "before": c.before, "after": c.after} for c in found.changes],
        "notes": list(found.notes),
        "bytes_not_counted": found.uncounted or None,
        "losses": losses_document(found.losses, found.loss_errors),
        "gradient_step": found.gradient_step,
        "gradients": [value_document(check) for check in found.gradients],
        "parameters": [value_document(check) for check in found.parameters],
        "stages": [
            {
                "layers": [_layer_document(layer) for layer in layers],
                "predicted_bytes": {"inside": inside.num_bytes, "gradients": gradients.num_bytes},
            }
            for layers, inside, gradients in zip(found.layers, found.traffic.inside, found.traffic.gradients)
        ],
        "steps_per_run": found.schedule.num_updates,
        "between_stages": found.between.document(),
        "run": found.run.document(),
        "seconds": found.seconds,
    }


def _layer_document(layer: LayerCheck) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "strategy": [list(split) for split in layer.strategy.splits],
        **{phase: layer.phases[phase].document() for phase in _PHASES},
    }
