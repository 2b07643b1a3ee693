"""The explanation of a plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoddl.costmodel.graph_meshes import EAGER
from autoddl.costmodel.units import format_bytes, format_seconds

from ..explain import Alternative, Choice, Explanation, PlanView, Saving, StepPart
from ..explain.view import batch_text
from .layers import legend
from .tables import Column, Section, Table, Text

__all__ = ["explanation_text", "memory_sentence", "regret_text", "saving_sentence", "savings_section", "why_text"]

#: A resource is named if its time grows by at least this part of the regret.
_NAMED_SHARE = 0.05


def explanation_text(explained: Explanation) -> Text:
    """Return what limits the step, the use of memory, and every choice with its alternatives."""
    view = explained.view
    sections = [_heading(view), _step_parts(view), ["Memory", f"  {memory_sentence(explained)}"], savings_section(view)]
    sections.append(["Choices and their nearest alternatives", f"  {explained.scope}"])
    for number, section in enumerate(explained.sections):
        table = Table.of(_CHOICES, _choice_rows(section.choices, view.cost_s))
        sections.append([*([section.title] if section.title else []), table, *([] if number else [legend()])])
    choices = [choice for section in explained.sections for choice in section.choices]
    if any(alternative.limit == "memory" for choice in choices for alternative in choice.alternatives):
        sections.append(["memory: without the memory limit this choice would be as good or better"])
    return Text(tuple(sections))


def savings_section(view: PlanView) -> Section:
    """Return a section with what choices besides splits save and cost; an empty section if there are none."""
    lines = [f"  {saving_sentence(saving, view)}" for saving in view.savings]
    return (
        ["Why it divides and gathers (against the same plan without it, on the fullest device)", *lines]
        if lines
        else []
    )


def saving_sentence(saving: Saving, view: PlanView) -> str:
    """Return a saving in words, with the number of its layers."""
    count, total = len(saving.layers), len(view.plan.graph.layers)
    return f"{saving.sentence} ({count} of {total} layers)"


def _heading(view: PlanView) -> Section:
    minimised = ""
    if view.objective == "communication":
        minimised = f", of it {format_seconds(view.communication_s)} communication (minimised)"
    executed = "" if view.plan.executor == EAGER else f", executor {view.plan.executor}"
    samples = batch_text(view.plan.graph, view.plan.workload.batch)
    return [
        view.heading,
        f"  {samples}",
        f"  {format_seconds(view.step_s)} per step{minimised}, {view.verdict}{executed}",
    ]


def _step_parts(view: PlanView) -> Section:
    columns: tuple[Column[StepPart], ...] = (
        Column("resource", lambda part: part.name),
        Column("busy", lambda part: format_seconds(part.seconds), right=True),
        Column("of the step", lambda part: f"{part.seconds / view.step_s:.1%}" if view.step_s else "", right=True),
        Column(
            "twice as fast saves",
            lambda part: "" if part.kind == "idle" else format_seconds(part.seconds / 2),
            right=True,
            rank=1,
        ),
    )
    title = "What limits the step"
    if view.has_pipeline:
        title += f" (worker {view.evaluation.busiest}, the busiest)"
    return [title, Table.of(columns, sorted(view.parts, key=lambda part: -part.seconds))]


def memory_sentence(explained: Explanation) -> str:
    """Return a sentence that says how full the fullest device is, and what the memory limit costs."""
    view, price = explained.view, explained.memory_price
    used = f"{format_bytes(view.memory_bytes)} of {format_bytes(view.memory_limit_bytes)} on the fullest device"
    if price is None:
        return used
    saved = view.cost_s - price.unlimited_s
    if saved <= 1e-9 * view.cost_s:
        return f"{used}; the limit costs nothing at this micro-batch"
    at_best = "" if price.is_exact else "at best "
    sentence = f"{used}; without the limit {at_best}{format_seconds(saved)} less ({saved / view.cost_s:.2%}) at this micro-batch"
    if price.seconds_per_byte:
        sentence += f", and the first GiB more is worth about {format_seconds(price.seconds_per_byte * 2**30)}"
    return sentence


# ---- Choices -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """A row of a table of choices: a choice, or one of its alternatives, which has no name."""

    name: str
    strategy: str
    remark: str = ""
    regret: str = ""
    relative: str = ""


_CHOICES: tuple[Column[_Row], ...] = (
    Column("layer", lambda row: row.name),
    Column("strategy", lambda row: row.strategy),
    Column("regret", lambda row: row.regret, right=True),
    Column("", lambda row: row.relative, right=True, rank=1, name="regret as a part of the step"),
    Column("what it spends more on; what changes with it", lambda row: row.remark, wraps=True),
)


def _choice_rows(choices: Sequence[Choice], cost_s: float) -> Iterator[_Row]:
    for choice in choices:
        yield _Row(choice.label, str(choice.strategy), _chosen_text(choice))
        for alternative in choice.alternatives:
            yield _Row("", str(alternative.strategy), why_text(alternative), *regret_text(alternative, cost_s))
        if choice.num_options == 1:
            yield _Row("", "(no other)")


def _chosen_text(choice: Choice) -> str:
    """The time of the chosen strategy and its largest part, and remarks on the alternatives."""
    text = f"{format_seconds(choice.seconds)}, mostly {choice.limit}" if choice.limit else "no time"
    if len(choice.held) < len(choice.layers):
        text += f"; alternatives: of {choice.held[0]} alone"
    if choice.num_fitting < choice.num_options:
        text += f"; {choice.num_options - choice.num_fitting} of {choice.num_options} strategies fit no plan in memory"
    return text


def regret_text(alternative: Alternative, cost_s: float) -> tuple[str, str]:
    """Return the regret of an alternative as text: its time, and its part of the plan's cost.

    Args:
        alternative: the alternative.
        cost_s: cost of the plan [s].
    """
    if alternative.regret_s == 0:
        return ("none" if alternative.is_exact else "at most none", "")
    sign = "+" if alternative.regret_s > 0 else "-"
    seconds = sign + format_seconds(abs(alternative.regret_s))
    is_bound = not alternative.is_exact and alternative.least_regret_s is not None
    relative = alternative.regret_s / cost_s if cost_s else 0.0
    return ("at most " if is_bound else "") + seconds, f"{relative:+.2%}" if abs(relative) >= 5e-5 else "<0.01%"


def why_text(alternative: Alternative) -> str:
    """Return the two resources on which an alternative spends the most additional time, and the choices that change with it."""
    smallest = _NAMED_SHARE * abs(alternative.regret_s)
    growth = [(delta, name) for name, delta in alternative.deltas_s.items() if delta > 0 and delta >= smallest]
    growth.sort(reverse=True)
    parts = [f"{name} {format_seconds(delta)}" for delta, name in growth[:2]] if alternative.regret_s > 0 else []
    if alternative.limit == "memory":
        parts.insert(0, "memory")
    text = ", ".join(parts) or "as good"
    if alternative.regret_s < 0:
        text = "better than the plan"
    if alternative.moved:
        others = alternative.moved
        text += f"; {others[0]}" + (f" and {len(others) - 1} more change" if len(others) > 1 else " changes")
    return text
