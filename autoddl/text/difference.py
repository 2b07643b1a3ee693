"""The difference between two plans as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoddl.costmodel.units import format_bytes, format_seconds

from ..diffing import Changed, Figure, LayerChange, PlanDifference
from .explanation import saving_sentence
from .layers import legend, repeated
from .tables import Block, Column, Section, Table, Text

__all__ = ["difference_text"]


def difference_text(difference: PlanDifference, names: tuple[str, str]) -> Text:
    """Return the difference as text.

    Args:
        difference: the difference.
        names: what to call the plans, such as their files.
    """
    plans = (("before", difference.before), ("after", difference.after))
    rows = tuple((when, f"{name}: {view.heading}") for (when, view), name in zip(plans, names))
    head = [Table((Column(), Column(wraps=True)), rows, indent="")]
    if difference.is_empty:
        return Text((head, ["no difference"]))
    properties = (
        ("Model", difference.model),
        ("Cluster", difference.cluster),
        ("Options", difference.options),
        ("Pipeline", difference.pipeline),
    )
    changed: list[Section] = [[title, Table.of(_CHANGES, changes)] for title, changes in properties if changes]
    figures: Section = ["Per step", Table.of(_FIGURES, difference.figures)]
    return Text((head, figures, *changed, _savings(difference), _layers(difference)))


def _savings(difference: PlanDifference) -> Section:
    """What choices besides splits save and cost in each of the plans, if they are not the same."""
    sentences = [
        [saving_sentence(saving, view) for saving in view.savings] for view in (difference.before, difference.after)
    ]
    if sentences[0] == sentences[1]:
        return []
    rows = [
        (when if not number else "", sentence)
        for when, lines in zip(("before", "after"), sentences)
        for number, sentence in enumerate(lines or ["nothing is divided or gathered again"])
    ]
    title = "What is divided and gathered again (against the same plan without it, on the fullest device)"
    return [title, Table((Column(), Column(wraps=True)), tuple(rows))]


def _growth(row: Figure) -> str:
    """After minus before; ``=`` if they are equal."""
    return "=" if row.is_equal else _signed(row.after - row.before, row.unit)


def _ratio(row: Figure) -> str:
    return f"{row.after / row.before:.3f}x" if row.before and not row.is_equal else ""


_FIGURES: tuple[Column[Figure], ...] = (
    Column("", lambda row: row.what),
    Column("before", lambda row: _shown(row.before, row.unit), right=True),
    Column("after", lambda row: _shown(row.after, row.unit), right=True),
    Column("", _growth, right=True, rank=1, name="difference"),
    Column("", _ratio, right=True, rank=2, name="ratio"),
)

_CHANGES: tuple[Column[Changed], ...] = (
    Column("", lambda row: row.what),
    Column("before", lambda row: row.before),
    Column("after", lambda row: row.after, wraps=True),
)


def _shown(value: float, unit: str) -> str:
    return format_seconds(value) if unit == "s" else format_bytes(value)


def _signed(value: float, unit: str) -> str:
    return ("+" if value >= 0 else "-") + _shown(abs(value), unit)


# ---- Layers ------------------------------------------------------------------------------------------------------------------


def _total_growth(rows: Sequence[LayerChange], field: str) -> str:
    """The sum of a field (after minus before) over the rows; ``=`` if it is 0."""
    value = sum(getattr(row, field) for row in rows)
    return _signed(value, "s" if field.endswith("_s") else "B") if abs(value) > 1e-12 else "="


def _growth_of(field: str) -> Callable[[LayerChange], str]:
    return lambda row: _total_growth([row], field)


#: Headings of the fields of `LayerChange` that are compared.
_FIELDS = {
    "compute": "compute_s",
    "communication": "communication_s",
    "sent": "sent_bytes",
    "memory": "memory_bytes",
}
_LAYERS: tuple[Column[LayerChange], ...] = (
    Column("layer", lambda row: repeated(row.name, len(row.layers))),
    Column("before", lambda row: row.before, wraps=True),
    Column("after", lambda row: row.after, wraps=True),
    Column("compute", _growth_of(_FIELDS["compute"]), right=True, rank=2),
    Column("communication", _growth_of(_FIELDS["communication"]), right=True),
    Column("sent", _growth_of(_FIELDS["sent"]), right=True, rank=3),
    Column("memory", _growth_of(_FIELDS["memory"]), right=True, rank=1),
)


def _layers(difference: PlanDifference) -> Section:
    lines: list[Block] = ["Layers (time, bytes sent and memory: after less before, on each device per step)"]
    changed = [row for row in difference.layers if not row.is_same]
    unchanged = [row for row in difference.layers if row.is_same]
    if changed:
        lines += [Table.of(_LAYERS, changed), legend()]
    if unchanged:
        count = sum(len(row.layers) for row in unchanged)
        growth = {name: _total_growth(unchanged, field) for name, field in _FIELDS.items()}
        totals = ", ".join(f"{name} {text}" for name, text in growth.items() if text != "=")
        lines.append(f"  {count} layers keep their strategy" + (f": {totals}" if totals else ""))
    lines += [f"  only before: {name}" for name in difference.removed] + [
        f"  only after: {name}" for name in difference.added
    ]
    return lines
