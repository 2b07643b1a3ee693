"""Mutations of JSON documents, for tests that feed broken files to readers."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

#: What stands where something else should: other types, extreme numbers, texts that are none.
REPLACEMENTS: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e-320, 5e-324, 1e308, -1e308,
    "", "x", "B", "S0", "float32", "GB/s", "two\nlines", "\u0000", "\ud800", "\u2028", "x" * 300,
    [], [[]], [0], [1, 1, 1], [[1, 1, 1]], [None], {}, {"value": 1}, {"": ""},
]  # fmt: skip


#: A fresh copy each: mutations go on inside of them.
replacements = st.sampled_from(REPLACEMENTS).map(copy.deepcopy)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a document, its own among them."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += places(child, (*path, key))
    return found


def _container(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """The document after one to three replacements, deletions, additions, duplications or swaps."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document)))
        if not path:
            if draw(st.booleans()):
                return draw(replacements)
            continue
        holder, key = _container(document, path), path[-1]
        action = draw(st.sampled_from(["replace", "replace", "replace", "delete", "add", "duplicate", "swap", "scale"]))
        if action == "replace":
            holder[key] = draw(replacements)
        elif action == "delete":
            del holder[key]
        elif action == "add" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["extra", "", "summa", "tied_to", "collectives"]))] = draw(replacements)
        elif action == "duplicate" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif action == "swap" and isinstance(holder, list):
            other = draw(st.integers(0, len(holder) - 1))
            holder[key], holder[other] = holder[other], holder[key]
        elif action == "scale" and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * draw(st.sampled_from([-1, 0, 2, 3, 10**9, 10**18]))
    return document


@st.composite
def broken_texts(draw: st.DrawFn, document: Any) -> bytes:
    """A mutated document as a file: sometimes cut off, with bytes changed, or nested too deeply."""
    kind = draw(st.sampled_from(["mutated", "mutated", "mutated", "cut", "bytes", "deep", "constant"]))
    if kind == "mutated":
        return json.dumps(draw(mutated(document))).encode()
    text = json.dumps(document).encode()
    if kind == "cut":
        return text[: draw(st.integers(0, len(text) - 1))]
    if kind == "bytes":
        at = draw(st.integers(0, len(text) - 1))
        return text[:at] + draw(st.binary(min_size=1, max_size=3)) + text[at + draw(st.integers(0, 3)) :]
    if kind == "constant":
        return text.replace(b"1", draw(st.sampled_from([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" * 5000])), 1)
    depth = draw(st.sampled_from([100, 900, 990, 1000, 100_000]))
    return b'{"format": ' + b"[" * depth + b"]" * depth + b"}"
