"""Quantities that are affine in one variable: the samples of a micro-batch, or the bytes of a tensor.

The formulas of costs take numbers.  They also take an :class:`Affine`, and then return the fixed part and the slope of the cost:

>>> def seconds(samples):
...     return 0.5 + 3 * samples / 2
>>> seconds(4)
6.5
>>> seconds(VARIABLE)
Affine(fixed=0.5, slope=1.5)
"""

from __future__ import annotations

from typing import Any

__all__ = ["VARIABLE", "Affine", "parts_of"]


class Affine:
    """The function ``fixed + slope * x`` of a variable x >= 0.

    Sums of such functions and their multiples are such functions.  Products of two of them are not, and raise a TypeError.

    Attributes:
        fixed, slope: numbers, or arrays of numbers.
    """

    # No frozen dataclass: pricing makes thousands of these, and a plain class is made in half the time.
    __slots__ = ("fixed", "slope")

    #: So that ``array * affine`` calls :meth:`__rmul__` with the whole array.
    __array_ufunc__ = None

    def __init__(self, fixed: Any, slope: Any):
        self.fixed = fixed
        self.slope = slope

    def __repr__(self) -> str:
        return f"Affine(fixed={self.fixed!r}, slope={self.slope!r})"

    def __add__(self, other: Any) -> Affine:
        if isinstance(other, Affine):
            return Affine(self.fixed + other.fixed, self.slope + other.slope)
        return Affine(self.fixed + other, self.slope)

    __radd__ = __add__

    def __neg__(self) -> Affine:
        return Affine(-self.fixed, -self.slope)

    def __sub__(self, other: Any) -> Affine:
        return self + -other

    def __rsub__(self, other: Any) -> Affine:
        return -self + other

    def __mul__(self, factor: Any) -> Affine:
        if isinstance(factor, Affine):
            return NotImplemented
        return Affine(self.fixed * factor, self.slope * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Affine:
        if isinstance(divisor, Affine):
            return NotImplemented
        return Affine(self.fixed / divisor, self.slope / divisor)

    def __gt__(self, limit: Any) -> Any:
        """Whether the function exceeds a limit for large x."""
        return (self.slope > 0) | ((self.slope == 0) & (self.fixed > limit))


#: The variable itself.
VARIABLE = Affine(0.0, 1.0)


def parts_of(value: Any) -> tuple[Any, Any]:
    """The fixed part and the slope of a value, which has no slope if it is a number.

    >>> parts_of(3 * VARIABLE + 1), parts_of(7.0)
    ((1.0, 3.0), (7.0, 0.0))
    """
    return (value.fixed, value.slope) if isinstance(value, Affine) else (value, 0.0)
