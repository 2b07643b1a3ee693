"""Reading what users give: files of bounded size, whole numbers and figures, each refused in one line where it is none.

**Files.**  At most as many bytes are read as a bound allows, of devices that never end (/dev/zero) too.  A pipe is read until its
writers have closed it; where nobody writes into it for a minute, it is refused.  Text is UTF-8, with or without a byte order mark,
without NUL characters; ends of lines are those of any system.

**Numbers.**  Whole numbers are ASCII digits, at most 18 of them.  Python's ``int`` takes more: digits of other scripts,
underscores, and thousands of digits, in quadratic time.  Figures are finite and at most 1e30.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import select
import stat
from collections.abc import Iterator

from . import limits
from .errors import UserError, quote, shortened

__all__ = ["csv_rows", "figure", "is_whole", "parse_figure", "read_bytes", "read_text", "shown_path", "whole_number"]

_WHOLE = re.compile(rf"[0-9]{{1,{limits.MOST_DIGITS}}}")
_FIGURE = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
#: Characters of a figure; no program writes more than 25.
_LONGEST_FIGURE = 100
_CHUNK = 2**20


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as messages begin with it: at most 100 characters."""
    return shortened(os.fspath(path), limits.MOST_SHOWN // 2)


def read_bytes(path: str | os.PathLike[str], what: str = "", most: int = limits.MOST_FILE_BYTES) -> bytes:
    """All bytes of a file.

    Args:
        what: what the file is, for messages: ``hostfile``, say.
        most: bytes that it may have.

    Raises:
        UserError: it cannot be read, is larger, or is a pipe that nobody writes into.
    """
    name = f"{what} {shown_path(path)}" if what else f"{shown_path(path)}:"
    try:
        # Without O_NONBLOCK a pipe that nobody writes into would be waited for here, for ever.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return _read(handle, name, most)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character, or one that is no text
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name} cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _read(handle: int, name: str, most: int) -> bytes:
    found = os.fstat(handle)
    is_plain = stat.S_ISREG(found.st_mode)
    size = found.st_size if is_plain else 0
    chunks: list[bytes] = []
    while size <= most:
        if (
            not is_plain
            and not stat.S_ISDIR(found.st_mode)
            and not select.select([handle], [], [], limits.PIPE_WAIT_S)[0]
        ):
            raise UserError(f"{name} cannot be read (nothing was written into it for {limits.PIPE_WAIT_S:g} s)")
        chunk = os.read(handle, _CHUNK)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
        size = max(size, sum(map(len, chunks))) if is_plain else size + len(chunk)
    raise UserError(f"{name} cannot be read (it has more than {most:,} bytes)")


def read_text(path: str | os.PathLike[str], what: str = "", most: int = limits.MOST_FILE_BYTES) -> str:
    """The text of a file, its lines ended by ``\\n``; arguments and errors as of :func:`read_bytes`.

    Raises:
        UserError: it cannot be read, or is no text.
    """
    data = read_bytes(path, what, most)
    name = f"{what} {shown_path(path)}" if what else f"{shown_path(path)}:"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} cannot be read (byte {error.start:,} is not UTF-8 text)") from None
    if "\0" in text:
        raise UserError(f"{name} cannot be read (character {text.index(chr(0)):,} is a NUL: it is no text)")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def csv_rows(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV text, each with the number of its last line.

    Raises:
        UserError: it is not CSV.
    """
    lines = csv.reader(io.StringIO(text))
    try:
        for row in lines:
            yield lines.line_num, row
    except csv.Error as error:
        raise UserError(f"{where}: line {lines.line_num}: not CSV ({error})") from None


def is_whole(text: str) -> bool:
    """Whether :func:`whole_number` takes the text for a number of at least 0."""
    return _WHOLE.fullmatch(text) is not None


def whole_number(text: str, what: str, least: int = 0, most: int = 10**limits.MOST_DIGITS - 1) -> int:
    """A whole number out of a text.

    Args:
        what: the number's name and place, for the message.
        least, most: what it may be.

    Raises:
        UserError: it is not a whole number, or out of range.
    """
    negative = least < 0 and text.startswith("-")
    digits = text[1:] if negative or text.startswith("+") else text
    if is_whole(digits):
        value = -int(digits) if negative else int(digits)
        if least <= value <= most:
            return value
    raise UserError(f"{what} is {quote(text)}, should be a whole number from {least} to {most}")


def parse_figure(text: str) -> float:
    """A finite number out of a text, at most 1e30 large; NaN where it is none."""
    match = _FIGURE.fullmatch(text.strip()) if len(text) <= _LONGEST_FIGURE else None
    value = float(match[0]) if match else math.nan
    return value if abs(value) <= limits.LARGEST_FIGURE else math.nan


def figure(text: str, what: str, least: float = 0.0, most: float = limits.LARGEST_FIGURE) -> float:
    """A number out of a text.

    Args:
        what: the number's name and place, for the message.
        least, most: what it may be.

    Raises:
        UserError: it is not a number, not finite, or out of range.
    """
    value = parse_figure(text)
    if not least <= value <= most:
        raise UserError(f"{what} is {quote(text)}, should be a number from {least:g} to {most:g}")
    return value
