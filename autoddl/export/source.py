"""Writing Python source that is harmless whatever a document says.

Text of a document gets into a file in three ways only: as a comment of one line (`comment`), as a string literal in ASCII
(`literal`), or turned into an identifier (`Names`).
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Mapping

from .library import known_names

__all__ = ["Names", "comment", "literal", "plain_text", "value_text"]

#: Variables that layers' statements number: parameters and inputs.
_NUMBERED = re.compile(r"(weight|bias|input)_\d+")
#: Longer texts of a document are cut in comments.
_LONGEST = 300


def comment(text: str) -> str:
    """A comment of one line: what is not printable (line ends, directions of writing) is shown by its number."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    return f"# {shown if len(shown) <= _LONGEST else shown[:_LONGEST] + '...'}".rstrip()


def plain_text(text: str) -> str:
    """A document's text for a docstring or a comment."""
    return comment(text)[2:].replace("\\", "/").replace('"', "'")


def literal(text: str) -> str:
    """A string literal, in ASCII."""
    shown = ascii(text)
    return f'"{shown[1:-1]}"' if shown[0] == "'" and '"' not in shown and "\\'" not in shown else shown


def value_text(value: object) -> str:
    """A literal of numbers, booleans, strings, None, and tuples, lists and mappings of them."""
    if isinstance(value, str):
        return literal(value)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{value_text(k)}: {value_text(v)}" for k, v in value.items()) + "}"
    assert isinstance(value, (tuple, list)), value
    inner = ", ".join(map(value_text, value))
    if isinstance(value, list):
        return f"[{inner}]"
    return f"({inner},)" if len(value) == 1 else f"({inner})"


class Names:
    """Identifiers for texts, each its own, none of them a keyword or anything that the library or Python name so."""

    def __init__(self, reserved: Iterable[str] = ()):
        self._taken = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *known_names(), *reserved}
        self._found: dict[str, str] = {}

    def of(self, text: str) -> str:
        """The identifier for a text, always the same."""
        if text not in self._found:
            stem = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:60] or "layer"
            stem = f"_{stem}" if stem[0].isdigit() else stem
            name, count = stem, 1
            while name in self._taken or _NUMBERED.fullmatch(name):
                count += 1
                name = f"{stem}_{count}"
            self._taken.add(name)
            self._found[text] = name
        return self._found[text]
