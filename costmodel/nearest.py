"""The nearest valid batches or micro-batches, for messages about one that does not divide.

The search goes up and down from the refused value; the caller's predicate tells which values are valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .limits import MAX_BATCH

__all__ = ["divisors", "nearest_batches", "nearest_that_work"]


def divisors(number: int) -> list[int]:
    """All divisors, ascending; O(sqrt(number)).

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest_that_work(what: str, value: int, working: Iterable[int]) -> str:
    """The end of a message that names the nearest of the numbers ``working`` below and above ``value``.

    >>> nearest_that_work("micro-batch", 7, [1, 2, 3, 4, 6, 8, 12])
    'the nearest micro-batches that work are 6 and 8'
    >>> nearest_that_work("batch", 5, [8, 16])
    'the nearest batch that works is 8'
    >>> nearest_that_work("batch", 5, [])
    'no batch works'
    """
    numbers = sorted(working)
    below = max((number for number in numbers if number < value), default=None)
    above = min((number for number in numbers if number > value), default=None)
    found = [number for number in (below, above) if number is not None]
    if not found:
        return f"no {what} works"
    if len(found) == 1:
        return f"the nearest {what} that works is {found[0]}"
    return f"the nearest {what}es that work are {found[0]} and {found[1]}"


def nearest_batches(batch: int, works: Callable[[int], bool], reach: int, multiple: int = 1) -> list[int]:
    """The largest valid batch below ``batch`` and the smallest above it, if there are any within reach.

    Args:
        works: whether a batch is valid.
        reach: how many candidates to try on each side.  The number of devices is enough if its multiples are valid.
        multiple: try only multiples of this number (a given micro-batch).

    >>> nearest_batches(100, lambda batch: batch % 8 == 0, reach=8)
    [96, 104]
    """
    middle = batch // multiple
    below = (multiple * k for k in range(middle - (batch % multiple == 0), max(0, middle - reach - 1), -1))
    above = (multiple * k for k in range(middle + 1, min(middle + reach, MAX_BATCH // multiple) + 1))
    found = (next(filter(works, side), None) for side in (below, above))
    return [number for number in found if number is not None]
