"""Reading JSON documents: each has a ``format`` and a ``version`` and is validated field by field.

:mod:`.writing` writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import unicodedata
from collections.abc import Iterable
from typing import Any

from .errors import UserError, quote, shortened
from .limits import MAX_FIGURE, MAX_WHOLE
from .reading import read_text, shown_path

__all__ = ["Fields", "canonical_hash", "load_document", "load_json", "show_json"]


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON allows")


def load_document(path: str | os.PathLike[str], form: str, version: int = 1) -> Fields:
    """Read a JSON document of the given format and version.

    Raises:
        UserError: the file cannot be read, is not JSON, or is of another format or version.
    """
    return check_document(load_json(path), form, version, shown_path(path))


def load_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file of any format.

    Raises:
        UserError: the file cannot be read, or is not JSON.
    """
    return parse_json(read_text(path), shown_path(path))


def parse_json(text: str, where: str) -> Any:
    """Parse a JSON text; ``where`` names it in the error.

    Raises:
        UserError: it is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON document ({error})") from None


def check_document(value: Any, form: str, version: int, where: str) -> Fields:
    """Check format and version of a parsed document, and return its fields.

    Raises:
        UserError: it is not an object of that format and version.
    """
    fields = Fields(value, where)
    if fields.text("format") != form:
        raise UserError(f"{where}: format {quote(value['format'])} should be {form!r}")
    if fields.integer("version") != version:
        raise UserError(f"{where}: version {value['version']} is not supported, only {version} is")
    return fields


class Fields:
    """A JSON object that is read field by field.

    Every method that reads a field raises `UserError` if the field is missing or invalid.  The message names the place, the value
    and what would be valid.

    Attributes:
        value: the parsed object.
        where: its place, for messages: the file and the path of fields.

    >>> fields = Fields({"stages": 4}, "plan.json")
    >>> fields.integer("stages")
    4
    >>> fields.text("name")
    Traceback (most recent call last):
        ...
    autoddl.costmodel.errors.UserError: plan.json: field 'name' is missing
    """

    def __init__(self, value: Any, where: str):
        if not isinstance(value, dict):
            raise UserError(f"{where}: {show_json(value)} should be an object")
        self.value = value
        self.where = where
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.value

    def get(self, name: str) -> Any:
        """The raw value of a required field."""
        self._read.add(name)
        if name not in self.value:
            raise UserError(f"{self.where}: field {name!r} is missing")
        return self.value[name]

    def _typed(self, name: str, kinds: tuple[type, ...], what: str) -> Any:
        value = self.get(name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UserError(f"{self.where}: {name} is {show_json(value)}, should be {what}")
        return value

    def text(self, name: str) -> str:
        """A string of one line."""
        return self._line(name, self._typed(name, (str,), "a string"))

    def _line(self, name: str, value: str) -> str:
        """Refuse line breaks, control characters and surrogates: the text may appear in messages and tables."""
        # isprintable is fast, and false for all of these.
        if not value.isprintable() and any(
            unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in value
        ):
            raise UserError(f"{self.where}: {name} is {show_json(value)}, should be a string of one line")
        return value

    def boolean(self, name: str) -> bool:
        """true or false."""
        return self._typed(name, (bool,), "true or false")

    def integer(self, name: str, minimum: int = 0) -> int:
        """A whole number of at least ``minimum``."""
        value = self._typed(name, (int,), "a whole number")
        if not minimum <= value <= MAX_WHOLE:
            raise UserError(
                f"{self.where}: {name} is {show_json(value)}, should be a whole number of at least {minimum}"
            )
        return value

    def bounded(self, name: str, minimum: int, maximum: int) -> int:
        """A whole number from ``minimum`` to ``maximum``."""
        value = self._typed(name, (int,), "a whole number")
        if not minimum <= value <= maximum:
            raise UserError(
                f"{self.where}: {name} is {show_json(value)}, should be a whole number from {minimum} to {maximum}"
            )
        return value

    def number(self, name: str, minimum: float = 0.0, exclusive: bool = False, maximum: float = MAX_FIGURE) -> float:
        """A finite number of at least (or, if exclusive, more than) ``minimum``, and at most ``maximum``."""
        value = self._typed(name, (int, float), "a number")
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result) or result < minimum or (exclusive and result == minimum):
            bound = f"more than {minimum:g}" if exclusive else f"at least {minimum:g}"
            raise UserError(f"{self.where}: {name} is {show_json(value)}, should be a finite number of {bound}")
        if result > maximum:
            raise UserError(f"{self.where}: {name} is {show_json(value)}, should be at most {maximum:g}")
        return result

    def sequence(self, name: str) -> list[Any]:
        """A list."""
        return self._typed(name, (list,), "a list")

    def integers(self, name: str, minimum: int = 0) -> tuple[int, ...]:
        """A list of whole numbers of at least ``minimum``."""
        values = self.sequence(name)
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= MAX_WHOLE:
                raise UserError(
                    f"{self.where}: {name} holds {show_json(value)}, should hold whole numbers of at least {minimum}"
                )
        return tuple(values)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self.sequence(name)
        for value in values:
            if not isinstance(value, str):
                raise UserError(f"{self.where}: {name} holds {show_json(value)}, should hold strings")
            self._line(name, value)
        return tuple(values)

    def object(self, name: str) -> Fields:
        """A nested object."""
        return Fields(self.get(name), f"{self.where}: {name}")

    def objects(self, name: str) -> list[Fields]:
        """A list of nested objects."""
        return [Fields(value, f"{self.where}: {name}[{i}]") for i, value in enumerate(self.sequence(name))]

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Check that every field was read, except those ``ignored``.  A field that was not is unknown, often misspelt.

        Raises:
            UserError: there is an unknown field.
        """
        unknown = sorted(set(self.value) - self._read - set(ignored))
        if unknown:
            raise UserError(
                f"{self.where}: unknown field {show_json(unknown[0])}; known ones are {', '.join(sorted(self._read))}"
            )


def show_json(value: Any) -> str:
    """A JSON value as text for a message, shortened to 60 characters."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # nested too deeply, or a number too long
        text = f"a {type(value).__name__}"
    return shortened(text)


def canonical_hash(document: Any) -> str:
    """SHA-256 of a JSON value, independent of the order of fields."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
