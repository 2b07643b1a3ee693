"""What to say where nothing divides: the nearest batches or micro-batches that do.

Whether a batch works is for the caller to say; it is looked for upwards and downwards from the one that was refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .limits import LARGEST_BATCH

__all__ = ["divisors", "nearest_batches", "nearest_that_work"]


def divisors(number: int) -> list[int]:
    """All divisors, ascending; O(sqrt(number)).

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest_that_work(what: str, value: int, working: Iterable[int]) -> str:
    """The nearest of some numbers below and above ``value``, as the end of a message.

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
    """The largest batch below, and the smallest above ``batch``, that work; of those within reach.

    Args:
        works: whether a batch does.
        reach: how many are looked at on either side; as many as devices are enough where multiples of them work.
        multiple: of which only multiples are looked at: a micro-batch that is given.

    >>> nearest_batches(100, lambda batch: batch % 8 == 0, reach=8)
    [96, 104]
    """
    middle = batch // multiple
    below = (multiple * k for k in range(middle - (batch % multiple == 0), max(0, middle - reach - 1), -1))
    above = (multiple * k for k in range(middle + 1, min(middle + reach, LARGEST_BATCH // multiple) + 1))
    found = (next(filter(works, side), None) for side in (below, above))
    return [number for number in found if number is not None]
