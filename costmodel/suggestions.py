"""What a user may have meant by a name that is unknown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from .errors import UserError, quote
from .limits import MOST_SHOWN_EACH

__all__ = ["closest", "did_you_mean", "unknown"]


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that is most like a word; None where none is like it.

    >>> closest("gtp3-13b", ["gpt2", "gpt3-13b"]), closest("red", ["gpt2", "gpt3-13b"])
    ('gpt3-13b', None)
    """
    by_lower = {name.lower(): name for name in known}
    found = get_close_matches(word[:MOST_SHOWN_EACH].lower(), by_lower, 1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question to put into a message; empty where nothing is like the word.

    >>> did_you_mean("dgx-a10", ["dgx-a100", "local-cpu"])
    "did you mean 'dgx-a100'?"
    """
    name = closest(word, known)
    return "" if name is None else f"did you mean {name!r}?"


def unknown(what: str, word: object, known: Sequence[str]) -> UserError:
    """The error for a name that is none of those known.

    >>> print(unknown("method", "exat", ["exact", "random"]))
    method 'exat' is unknown; did you mean 'exact'? known are exact, random
    """
    hint = did_you_mean(str(word), known)
    return UserError(f"{what} {quote(word)} is unknown; {hint}{' ' if hint else ''}known are {', '.join(known)}")
