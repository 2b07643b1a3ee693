"""Turns texts of a plan into Python source, so that no text of a plan is ever executed.

A text of a plan (the name of a model or layer, a note) is written into a file in three ways only: as a one-line comment (`comment`,
`plain_text`), as an ASCII string literal (`literal`), or as an identifier made from it (`Names`).
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Iterable, Mapping

from .library import known_names

__all__ = ["Names", "comment", "literal", "plain_text", "value_text"]

#: Numbered variables of the statements of layers. Identifiers made from layer names must differ from them.
_NUMBERED = re.compile(r"(weight|bias|input)_\d+")
#: Longer texts are cut in comments.
_MAX_COMMENT_CHARACTERS = 300


def comment(text: str) -> str:
    """Return a one-line comment. Characters that cannot be printed, such as line ends, are escaped.

    >>> comment("two\\nlines")
    '# two\\\\nlines'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    if len(shown) > _MAX_COMMENT_CHARACTERS:
        shown = f"{shown[:_MAX_COMMENT_CHARACTERS]}..."
    return f"# {shown}".rstrip()


def plain_text(text: str) -> str:
    """Return a text for use inside of a docstring or a comment: without line ends, backslashes and double quotes."""
    return comment(text)[2:].replace("\\", "/").replace('"', "'")


def literal(text: str) -> str:
    """Return a string literal in ASCII.

    >>> print(literal("h.0"))
    "h.0"
    """
    shown = ascii(text)
    return f'"{shown[1:-1]}"' if shown[0] == "'" and '"' not in shown and "\\'" not in shown else shown


def value_text(value: object) -> str:
    """Return a literal for a number, a boolean, a string, None, or a tuple, list or mapping of these.

    >>> value_text({"shape": (2,), "bias": None})
    '{"shape": (2,), "bias": None}'
    """
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
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
    """Makes an identifier for each text; different texts get different identifiers.

    Identifiers differ from keywords, builtins and names of the library.

    Args:
        reserved: further names that identifiers must differ from.

    >>> names = Names()
    >>> names.of("mlp.c_fc"), names.of("mlp/c_fc"), names.of("mlp.c_fc")
    ('mlp_c_fc', 'mlp_c_fc_2', 'mlp_c_fc')
    """

    def __init__(self, reserved: Iterable[str] = ()):
        self._taken = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *known_names(), *reserved}
        self._identifiers: dict[str, str] = {}

    def of(self, text: str) -> str:
        """Return the identifier for a text; the same at every call."""
        if text not in self._identifiers:
            stem = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:60] or "layer"
            stem = f"_{stem}" if stem[0].isdigit() else stem
            if stem in self._taken and _NUMBERED.fullmatch(f"{stem}_2"):
                stem = f"{stem}_layer"  # a number after it would make it the name of a variable of programs
            name, count = stem, 1
            while name in self._taken or _NUMBERED.fullmatch(name):
                count += 1
                name = f"{stem}_{count}"
            self._taken.add(name)
            self._identifiers[text] = name
        return self._identifiers[text]
