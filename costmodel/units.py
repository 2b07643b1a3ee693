"""Units: converted once, at the boundary; inside everything is SI (seconds, bytes, FLOP/s)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .errors import UserError, quote

__all__ = ["format_bytes", "format_memory_limit", "format_ranges", "format_seconds", "to_si"]

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SMALL = {"m": 1e3, "u": 1e6, "n": 1e9, "": 1.0}

#: Factor to the SI unit, per quantity (for times its inverse).
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
    "ratio": {"1": 1.0},
    "slowness": {"s/B": 1.0, "ms/B": 1e-3, "us/B": 1e-6, "ns/B": 1e-9, "ps/B": 1e-12},
}


def to_si(value: float, unit: str, quantity: str, what: str) -> float:
    """``value`` in the SI unit of ``quantity`` (time, size, rate, compute, ratio or slowness).

    Raises:
        UserError: the unit is not one of that quantity; ``what`` names the number.
    """
    factors = _FACTORS[quantity]
    if unit not in factors:
        raise UserError(f"{what}: unit {quote(unit)} is not a unit of {quantity} ({', '.join(factors)})")
    # Times are divided by a whole number: 5 us is exactly 5e-6 s then.
    return value / factors[unit] if quantity == "time" else value * factors[unit]


def _scaled(value: float, scales: list[tuple[float, str]]) -> str:
    factor, name = next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])
    scaled = value / factor
    # Four digits before the point (1,000 to 1,023 of a binary unit) are not written as 1e+03.
    return f"{scaled:.3g} {name}" if abs(scaled) < 999.5 else f"{scaled:.0f} {name}"


def format_seconds(seconds: float) -> str:
    """Three significant digits: ``1.23 ms``."""
    return _scaled(seconds, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]) if seconds else "0 s"


def format_bytes(nbytes: float) -> str:
    """Three significant digits in binary units: ``1.5 GiB``."""
    return _scaled(nbytes, [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def format_memory_limit(nbytes: float) -> str:
    """``4.37 GiB (--memory-limit 4.369)``: a least memory, and what to ask for, rounded up so that it is enough.

    Four significant digits of GiB, which is what the command line takes.
    """
    gib = nbytes / 2**30
    digits = 3 - math.floor(math.log10(gib)) if gib > 0 else 0
    enough = math.ceil(gib * 10**digits) / 10**digits
    return f"{format_bytes(nbytes)} (--memory-limit {enough:.4g})"


def format_ranges(numbers: Sequence[int]) -> str:
    """``0-3, 5``: numbers in ascending order with runs joined."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
