"""An explanation as people and programs read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autoddl.costmodel.units import format_bytes, format_seconds

from ..tables import aligned
from .alternatives import Alternative, Choice
from .explanation import Explanation
from .view import PlanView

__all__ = ["explanation_document", "explanation_text", "memory_sentence", "regret_text"]

FORMAT = "autoddl-explanation"
#: Increases of a resource's time below this part of the regret are not named.
_NAMED = 0.05


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


# ------------------------------------------------------------------------------------------------------------ for people


def explanation_text(explained: Explanation) -> str:
    """What limits the step, the memory, and every choice with its alternatives."""
    view = explained.view
    sections = [_heading(view), _time(view), ["Memory", f"  {memory_sentence(explained)}"]]
    sections.append(["Choices and their nearest alternatives", f"  {explained.scope}"])
    sections += [_choices(view, section.title, section.choices) for section in explained.sections]
    if any(a.limit == "memory" for section in explained.sections for c in section.choices for a in c.alternatives):
        sections.append(["memory: without the memory limit this choice would be as good or better"])
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(view: PlanView) -> list[str]:
    what = (
        "" if view.objective == "step" else f", of it {format_seconds(view.communication_s)} communication (minimised)"
    )
    return [view.heading, f"  {format_seconds(view.step_s)} per step{what}, {view.verdict}"]


def _time(view: PlanView) -> list[str]:
    rows = [("resource", "busy", "of the step", "twice as fast saves")]
    for part in sorted(view.parts, key=lambda part: -part.seconds):
        saves = "" if part.kind == "idle" else format_seconds(part.seconds / 2)
        rows.append((part.name, format_seconds(part.seconds), f"{_share(part.seconds, view.step_s)}", saves))
    title = "What limits the step"
    if view.plan.pipeline is not None:
        title += f" (worker {view.plan.pipeline.busiest}, the busiest)"
    return [title, *aligned(rows, right=(1, 2, 3))]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def memory_sentence(explained: Explanation) -> str:
    """How full the devices are, and what the limit costs."""
    view, price = explained.view, explained.memory_price
    used = f"{format_bytes(view.memory_bytes)} of {format_bytes(view.memory_limit_bytes)} on the fullest device"
    if price is None:
        return used
    saved = view.cost_s - price.unlimited_s
    if saved <= 1e-9 * view.cost_s:
        return f"{used}; the limit costs nothing at this micro-batch"
    least = "" if price.is_exact else "at best "
    sentence = (
        f"{used}; without the limit {least}{format_seconds(saved)} less ({saved / view.cost_s:.2%}) at this micro-batch"
    )
    if price.seconds_per_byte:
        sentence += f", and the first GiB more is worth about {format_seconds(price.seconds_per_byte * 2**30)}"
    return sentence


def _choices(view: PlanView, title: str, choices: Sequence[Choice]) -> list[str]:
    rows: list[tuple[str, ...]] = [("layer", "strategy", "regret", "", "what it spends more on; what changes with it")]
    for choice in choices:
        count = f" x {len(choice.layers)}" if len(choice.layers) > 1 and " = " not in choice.name else ""
        rows.append((choice.name + count, str(choice.strategy), "", "", _chosen(choice)))
        for alternative in choice.alternatives:
            regret = regret_text(alternative, view.cost_s)
            rows.append(("", str(alternative.strategy), *regret, why_text(alternative)))
        if choice.num_options == 1:
            rows.append(("", "(no other)", "", "", ""))
    return [*([title] if title else []), *aligned(rows, right=(2, 3))]


def _chosen(choice: Choice) -> str:
    """What the chosen strategy spends its time on."""
    text = f"{format_seconds(choice.seconds)}, mostly {choice.limit}" if choice.limit else "no time"
    if len(choice.held) < len(choice.layers):
        text += f"; alternatives: of {choice.held[0]} alone"
    if choice.num_fitting < choice.num_options:
        text += f"; {choice.num_options - choice.num_fitting} of {choice.num_options} strategies fit no plan in memory"
    return text


def regret_text(alternative: Alternative, cost_s: float) -> tuple[str, str]:
    """In seconds and as a part of what is minimised."""
    if alternative.regret_s == 0:
        return ("none" if alternative.is_exact else "at most none", "")
    sign = "+" if alternative.regret_s > 0 else "-"
    seconds = sign + format_seconds(abs(alternative.regret_s))
    known = "" if alternative.is_exact or alternative.least_regret_s is None else "at most "
    relative = alternative.regret_s / cost_s if cost_s else 0.0
    return known + seconds, f"{relative:+.2%}" if abs(relative) >= 5e-5 else "<0.01%"


def why_text(alternative: Alternative) -> str:
    """The resources that it costs, largest first, and how much changes along."""
    floor = _NAMED * abs(alternative.regret_s)
    grown = sorted(
        ((delta, name) for name, delta in alternative.deltas_s.items() if delta > 0 and delta >= floor), reverse=True
    )
    parts = [f"{name} {format_seconds(delta)}" for delta, name in grown[:2]] if alternative.regret_s > 0 else []
    if alternative.limit == "memory":
        parts.insert(0, "memory")
    text = ", ".join(parts) or "as good"
    if alternative.regret_s < 0:
        text = "better than the plan"
    if alternative.moved:
        others = alternative.moved
        text += f"; {others[0]}" + (f" and {len(others) - 1} more change" if len(others) > 1 else " changes")
    return text
