"""What sections are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..explain.view import Part
from .charts import Segment
from .markup import Content, Markup, element

__all__ = ["Section", "facts", "paragraph", "scrolling", "segments_of", "swatch", "table"]


@dataclass(frozen=True)
class Section:
    """A part of the page: its anchor, its topic for the navigation, and a heading that states what is found."""

    anchor: str
    topic: str
    finding: str
    content: tuple[Markup, ...]


def paragraph(*text: Content, class_: str | None = None) -> Markup:
    """A paragraph."""
    return element("p", *text, class_=class_)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Content]],
    numbers: Sequence[int] = (),
    caption: str | None = None,
    class_: str | None = None,
) -> Markup:
    """A table; the columns in ``numbers`` are set flush right."""

    def style(column: int) -> str | None:
        return "num" if column in numbers else None

    return element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", *(element("th", x, class_=style(i), scope="col") for i, x in enumerate(head)))),
        element(
            "tbody",
            *(element("tr", *(element("td", cell, class_=style(i)) for i, cell in enumerate(row))) for row in rows),
        ),
        class_=class_,
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


def segments_of(parts: Sequence[Part]) -> list[Segment]:
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
