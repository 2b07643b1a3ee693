"""Ways of recomputation: what the backward pass computes again instead of keeping it.

===============  =====================================================================================================
way              recomputed
===============  =====================================================================================================
``none``         nothing: every activation is kept
``selective``    the core of attention, from its input
``layers``       every layer, from its evenly split input
``blocks``       every repeated block, from its input; layers outside of the blocks (embedding, head, loss) are not
``blocks:K``     the first K repeated blocks, as with ``blocks``; the others keep everything
===============  =====================================================================================================

In a pipeline every stage has a way of its own, and ``blocks:K`` counts the blocks of the stage.  A stage of K blocks or fewer
recomputes all of them.  So do ``blocks`` and ``blocks:K`` for a model of at most K blocks.

At fixed strategies the time of a step does not decrease with K, and the memory does not increase as long as further blocks are
of the same kind: each recomputed block adds the time of its forward pass and saves the difference between what its layers keep
and its input.  Whatever K is, the activations of one block exist while it is recomputed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache

from .errors import UserError, quote
from .suggestions import did_you_mean

__all__ = [
    "RECOMPUTATIONS",
    "block_limit",
    "check_recomputation",
    "contains",
    "counts_of",
    "first_blocks",
    "least_fitting",
    "num_recomputed_blocks",
    "repeats_no_more",
    "text_of",
    "without",
    "word_of",
]

#: The ways without a number, from the fastest to the one that repeats most.
RECOMPUTATIONS = ("none", "selective", "layers", "blocks")

_PATTERN = re.compile(r"blocks:([1-9][0-9]{0,8})")
_RANGE = re.compile(r"blocks:([1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")


def first_blocks(count: int, num_blocks: int | None = None) -> str:
    """Return the way that recomputes the first ``count`` of ``num_blocks`` blocks.

    >>> first_blocks(3), first_blocks(0), first_blocks(3, num_blocks=3)
    ('blocks:3', 'none', 'blocks')
    """
    if num_blocks is not None and count >= num_blocks:
        return "blocks"
    return f"blocks:{count}" if count else "none"


@cache
def block_limit(way: str) -> int | None:
    """Return K of ``blocks:K``; None for the ways without a number.

    >>> block_limit("blocks:3"), block_limit("blocks")
    (3, None)
    """
    match = _PATTERN.fullmatch(way)
    return int(match[1]) if match else None


def num_recomputed_blocks(way: str, num_blocks: int) -> int:
    """Return how many of a model's blocks a way recomputes as a whole.

    >>> num_recomputed_blocks("blocks:3", 8), num_recomputed_blocks("blocks", 8), num_recomputed_blocks("layers", 8)
    (3, 8, 0)
    """
    if word_of(way) != "blocks":
        return 0
    return min(block_limit(way) or num_blocks, num_blocks)


def word_of(way: str) -> str:
    """Return the way without its number.

    >>> word_of("blocks:3"), word_of("layers")
    ('blocks', 'layers')
    """
    return way.partition(":")[0]


def check_recomputation(way: str, words: tuple[str, ...] = RECOMPUTATIONS) -> None:
    """Check that a text is a way of recomputation.

    Args:
        way: The text.
        words: The allowed ways without a number.

    Raises:
        UserError: it is none.
    """
    if way not in words and not _PATTERN.fullmatch(way):
        hint = did_you_mean(way, words)
        fault = f"recompute {quote(way)} is not one of {', '.join(words)}, or blocks:K with a whole number K from 1"
        raise UserError(f"{fault}; {hint}" if hint else fault)


def least_fitting(counts: range, fits: Callable[[int], bool]) -> int:
    """Return the least number of recomputed blocks of a range with which a plan fits; the greatest does.

    Args:
        counts: The numbers, within which memory does not increase.
        fits: Whether the plan fits with a number; called for about log2(numbers) of them.

    >>> least_fitting(range(1, 8), lambda count: count >= 5)
    5
    """
    while len(counts) > 1:
        half = (len(counts) - 1) // 2
        counts = counts[: half + 1] if fits(counts[half]) else counts[half + 1 :]
    return counts[0]


def contains(ways: str, others: str) -> bool:
    """Return whether some ways, given as ``blocks:k-k'``, contain others.

    >>> contains("blocks:2-5", "blocks:3"), contains("blocks:2-5", "blocks:3-6"), contains("layers", "layers")
    (True, False, True)
    """
    whole, part = counts_of(ways), counts_of(others)
    return ways == others or (whole is not None and part is not None and part[0] in whole and part[-1] in whole)


def without(ways: str, others: str) -> tuple[str, ...]:
    """Return some ways, given as ``blocks:k-k'``, without others that they contain, in up to two parts.

    >>> without("blocks:2-5", "blocks:3-4"), without("blocks:2-3", "blocks:3"), without("layers", "layers")
    (('blocks:2', 'blocks:5'), ('blocks:2',), ())
    """
    whole, part = counts_of(ways), counts_of(others)
    if whole is None or part is None:
        return ()
    rest = (range(whole[0], part[0]), range(part[-1] + 1, whole[-1] + 1))
    return tuple(text_of(counts) for counts in rest if counts)


def text_of(counts: range) -> str:
    """Return the ways ``blocks:K`` for all numbers K of a range as text.

    >>> text_of(range(2, 6)), text_of(range(2, 3))
    ('blocks:2-5', 'blocks:2')
    """
    return f"blocks:{counts[0]}" if len(counts) == 1 else f"blocks:{counts[0]}-{counts[-1]}"


def counts_of(ways: str) -> range | None:
    """Return the numbers K of ``blocks:K`` or ``blocks:k-k'``; None for other texts, and if there are none.

    >>> counts_of("blocks:2-5"), counts_of("blocks:2"), counts_of("blocks"), counts_of("blocks:5-2")
    (range(2, 6), range(2, 3), None, None)
    """
    match = _RANGE.fullmatch(ways)
    return (range(int(match[1]), int(match[2] or match[1]) + 1) or None) if match else None


def repeats_no_more(one: str, other: str) -> bool:
    """Return whether a way repeats nothing that another way does not repeat as well, whatever the model.

    >>> repeats_no_more("selective", "layers"), repeats_no_more("blocks:2", "blocks:3"), repeats_no_more("layers", "blocks:3")
    (True, True, False)
    """
    if word_of(one) == word_of(other) == "blocks":
        return (block_limit(one) or math.inf) <= (block_limit(other) or math.inf)
    if other not in RECOMPUTATIONS:
        return one == "none"
    return RECOMPUTATIONS.index(word_of(one)) <= RECOMPUTATIONS.index(other)
