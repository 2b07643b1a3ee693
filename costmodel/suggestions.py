"""Suggestions for misspelt names ("did you mean ...?")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .errors import UserError, quote
from .limits import MAX_SHOWN_EACH

__all__ = ["closest", "did_you_mean", "unknown"]

#: Least similarity of names (`difflib.SequenceMatcher.ratio`); "colour" and "cluster" have 0.62.
_LEAST = 0.65


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name most similar to a word; None if none is similar.

    >>> closest("gtp3-13b", ["gpt2", "gpt3-13b"]), closest("red", ["gpt2", "gpt3-13b"])
    ('gpt3-13b', None)
    """
    from difflib import get_close_matches  # imported lazily: only errors need it

    by_lower = {name.lower().lstrip("-"): name for name in known}  # leading dashes would make all options similar
    found = get_close_matches(word[:MAX_SHOWN_EACH].lower().lstrip("-"), by_lower, 1, cutoff=_LEAST)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question for a message; empty if no known name is similar.

    >>> did_you_mean("dgx-a10", ["dgx-a100", "local-cpu"])
    "did you mean 'dgx-a100'?"
    """
    name = closest(word, known)
    return "" if name is None else f"did you mean {name!r}?"


def unknown(what: str, word: object, known: Sequence[str]) -> UserError:
    """The error for an unknown name.

    Args:
        what: what the name is of, such as "method".
        word: the unknown name.
        known: the known names.

    >>> print(unknown("method", "exat", ["exact", "random"]))
    method 'exat' is unknown; did you mean 'exact'? known are exact, random
    """
    hint = did_you_mean(str(word), known)
    return UserError(f"{what} {quote(word)} is unknown; {hint}{' ' if hint else ''}known are {', '.join(known)}")
