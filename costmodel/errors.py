"""The one base of everything that a user can get wrong, and how input is shown in its message."""

from __future__ import annotations

import re

from .limits import MOST_SHOWN, MOST_SHOWN_EACH

__all__ = ["UserError", "one_line", "printable", "quote", "shortened"]

#: What may be the user's in a message: quoted text, and words longer than any of ours.
_INPUT = re.compile(r"(?<!\w)'.*?'(?!\w)|(?<!\w)\".*?\"(?!\w)|\S{32,}")
#: Characters of a whole message; the longest of ours names all models.
_LONGEST_MESSAGE = 1200


class UserError(ValueError):
    """A fault in what the user gave: one line that names the thing, its value and what would be right.

    The command line prints the message and exits with ``exit_code``; library users catch it as a ``ValueError``.
    """

    exit_code = 2


def quote(text: object) -> str:
    """A value of the user's for a message: quoted, without control characters, at most 60 characters of it.

    >>> print(quote("2 us"), quote("x" * 100))
    '2 us' 'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxx'
    """
    return repr(shortened(str(text)))


def shortened(text: str, most: int = MOST_SHOWN_EACH) -> str:
    """The text with its middle left out where it has more than ``most`` characters (at least 3)."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return text[: most - 3 - half] + "..." + text[len(text) - half :]


def printable(message: str) -> str:
    """A message on one line, without control characters, of at most 1,200 characters."""
    characters = (c if c.isprintable() or c.isspace() else repr(c)[1:-1] for c in message)
    return shortened(" ".join("".join(characters).split()), _LONGEST_MESSAGE)


def one_line(message: str) -> str:
    """A message about the user's input as it is printed: `printable`, with at most 200 characters of that input.

    Input is what stands in quotes, and words of 32 characters or more; the longest of them are shortened until all fit.
    """
    text = printable(message)
    parts = [match.span() for match in _INPUT.finditer(text)]
    lengths = [stop - start for start, stop in parts]
    if sum(lengths) > MOST_SHOWN:
        most = next((n for n in range(MOST_SHOWN, 8, -1) if sum(min(length, n) for length in lengths) <= MOST_SHOWN), 8)
        pieces, at, shown = [], 0, 0
        for start, stop in parts:
            if shown + min(stop - start, most) > MOST_SHOWN:
                pieces.append(text[at:start] + "...")
                at = len(text)
                break
            pieces.append(text[at:start] + shortened(text[start:stop], most))
            shown += min(stop - start, most)
            at = stop
        text = "".join(pieces) + text[at:]
    return text
