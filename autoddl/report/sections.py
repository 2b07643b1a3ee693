"""What sections are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from autoddl.costmodel.units import format_bytes, format_seconds

from ..explain import StepPart
from .charts import Segment
from .markup import Content, Markup, element

__all__ = [
    "Cell",
    "Quantity",
    "Section",
    "cell",
    "collapsed",
    "facts",
    "nbytes",
    "number",
    "paragraph",
    "scrolling",
    "seconds",
    "segments_of",
    "swatch",
    "table",
]


@dataclass(frozen=True)
class Section:
    """A part of the page: its anchor, its topic for the navigation, and a heading that states what is found."""

    anchor: str
    topic: str
    finding: str
    content: tuple[Markup, ...]


@dataclass(frozen=True)
class Quantity:
    """A number in a table: as it is shown, as the table is sorted by it, and exactly, which is shown on hover."""

    shown: Content
    value: float
    exact: str


#: What a table's cell may hold.
Cell = Union[Content, Quantity]


def seconds(value: float) -> Quantity:
    """A time."""
    return Quantity(format_seconds(value), value, f"{value:.9g} s")


def nbytes(value: float) -> Quantity:
    """A size of memory or of a message."""
    return Quantity(format_bytes(value), value, f"{value:,.0f} bytes")


def number(shown: str, value: float) -> Quantity:
    """A ratio, a share or a count."""
    return Quantity(shown, value, f"{value:,.9g}")


def cell(content: Cell, **attributes: str | None) -> Markup:
    """A cell of a table's body."""
    if not isinstance(content, Quantity):
        return element("td", content, **attributes)
    return element("td", content.shown, data_value=f"{content.value!r}", title=content.exact, **attributes)


def collapsed(summary: Content, *content: Content, is_open: bool = False) -> Markup:
    """What is shown once its summary is clicked."""
    return element("details", element("summary", summary), *content, open="" if is_open else None)


def paragraph(*text: Content, class_: str | None = None) -> Markup:
    """A paragraph."""
    return element("p", *text, class_=class_)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    numbers: Sequence[int] = (),
    caption: str | None = None,
    class_: str | None = None,
) -> Markup:
    """A table, which can be sorted by a column; the columns in ``numbers`` are set flush right."""

    def style(column: int) -> str | None:
        return "num" if column in numbers else None

    return element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", *(element("th", x, class_=style(i), scope="col") for i, x in enumerate(head)))),
        element(
            "tbody",
            *(element("tr", *(cell(content, class_=style(i)) for i, content in enumerate(row))) for row in rows),
        ),
        class_=f"sortable {class_}" if class_ else "sortable",
    )


def scrolling(content: Markup, label: str) -> Markup:
    """A box of its own for what may be wider than a phone; it can be reached and scrolled by keyboard."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def facts(rows: Sequence[tuple[str, Content]]) -> Markup:
    """Names and values, in as many columns as fit."""
    pairs = [element("div", element("dt", name), element("dd", value)) for name, value in rows]
    return element("dl", *pairs, class_="facts")


def swatch(style: str) -> Markup:
    """A spot of a style's colour."""
    return element("span", class_=f"swatch {style}", aria_hidden="true")


def segments_of(parts: Sequence[StepPart]) -> list[Segment]:
    """The parts of a step as segments of a bar: work in greys, communication in the accent, waiting pale."""
    found, seen = [], {"compute": 0, "communication": 0}
    for kind, style, shades in (("compute", "work", 3), ("communication", "talk", 4), ("idle", "idle", 1)):
        for part in sorted((part for part in parts if part.kind == kind), key=lambda part: -part.seconds):
            if kind == "idle":
                found.append(Segment(part.name, part.seconds, "idle"))
                continue
            seen[kind] += 1
            found.append(Segment(part.name, part.seconds, f"{style}-{min(seen[kind], shades)}"))
    return found
