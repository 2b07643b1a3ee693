"""Verifications as programs read them: JSON documents, in which numbers that are not finite are None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .pipeline_result import PipelineVerification
from .prediction import PHASES
from .result import LayerCheck, ValueCheck, Verification

__all__ = ["pipeline_document", "verification_document"]

FORMAT, PIPELINE_FORMAT = "autoddl-verification", "autoddl-pipeline-verification"
#: Of layers inside of a pipeline's stages.
_PASSES = ("forward", "backward")


def verification_document(found: Verification) -> dict[str, Any]:
    """The document of a plan without a pipeline."""
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
        "losses": _losses(found.losses, found.loss_errors),
        "largest_gradient_error": _finite(max((check.error for check in found.gradients), default=0.0)),
        "largest_parameter_error": _finite(max((check.error for check in found.parameters), default=0.0)),
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
        "gradients": [_value(check) for check in layer.gradients],
        "parameters": [_value(check) for check in layer.parameters],
    }


# ---- With a pipeline ----------------------------------------------------------------------------------------------------------


def pipeline_document(found: PipelineVerification) -> dict[str, Any]:
    """The document of a plan with a pipeline."""
    return {
        "format": PIPELINE_FORMAT,
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
        "losses": _losses(found.losses, found.loss_errors),
        "gradient_step": found.gradient_step,
        "gradients": [_value(check) for check in found.gradients],
        "parameters": [_value(check) for check in found.parameters],
        "stages": [
            {
                "layers": [_stage_layer_document(layer) for layer in layers],
                "predicted_bytes": {"inside": inside.num_bytes, "gradients": gradients.num_bytes},
            }
            for layers, inside, gradients in zip(found.layers, found.traffic.inside, found.traffic.gradients)
        ],
        "steps_per_run": found.schedule.num_updates,
        "between_stages": found.between.document(),
        "run": found.run.document(),
        "seconds": found.seconds,
    }


def _stage_layer_document(layer: LayerCheck) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "strategy": [list(split) for split in layer.strategy.splits],
        **{phase: layer.phases[phase].document() for phase in _PASSES},
    }


# ---- What both have in common --------------------------------------------------------------------------------------------


def _losses(losses: Sequence[tuple[float, float]], errors: Sequence[float]) -> list[dict[str, float | None]]:
    """As JSON, step by step."""
    return [
        {"one_device": expected, "ranks": _finite(value), "error": _finite(error)}
        for (expected, value), error in zip(losses, errors)
    ]


def _value(check: ValueCheck) -> dict[str, Any]:
    """As JSON."""
    return {"name": check.name, "error": _finite(check.error), "rank": check.rank}


def _finite(value: float) -> float | None:
    """As JSON, which has no infinity."""
    return value if abs(value) < float("inf") else None
