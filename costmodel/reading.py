"""Reading user input: files of bounded size, integers and numbers.  Invalid input raises a one-line `UserError`.

**Files.**  A bound limits the number of bytes read, also from devices that never end (/dev/zero).  A pipe is read until its
writers close it; if no data arrives for a minute, it is an error.  Text is UTF-8, with or without a byte order mark, without NUL
characters, and with the line ends of any system.

**Numbers.**  Integers have at most 18 ASCII digits.  Python's ``int`` accepts more: digits of other scripts, underscores, and
thousands of digits, in quadratic time.  Other numbers ("figures") are finite and at most 1e30.
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

_WHOLE = re.compile(rf"[0-9]{{1,{limits.MAX_DIGITS}}}")
_FIGURE = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
#: Characters of a number; no program writes more than 25.
_LONGEST_FIGURE = 100
_CHUNK = 2**20


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path for the beginning of a message, shortened to 100 characters."""
    return shortened(os.fspath(path), limits.MAX_SHOWN // 2)


def read_bytes(path: str | os.PathLike[str], what: str = "", most: int = limits.MAX_FILE_BYTES) -> bytes:
    """Read all bytes of a file.

    Args:
        path: of the file.
        what: what the file is, for messages, such as ``hostfile``.
        most: largest size of the file in bytes.

    Raises:
        UserError: the file cannot be read or is larger, or it is a pipe without data for a minute.
    """
    name = f"{what} {shown_path(path)}" if what else f"{shown_path(path)}:"
    try:
        # Without O_NONBLOCK, opening a pipe without writers would block for ever.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return _read(handle, name, most)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character, or one that cannot be encoded
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


def read_text(path: str | os.PathLike[str], what: str = "", most: int = limits.MAX_FILE_BYTES) -> str:
    """Read a text file; line ends become ``\\n``.  The arguments are those of :func:`read_bytes`.

    Raises:
        UserError: as for :func:`read_bytes`, or the file is not UTF-8 text.
    """
    data = read_bytes(path, what, most)
    name = f"{what} {shown_path(path)}" if what else f"{shown_path(path)}:"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} cannot be read (byte {error.start:,} is not UTF-8 text)") from None
    if "\0" in text:
        raise UserError(f"{name} cannot be read (character {text.index(chr(0)):,} is a NUL, not text)")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def csv_rows(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV text as (number of the row's last line, cells); ``where`` names the text in the error.

    Raises:
        UserError: the text is not CSV.
    """
    lines = csv.reader(io.StringIO(text))
    try:
        for row in lines:
            yield lines.line_num, row
    except csv.Error as error:
        raise UserError(f"{where}: line {lines.line_num}: not CSV ({error})") from None


def is_whole(text: str) -> bool:
    """Whether the text is a non-negative integer that :func:`whole_number` accepts.

    >>> is_whole("12"), is_whole("1_000"), is_whole("-1")
    (True, False, False)
    """
    return _WHOLE.fullmatch(text) is not None


def whole_number(text: str, what: str, least: int = 0, most: int = 10**limits.MAX_DIGITS - 1) -> int:
    """Parse an integer.

    Args:
        text: the digits, with an optional sign.
        what: name and place of the number, for the message.
        least, most: the range, inclusive.

    Raises:
        UserError: the text is not an integer in the range.
    """
    negative = least < 0 and text.startswith("-")
    digits = text[1:] if negative or text.startswith("+") else text
    if is_whole(digits):
        value = -int(digits) if negative else int(digits)
        if least <= value <= most:
            return value
    raise UserError(f"{what} is {quote(text)}, should be a whole number from {least} to {most}")


def parse_figure(text: str) -> float:
    """Parse a finite number of absolute value at most 1e30; NaN if the text is not one.

    >>> parse_figure("1e3"), parse_figure("inf")
    (1000.0, nan)
    """
    match = _FIGURE.fullmatch(text.strip()) if len(text) <= _LONGEST_FIGURE else None
    value = float(match[0]) if match else math.nan
    return value if abs(value) <= limits.MAX_FIGURE else math.nan


def figure(text: str, what: str, least: float = 0.0, most: float = limits.MAX_FIGURE) -> float:
    """Parse a number.

    Args:
        text: a decimal number.
        what: name and place of the number, for the message.
        least, most: the range, inclusive.

    Raises:
        UserError: the text is not a finite number in the range.
    """
    value = parse_figure(text)
    if not least <= value <= most:
        raise UserError(f"{what} is {quote(text)}, should be a number from {least:g} to {most:g}")
    return value
