"""The elements of sections: tables, figures with units, lists of facts, collapsed and scrolling boxes."""

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
    """A section of the page.

    Attributes:
        anchor: its identifier in links.
        topic: its title in the navigation.
        finding: its heading, one sentence with the main result.
        content: its elements.
    """

    anchor: str
    topic: str
    finding: str
    content: tuple[Markup, ...]


@dataclass(frozen=True)
class Quantity:
    """A number in a table.

    Attributes:
        shown: the number as it is shown.
        value: the number that the table is sorted by.
        exact: the number with all digits, shown when the pointer is over it.
    """

    shown: Content
    value: float
    exact: str


#: The content of a cell of a table.
Cell = Union[Content, Quantity]


def seconds(value: float) -> Quantity:
    """Return a time, given in seconds."""
    return Quantity(format_seconds(value), value, f"{value:.9g} s")


def nbytes(value: float) -> Quantity:
    """Return a size of memory or of a message, given in bytes."""
    return Quantity(format_bytes(value), value, f"{value:,.0f} bytes")


def number(shown: str, value: float) -> Quantity:
    """Return a ratio, a share or a count; ``shown`` is its text."""
    return Quantity(shown, value, f"{value:,.9g}")


def cell(content: Cell, **attributes: str | None) -> Markup:
    """Return a cell of the body of a table."""
    if not isinstance(content, Quantity):
        return element("td", content, **attributes)
    return element("td", content.shown, data_value=f"{content.value!r}", title=content.exact, **attributes)


def collapsed(summary: Content, *content: Content, is_open: bool = False) -> Markup:
    """Return content that is hidden until its summary is clicked."""
    return element("details", element("summary", summary), *content, open="" if is_open else None)


def paragraph(*text: Content, class_: str | None = None) -> Markup:
    """Return a paragraph."""
    return element("p", *text, class_=class_)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    numbers: Sequence[int] = (),
    caption: str | None = None,
    class_: str | None = None,
) -> Markup:
    """Return a table, which the reader can sort by any column.

    Args:
        head: titles of the columns.
        rows: cells, row by row.
        numbers: indices of the columns that are right-aligned.
        caption: text above the table.
        class_: style class of the table.
    """

    def style(column: int) -> str | None:
        return "num" if column in numbers else None

    headings = [element("th", title, class_=style(i), scope="col") for i, title in enumerate(head)]
    body = [element("tr", *(cell(content, class_=style(i)) for i, content in enumerate(row))) for row in rows]
    return element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", *headings)),
        element("tbody", *body),
        class_=f"sortable {class_}" if class_ else "sortable",
    )


def scrolling(content: Markup, label: str) -> Markup:
    """Return a box that scrolls sideways if its content is wider than the screen; the keyboard can scroll it too."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def facts(rows: Sequence[tuple[str, Content]]) -> Markup:
    """Return a list of names and values, in as many columns as fit."""
    pairs = [element("div", element("dt", name), element("dd", value)) for name, value in rows]
    return element("dl", *pairs, class_="facts")


def swatch(style: str) -> Markup:
    """Return a spot in the colour of a style, for legends."""
    return element("span", class_=f"swatch {style}", aria_hidden="true")


def segments_of(parts: Sequence[StepPart]) -> list[Segment]:
    """Return the parts of a step as segments of a bar.

    Computation comes first, then communication, then waiting; within each, the longest part comes first and has the first shade.
    """
    segments = []
    for kind, style, num_shades in (("compute", "work", 3), ("communication", "talk", 4), ("idle", "idle", 0)):
        own_parts = sorted((part for part in parts if part.kind == kind), key=lambda part: -part.seconds)
        for number, part in enumerate(own_parts, 1):
            shade = f"{style}-{min(number, num_shades)}" if num_shades else style
            segments.append(Segment(part.name, part.seconds, shade))
    return segments
