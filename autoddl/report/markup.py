"""HTML as it should be written by programs: text is escaped unless it was made here."""

from __future__ import annotations

import html
from typing import Union

__all__ = ["Content", "Markup", "element", "join"]

_VOID = frozenset({"br", "col", "link", "meta", "path", "rect", "line", "circle"})


class Markup(str):
    """Text that is HTML already."""


#: What an element may hold: text (escaped), markup, or nothing.
Content = Union[str, None]


def element(tag: str, *children: Content, **attributes: str | float | None) -> Markup:
    """``<tag ...>children</tag>``; ``class_`` stands for class, ``_`` in names for ``-``, and None leaves something out."""
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID and not children:
        return Markup(f"<{tag}{shown}/>")
    return Markup(f"<{tag}{shown}>{join(*children)}</{tag}>")


def join(*parts: Content) -> Markup:
    """One after the other, text escaped."""
    return Markup(
        "".join(part if isinstance(part, Markup) else html.escape(part) for part in parts if part is not None)
    )


def _text(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".")
