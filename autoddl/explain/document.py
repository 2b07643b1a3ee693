"""The JSON document of an explanation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autoddl.costmodel.strategy import Strategy

from .choices import Choice
from .explanation import Explanation

__all__ = ["explanation_document"]

FORMAT = "autoddl-explanation"


def explanation_document(explained: Explanation) -> dict[str, Any]:
    """Return the JSON document of an explanation.

    Times are seconds per step, memory is bytes of the fullest device.  ``optimal`` is null if the plan was edited.
    """
    view, price = explained.view, explained.memory_price
    return {
        "format": FORMAT,
        "version": 1,
        "model": view.model,
        "objective": view.objective,
        "executor": view.plan.executor,
        "cost_s": view.cost_s,
        "step_s": view.step_s,
        "optimal": None if view.certificate is None else view.certificate.optimal,
        "scope": explained.scope,
        "time": [asdict(part) for part in view.parts],
        "memory_bytes": view.memory_bytes,
        "memory_limit_bytes": view.memory_limit_bytes,
        "without_memory_limit": None
        if price is None
        else {"cost_s": price.unlimited_s, "is_exact": price.is_exact, "seconds_per_byte": price.seconds_per_byte},
        "savings": [
            {
                "choice": saving.choice,
                "layers": list(saving.layers),
                "saved_bytes": saving.saved_bytes,
                "extra_s": saving.extra_s,
                "fits_without": saving.fits,
                "text": saving.sentence,
            }
            for saving in view.savings
        ],
        "sections": [
            {
                "stages": list(section.stages),
                "title": section.title,
                "choices": [_choice_fields(choice) for choice in section.choices],
            }
            for section in explained.sections
        ],
    }


def _choice_fields(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.name,
        "layers": list(choice.layers),
        "strategy": _split_fields(choice.strategy),
        "text": str(choice.strategy),
        "resources_s": dict(choice.resources_s),
        "limited_by": choice.limit or None,
        "strategies": choice.num_options,
        "strategies_that_fit": choice.num_fitting,
        "held": list(choice.held),
        "alternatives": [
            {
                "strategy": _split_fields(alternative.strategy),
                "text": str(alternative.strategy),
                "regret_s": alternative.regret_s,
                "least_regret_s": alternative.least_regret_s,
                "is_exact": alternative.is_exact,
                "limited_by": alternative.limit or None,
                "deltas_s": dict(alternative.deltas_s),
                "memory_bytes": alternative.memory_bytes,
                "moved": list(alternative.moved),
            }
            for alternative in choice.alternatives
        ],
    }


def _split_fields(strategy: Strategy) -> list[list[int]]:
    """``[p0, p1, p2]`` for each network level."""
    return [list(split) for split in strategy.splits]
