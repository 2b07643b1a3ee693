"""Builds HTML elements. Text is escaped unless it is `Markup`, which only this module makes from text."""

from __future__ import annotations

import html
from typing import Union

__all__ = ["Content", "Markup", "element", "join"]

#: Elements that are written without an end tag if they have no children.
_VOID = frozenset({"br", "col", "link", "meta", "path", "rect", "line", "circle"})


class Markup(str):
    """Text that is HTML already, and is not escaped."""


#: The content of an element: text, which is escaped, markup, or nothing.
Content = Union[str, None]


def element(tag: str, *children: Content, **attributes: str | float | None) -> Markup:
    """Return an element ``<tag ...>children</tag>``.

    Args:
        tag: name of the element.
        children: content; None is left out.
        attributes: attributes by name; ``_`` stands for ``-``, a trailing ``_`` is dropped (``class_``), and None is left out.

    >>> element("p", "a < b", class_="lead", aria_label=None)
    '<p class="lead">a &lt; b</p>'
    """
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID and not children:
        return Markup(f"<{tag}{shown}/>")
    return Markup(f"<{tag}{shown}>{join(*children)}</{tag}>")


def join(*parts: Content) -> Markup:
    """Concatenate contents; text is escaped, None is left out."""
    return Markup(
        "".join(part if isinstance(part, Markup) else html.escape(part) for part in parts if part is not None)
    )


def _text(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".")
