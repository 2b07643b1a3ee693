"""Mutations of what users give: of the structure of JSON documents, of words and numbers in texts, of bytes.

Every function takes a `random.Random` first: a case is made again from its seed.
"""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

#: A character that no seed has and that is printed as it is: so many of it in a message are so many characters of input.
MARKER = "\u0436"

#: What stands where something else should: other types, extreme numbers, texts that are none.
REPLACEMENTS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 1000, 2**31, 2**53 + 1, 2**63, 2**64, -(2**70), 10**12, 10**400, 0.5, -0.0, 1e-320,
    5e-324, 1e18, 1e308, -1e308, "", "x", "B", "S0", "float32", "GB/s", "two\nlines", "\u0000", "\ud800", "\u2028",
    "\u001b[31m", "\u00b2", "\u0663", MARKER * 300, (MARKER + " ") * 300, f"'{MARKER * 150}' '{MARKER * 150}'", [], [[]],
    [0], [1, 1, 1], [[1, 1, 1]], [None], [MARKER * 9] * 60, {}, {"value": 1}, {"": ""}, {MARKER * 300: 1},
)  # fmt: skip

#: What a number of a text is replaced with.
NUMBERS = (
    "0", "-1", "1", "2", "007", "1_000", "+3", "1e3", "1.5", ".5", "5.", "-0", "1e308", "-1e308", "1e400", "1e-320", "nan",
    "inf", "-inf", "0x10", "4294967296", "9223372036854775807", "9223372036854775808", "1000000000000", "999999999999999999",
    "1" * 40, "9" * 5000, "\u00b2", "\u0663", "\u0967\u0968", "\u2460", "\uff11", "1\u00b2", "\u2212 1", MARKER * 300, "",
)  # fmt: skip

#: What a text gets put into it.
PIECES = (
    "\0", "\n", "\r", "\r\n", "\t", " ", ",", ";", ":", "=", "@", "|", "[", "]", "(", ")", "{", "}", "\"", "'", "#", "-",
    "--", "\\", "/", "\ufeff", "\u2028", "\u202e", "\u001b[2J", "\u00b2", "\u0663", "\U0001f4a9", MARKER * 300,
    f"{MARKER} " * 300, "[0-999999999]", "[" * 100, "(x999999999)",
)  # fmt: skip

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DEPTHS = (100, 900, 990, 1000, 100_000)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a document, its own among them."""
    found: list[tuple[Any, ...]] = []
    _collect(value, path, found)
    return found


def _collect(value: Any, path: tuple[Any, ...], found: list[tuple[Any, ...]]) -> None:
    found.append(path)
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            _collect(child, (*path, key), found)


def mutated_document(rng: random.Random, document: Any) -> Any:
    """The document after one to three replacements, deletions, additions, duplications, swaps or scalings."""
    document = json.loads(json.dumps(document))  # a copy, faster than copy.deepcopy
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(places(document))
        if not path:
            if rng.random() < 0.2:
                return copy.deepcopy(rng.choice(REPLACEMENTS))
            continue
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        _change(rng, holder, path[-1])
    return document


def _change(rng: random.Random, holder: Any, key: Any) -> None:
    """Change one member of an object or a list."""
    action = rng.choice(("replace", "replace", "replace", "delete", "add", "duplicate", "swap", "scale", "text"))
    value = holder[key]
    if action == "replace":
        holder[key] = copy.deepcopy(rng.choice(REPLACEMENTS))
    elif action == "delete":
        del holder[key]
    elif action == "add" and isinstance(holder, dict):
        name = rng.choice(("extra", "", "summa", "tied_to", "collectives", "repeat", MARKER * 300))
        holder[name] = copy.deepcopy(rng.choice(REPLACEMENTS))
    elif action == "duplicate" and isinstance(holder, list):
        holder.append(copy.deepcopy(value))
    elif action == "swap" and isinstance(holder, list):
        other = rng.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif action == "scale" and isinstance(value, (int, float)) and not isinstance(value, bool):
        holder[key] = value * rng.choice((-1, 0, 2, 3, 10**6, 10**9, 10**18))
    elif action == "text" and isinstance(value, str):
        holder[key] = mutated_text(rng, value)


def mutated_text(rng: random.Random, text: str) -> str:
    """The text after one to three changes of its numbers, words, lines or characters."""
    for _ in range(rng.randint(1, 3)):
        text = rng.choice(_TEXT_CHANGES)(rng, text)
    return text


def _number(rng: random.Random, text: str) -> str:
    found = list(_NUMBER.finditer(text))
    if not found:
        return text + rng.choice(NUMBERS)
    match = rng.choice(found)
    return text[: match.start()] + rng.choice(NUMBERS) + text[match.end() :]


def _insert(rng: random.Random, text: str) -> str:
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(PIECES) + text[at:]


def _delete(rng: random.Random, text: str) -> str:
    begin = rng.randint(0, len(text))
    return text[:begin] + text[begin + rng.randint(1, 8) :]


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randint(0, len(text))]


def _lines(rng: random.Random, text: str) -> str:
    """A line repeated, dropped, exchanged with another one, or emptied."""
    lines = text.split("\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    action = rng.randrange(4)
    if action == 0:
        lines[at:at] = [lines[at]] * rng.choice((1, 1, 2, 50))
    elif action == 1:
        del lines[at]
    elif action == 2:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at] = ""
    return "\n".join(lines)


def _words(rng: random.Random, text: str) -> str:
    """A word repeated, dropped or exchanged with another one; separators are kept as words."""
    words = re.split(r"(\W)", text)
    at, other = rng.randrange(len(words)), rng.randrange(len(words))
    action = rng.randrange(3)
    if action == 0:
        words[at] = words[at] * rng.choice((2, 3, 300))
    elif action == 1:
        words[at] = ""
    else:
        words[at], words[other] = words[other], words[at]
    return "".join(words)


_TEXT_CHANGES = (_number, _number, _insert, _insert, _delete, _cut, _lines, _words)


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """The bytes with one to four bits flipped, or some bytes exchanged, doubled or cut off."""
    if not data:
        return rng.randbytes(3)
    changed = bytearray(data)
    action = rng.randrange(4)
    at = rng.randrange(len(data))
    if action == 0:
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif action == 1:
        changed[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(1, 3))
    elif action == 2:
        changed[at:at] = changed[at : at + rng.randint(1, 200)]
    else:
        del changed[at:]
    return bytes(changed)


def broken_json(rng: random.Random, document: Any) -> bytes:
    """A mutated document as a file: its structure most often; else its text, its bytes, its numbers, its depth."""
    kind = rng.choice(("structure",) * 6 + ("text", "bytes", "constant", "deep"))
    if kind == "structure":
        return json.dumps(mutated_document(rng, document), ensure_ascii=rng.random() < 0.7).encode(
            "utf-8", "surrogatepass"
        )
    text = json.dumps(document)
    if kind == "text":
        return mutated_text(rng, text).encode("utf-8", "surrogatepass")
    if kind == "bytes":
        return mutated_bytes(rng, text.encode())
    if kind == "constant":
        constant = rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "-0", "1E+2", "01"))
        return text.replace(rng.choice("12"), constant, 1).encode()
    depth = rng.choice(_DEPTHS)
    return b'{"format": ' + b"[" * depth + b"]" * depth + b"}"


def broken_text(rng: random.Random, text: str) -> bytes:
    """A mutated text as a file."""
    if rng.random() < 0.15:
        return mutated_bytes(rng, text.encode())
    return mutated_text(rng, text).encode("utf-8", "surrogatepass")
