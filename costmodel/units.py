"""Conversion of units at input, and formatting of numbers at output; in between all numbers are in SI units."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .errors import UserError, quote

__all__ = [
    "abridged",
    "counted",
    "format_bytes",
    "format_count",
    "format_memory_limit",
    "format_ranges",
    "format_seconds",
    "format_values",
    "to_si",
]

#: Largest number of runs (:func:`format_ranges`) and of values (:func:`format_values`) on one line.
MAX_RUNS, MAX_VALUES = 8, 32

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SMALL = {"m": 1e3, "u": 1e6, "n": 1e9, "": 1.0}

#: Factor to the SI unit, per quantity and unit; for times the inverse of it.
_FACTORS: dict[str, dict[str, float]] = {
    "time": {f"{prefix}s": factor for prefix, factor in _SMALL.items()},
    "size": {
        **{f"{prefix}B": factor for prefix, factor in {**_PREFIXES, **_BINARY}.items()},
        "bytes": 1.0,
    },
    "rate": {
        **{f"{prefix}B/s": factor for prefix, factor in {**_PREFIXES, **_BINARY}.items()},
        **{f"{prefix}b/s": factor / 8 for prefix, factor in _PREFIXES.items()},
    },
    "compute": {f"{prefix}FLOP/s": factor for prefix, factor in _PREFIXES.items()},
    "flops": {f"{prefix}FLOP": factor for prefix, factor in _PREFIXES.items()},
    "ratio": {"1": 1.0},
    "slowness": {"s/B": 1.0, "ms/B": 1e-3, "us/B": 1e-6, "ns/B": 1e-9, "ps/B": 1e-12},
}


def to_si(value: float, unit: str, quantity: str, what: str) -> float:
    """Convert ``value`` to the SI unit of ``quantity`` (time, size, rate, compute, flops, ratio or slowness).

    Raises:
        UserError: ``unit`` is not a unit of the quantity; ``what`` names the number in the message.

    >>> to_si(5, "us", "time", "latency"), to_si(8, "Gb/s", "rate", "bandwidth")
    (5e-06, 1000000000.0)
    """
    factors = _FACTORS[quantity]
    if unit not in factors:
        raise UserError(f"{what}: unit {quote(unit)} is not a unit of {quantity} ({', '.join(factors)})")
    # Dividing times by an integer makes 5 us exactly 5e-6 s.
    return value / factors[unit] if quantity == "time" else value * factors[unit]


def _scaled(value: float, scales: list[tuple[float, str]]) -> str:
    factor, name = next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])
    scaled = value / factor
    # Do not print 1,000 to 1,023 of a binary unit as 1e+03.
    return f"{scaled:.3g} {name}" if abs(scaled) < 999.5 else f"{scaled:.0f} {name}"


def format_seconds(seconds: float) -> str:
    """Format a time with three significant digits.

    >>> format_seconds(0.001234)
    '1.23 ms'
    """
    return _scaled(seconds, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]) if seconds else "0 s"


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes with three significant digits, in binary units.

    >>> format_bytes(1.5 * 2**30)
    '1.5 GiB'
    """
    return _scaled(nbytes, [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def counted(number: int, what: str) -> str:
    """Format a count with its noun, in the plural unless the number is 1.

    >>> counted(1, "simulation"), counted(1234, "simulation")
    ('1 simulation', '1,234 simulations')
    """
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def format_count(number: int) -> str:
    """A count with separators of thousands; from 10^9 on only its order of magnitude.

    >>> format_count(24_010_000), format_count(3 * 10**15)
    ('24,010,000', '10^15')
    """
    return f"{number:,}" if number < 10**9 else f"10^{len(str(number)) - 1}"


def format_percent(part: float) -> str:
    """A part of a whole; no difference is printed as nothing.

    >>> format_percent(0.0123), format_percent(1e-6)
    ('1.2%', 'less than 0.1%')
    """
    return f"{part:.1%}" if part >= 5e-4 else "less than 0.1%"


def format_memory_limit(nbytes: float) -> str:
    """``4.37 GiB (memory_limit_bytes=4691255296)``: a least memory, and the argument that asks for just so much."""
    return f"{format_bytes(nbytes)} (memory_limit_bytes={nbytes:.17g})"


def format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges.

    If there are more than :data:`MAX_RUNS` runs, a repeating pattern is printed once; otherwise the first runs and the last.

    >>> format_ranges([0, 1, 2, 3, 5])
    '0-3, 5'
    >>> format_ranges(sorted([*range(0, 2048, 8), *range(7, 2048, 8)]))
    '0, 7 of every 8 up to 2047'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > MAX_RUNS:
        pattern, period = _repeated(numbers)
        if pattern < len(numbers):
            return f"{format_ranges(numbers[:pattern])} of every {period} up to {numbers[-1]}"
    return ", ".join(abridged([f"{first}" if first == last else f"{first}-{last}" for first, last in runs], MAX_RUNS))


def _repeated(numbers: Sequence[int]) -> tuple[int, int]:
    """(length, period) of the shortest pattern that repeats, shifted by the period; (number of numbers, 0) if none does."""
    count = len(numbers)
    for pattern in range(1, count // 2 + 1):
        period = numbers[pattern] - numbers[0]
        if period > numbers[pattern - 1] - numbers[0] and all(
            numbers[i + pattern] - numbers[i] == period for i in range(count - pattern)
        ):
            return (pattern, period) if count % pattern == 0 else (count, 0)
    return count, 0


def abridged(words: Sequence[str], most: int) -> list[str]:
    """Shorten a list to ``most`` words: leave out words before the last one.

    >>> abridged(["0", "2", "4", "6", "8"], 4)
    ['0', '2', '...', '8']
    """
    return list(words) if len(words) <= most else [*words[: most - 2], "...", words[-1]]


def format_values(values: Sequence[float]) -> str:
    """Format a list of values, such as one per worker.

    If there are more than :data:`MAX_VALUES`, equal neighbours are joined.

    >>> format_values([4] * 1022 + [2, 1])
    '4 (1,022 times) 2 1'
    """
    words = [f"{value:g}" for value in values]
    if len(words) > MAX_VALUES:
        runs = [(word, len(list(run))) for word, run in groupby(words)]
        words = [word if count == 1 else f"{word} ({count:,} times)" for word, count in runs]
    return " ".join(abridged(words, MAX_VALUES))
