"""The JSON document of a verification.  Numbers that are not finite are null in the document.

A plan without a pipeline has one stage.  The field ``step`` holds the bytes that all ranks send in one run of the schedule, which
consists of ``steps_per_run`` training steps (one, if the schedule is synchronous).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .result import LayerCheck, ValueCheck, Verification

__all__ = ["FORMAT", "VERSION", "failed_document", "verification_document"]

FORMAT, VERSION = "autoddl-verification", 2


def verification_document(verification: Verification) -> dict[str, Any]:
    """Return the document of a verification."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": verification.model,
        "executor": verification.executor,
        "verdict": "right" if verification.is_right else "off",
        "faults": list(verification.faults),
        "schedule": verification.schedule.name,
        "num_stages": verification.schedule.num_stages,
        "num_ranks": verification.num_ranks,
        "widths": list(verification.schedule.widths),
        "levels": [{"name": name, "size": size} for name, size in verification.levels],
        "workload": verification.workload.document(),
        "scaled": [{"what": c.what, "before": c.before, "after": c.after} for c in verification.changes],
        "notes": list(verification.notes),
        "bytes_not_counted": verification.not_counted_because or None,
        "tolerance": {
            "values": verification.tolerance.values,
            "relative_bytes": verification.tolerance.relative_bytes,
            "noise_bytes": verification.tolerance.noise_bytes,
        },
        "losses": _losses(verification.losses, verification.loss_errors),
        "gradient_step": verification.gradient_step,
        "gradients": [_value(check) for check in verification.gradients],
        "parameters": [_value(check) for check in verification.parameters],
        "largest_gradient_error": _finite(max((check.error for check in verification.gradients), default=0.0)),
        "largest_parameter_error": _finite(max((check.error for check in verification.parameters), default=0.0)),
        "steps_per_run": verification.schedule.num_updates,
        "step": verification.step.document(),
        "between_stages": verification.between.document(),
        "stages": [
            {
                "layers": [layer.name for layer in stage.layers],
                "predicted_bytes": {"inside": stage.inside_bytes, "gradients": stage.gradient_bytes},
            }
            for stage in verification.stages
        ],
        "layers": [
            _layer(verification, number, layer)
            for number, stage in enumerate(verification.stages)
            for layer in stage.layers
        ],
        "seconds": verification.seconds,
    }


def failed_document(model: str, rank: int | None, error: str) -> dict[str, Any]:
    """Return the document of a verification that ended because a rank failed.

    Args:
        model: Name of the model.
        rank: The rank that failed; None if it is unknown.
        error: Message of the error.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "verdict": "failed",
        "rank": rank,
        "error": error,
    }


def _layer(verification: Verification, stage: int, layer: LayerCheck) -> dict[str, Any]:
    return {
        "name": layer.name,
        "stage": stage,
        "kind": layer.kind,
        **layer.strategy.document(),
        **{name: phase.document() for name, phase in layer.phases.items()},
        "gradients": [_value(check) for check in verification.gradients_of([layer])],
        "parameters": [_value(check) for check in verification.parameters_of([layer])],
    }


def _losses(losses: Sequence[tuple[float, float]], errors: Sequence[float]) -> list[dict[str, float | None]]:
    return [
        {"one_device": expected, "ranks": _finite(value), "error": _finite(error)}
        for (expected, value), error in zip(losses, errors)
    ]


def _value(check: ValueCheck) -> dict[str, Any]:
    return {"name": check.name, "error": _finite(check.error), "rank": check.rank}


def _finite(value: float) -> float | None:
    """Return a finite value, or None for infinity and NaN, which JSON does not have."""
    return value if abs(value) < float("inf") else None
