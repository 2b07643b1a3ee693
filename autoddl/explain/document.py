"""An explanation as programs read it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .choices import Alternative, Choice
from .explanation import Explanation

__all__ = ["explanation_document"]

FORMAT = "autoddl-explanation"


def explanation_document(explained: Explanation) -> dict[str, Any]:
    """The JSON document; seconds per step, bytes on each device; ``optimal`` is null of a plan that was edited."""
    view, price = explained.view, explained.memory_price
    return {
        "format": FORMAT,
        "version": 1,
        "model": view.model,
        "objective": view.objective,
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
        "strategy": _splits(choice),
        "text": str(choice.strategy),
        "resources_s": dict(choice.resources_s),
        "limited_by": choice.limit or None,
        "strategies": choice.num_options,
        "strategies_that_fit": choice.num_fitting,
        "held": list(choice.held),
        "alternatives": [
            {
                "strategy": _splits(alternative),
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


def _splits(of: Choice | Alternative) -> list[list[int]]:
    return [list(split) for split in of.strategy.splits]
