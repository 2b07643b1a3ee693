"""`UserError`, the base class of all errors in user input, and the formatting of input in messages."""

from __future__ import annotations

import re

from .limits import MAX_SHOWN, MAX_SHOWN_EACH

__all__ = ["UserError", "one_line", "printable", "quote", "shortened", "without_colors"]

#: User input in a message: quoted text, and words longer than any word of our messages.
_INPUT = re.compile(r"(?<!\w)'.*?'(?!\w)|(?<!\w)\".*?\"(?!\w)|\S{32,}")
#: Escape sequences for colors on a terminal, as in OneFlow's messages.
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
#: Characters of a whole message; the longest one lists all models.
_LONGEST_MESSAGE = 1200


class UserError(ValueError):
    """An error in user input.  Its message is one line that names the thing, its value and what would be valid.

    The command line prints the message and exits with ``exit_code``.  Callers of the library can catch it as a ``ValueError``.
    """

    exit_code = 2


def quote(text: object) -> str:
    """Quote a value of user input for a message: without control characters, shortened to 60 characters.

    >>> print(quote("2 us"), quote("x" * 100))
    '2 us' 'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxx'
    """
    return repr(shortened(str(text)))


def shortened(text: str, most: int = MAX_SHOWN_EACH) -> str:
    """Replace the middle of a text by ``...`` if it has more than ``most`` characters (``most`` >= 3).

    >>> shortened("abcdefghijklmnop", 10)
    'abcd...nop'
    """
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return text[: most - 3 - half] + "..." + text[len(text) - half :]


def printable(message: str) -> str:
    """Bring a message onto one line: control characters escaped, at most 1,200 characters."""
    characters = (c if c.isprintable() or c.isspace() else repr(c)[1:-1] for c in message)
    return shortened(" ".join("".join(characters).split()), _LONGEST_MESSAGE)


def without_colors(message: str) -> str:
    """Take the colors of a terminal out of a message.

    >>> without_colors("\\x1b[1mError\\x1b[0m: no GPU")
    'Error: no GPU'
    """
    return _COLORS.sub("", message)


def one_line(message: str) -> str:
    """Bring a message onto one line like :func:`printable`, with at most 200 characters of user input.

    User input is text in quotes and words of 32 characters or more.  The longest are shortened until all fit.
    """
    text = printable(message)
    parts = [match.span() for match in _INPUT.finditer(text)]
    lengths = [stop - start for start, stop in parts]
    if sum(lengths) > MAX_SHOWN:
        most = next((n for n in range(MAX_SHOWN, 8, -1) if sum(min(length, n) for length in lengths) <= MAX_SHOWN), 8)
        pieces, at, shown = [], 0, 0
        for start, stop in parts:
            if shown + min(stop - start, most) > MAX_SHOWN:
                pieces.append(text[at:start] + "...")
                at = len(text)
                break
            pieces.append(text[at:start] + shortened(text[start:stop], most))
            shown += min(stop - start, most)
            at = stop
        text = "".join(pieces) + text[at:]
    return text
