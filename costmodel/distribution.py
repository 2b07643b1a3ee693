"""Distributions: the layout of one tensor over a mesh of ranks.

An axis of the mesh is a ``(size, stride)`` pair: rank ``r`` has the coordinate ``r // stride % size`` on it.  The coordinates are
the digits of the rank as a mixed-radix number.  A distribution gives every axis one SBP state::

    (S0:4, B:2, S1:8)            64 ranks: mesh (4, 2, 8), rank = 16 i + 8 j + k
    (S0:2, S1:4 | S0:2, S1:4)    two network levels: 8 nodes (2 x 4) of 8 devices (2 x 4)
    (S0:2@4, S1:2@1, S1:2@2)     8 ranks; the innermost axis (stride 1) cuts dimension 1 before the middle one does

Axes are listed in the order in which they cut the tensor: if several axes split one dimension, the first listed takes the
most significant digit of the index.  Strides are printed (``@``) only if that order differs from the order of the ranks.  ``|``
separates network levels, outermost first.

**Canonical layout.**  Between layers every activation is evenly split.  At each level of ``p`` ranks, rows (samples) are split
over ``p0`` ranks and features over the other ``s = p / p0``.  Rows are cut in rank order, features *innermost axis first*, one
prime factor of ``s`` at a time.  Then a change of ``p0`` by a factor ``r`` moves the last digit of the rows to the last digit of
the features, which is one all-to-all along one axis of size ``r``.  This holds if one of the two values of ``p0`` divides the
other: always if ``p`` is a power of one prime, and for p0 = 2, 4, 12 of 12 ranks, but not between p0 = 2 and p0 = 3 of 12 ranks,
where ranks exchange unequal pieces (:mod:`.exchange`).  (If features were cut in rank order, the new axis would take their most
significant digit and shift all others, so that the all-to-all would involve further axes.)

Images of H x W pixels are tensors of two dimensions (pixels of all images, channels), or of three: (rows of pixels, channels,
columns).  Of the p0 ranks of a level the innermost ``c`` may cut the columns; the others cut rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod

from .errors import UserError, quote
from .sbp import SBPState, Split, dual, parse_state

__all__ = [
    "Axis",
    "Distribution",
    "RowsAndFeatures",
    "canonical",
    "canonical_axes",
    "flat_coordinate",
    "is_tiled",
    "prime_factors",
    "row_slices",
]

#: A canonical layout: (p0, s) for each network level, or (p0, s, c) if c of the p0 ranks cut columns of images.
RowsAndFeatures = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
        size: number of ranks along the axis.
        stride: difference between neighbouring ranks on the axis.
        level: network level whose links connect them; 0 is the outermost.

    >>> [Axis(size=2, stride=2).coordinate(rank) for rank in range(4)]
    [0, 0, 1, 1]
    """

    size: int
    stride: int
    level: int = 0

    def coordinate(self, rank: int) -> int:
        """The coordinate of ``rank`` on this axis, in ``range(size)``."""
        return rank // self.stride % self.size


def flat_coordinate(axes: Sequence[Axis], rank: int) -> int:
    """Which of the slices that axes cut is the rank's: its coordinates as the digits of a number."""
    number = 0
    for axis in axes:
        number = number * axis.size + axis.coordinate(rank)
    return number


@dataclass(frozen=True)
class Distribution:
    """An SBP state for every mesh axis.

    Attributes:
        axes: the mesh axes, in the order in which they cut the tensor (see the module's docstring).
        states: the SBP state of each axis.

    >>> layout = Distribution.parse("(S0:4, B:2, S1:8)")
    >>> layout.num_ranks, layout.local_shape((64, 64)), layout.block(9, 2)
    (64, (16, 8), (0, 1))
    """

    axes: tuple[Axis, ...]
    states: tuple[SBPState, ...]

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.states)

    @classmethod
    def on_mesh(cls, levels: Sequence[Sequence[tuple[int, SBPState]]]) -> Distribution:
        """Make a distribution whose axes are in rank order from the (size, state) pairs of each network level.

        >>> from autoddl.costmodel.sbp import Broadcast
        >>> str(Distribution.on_mesh([[(4, Split(0)), (2, Broadcast())]]))
        '(S0:4, B:2)'
        """
        flat = [(size, state, level) for level, pairs in enumerate(levels) for size, state in pairs]
        stride = prod(size for size, _, _ in flat)
        axes = []
        for size, _, level in flat:
            stride //= size
            axes.append(Axis(size, stride, level))
        return cls(tuple(axes), tuple(state for _, state, _ in flat))

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Read the printed form.

        Raises:
            UserError: the text is not a distribution, or its strides do not make a mesh.
        """
        body = re.fullmatch(r"\s*\((.*)\)\s*", text)
        if body is None:
            raise UserError(f"distribution {quote(text)} is not of the form (S0:4, B:2, S1:8)")
        entries = []
        for level, part in enumerate(body[1].split("|")):
            for item in part.split(",") if part.strip() else []:
                match = re.fullmatch(r"\s*(\S+?)\s*:\s*([1-9][0-9]{0,9})\s*(?:@\s*([1-9][0-9]{0,9}))?\s*", item)
                if match is None:
                    raise UserError(
                        f"distribution {quote(text)}: {quote(item.strip())} is not of the form STATE:SIZE, such as S0:4"
                    )
                entries.append((parse_state(match[1]), int(match[2]), match[3], level))
        if any(stride for _, _, stride, _ in entries):
            # If one axis has a stride, all axes of size 2 or more need one.
            axes = tuple(Axis(size, int(stride or 1), level) for _, size, stride, level in entries)
            result = cls(axes, tuple(state for state, _, _, _ in entries))
            result._check_strides(text)
            return result
        levels = range(max((level for *_, level in entries), default=-1) + 1)
        return cls.on_mesh([[(size, state) for state, size, _, at in entries if at == level] for level in levels])

    def _check_strides(self, text: str) -> None:
        expected = 1
        for axis in sorted((axis for axis in self.axes if axis.size > 1), key=lambda axis: axis.stride):
            if axis.stride != expected:
                raise UserError(
                    f"distribution {quote(text)}: stride @{axis.stride} of the axis of size {axis.size} should be @{expected}"
                )
            expected *= axis.size

    def __str__(self) -> str:
        return _text(self)

    def _in_rank_order(self) -> Distribution:
        by_level: list[list[tuple[int, SBPState]]] = [
            [] for _ in range(max((a.level for a in self.axes), default=0) + 1)
        ]
        for axis, state in zip(self.axes, self.states):
            by_level[axis.level].append((axis.size, state))
        return Distribution.on_mesh(by_level)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh."""
        return prod(axis.size for axis in self.axes)

    def split_sizes(self, num_dims: int) -> tuple[int, ...]:
        """Number of slices of each of ``num_dims`` tensor dimensions.

        Raises:
            UserError: an axis splits a dimension that the tensor does not have.
        """
        sizes = [1] * num_dims
        for axis, state in zip(self.axes, self.states):
            if isinstance(state, Split):
                if state.dim >= num_dims:
                    raise UserError(f"{self} splits dimension {state.dim}, the tensor has {num_dims} dimensions")
                sizes[state.dim] *= axis.size
        return tuple(sizes)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of each rank's slice of a tensor of ``shape``.

        Raises:
            UserError: a dimension is not divisible by the number of its slices.
        """
        sizes = self.split_sizes(len(shape))
        for dim, (length, parts) in enumerate(zip(shape, sizes)):
            if length % parts:
                raise UserError(
                    f"dimension {dim} of shape {tuple(shape)} does not divide into the {parts} slices of {self}"
                )
        return tuple(length // parts for length, parts in zip(shape, sizes))

    def block(self, rank: int, num_dims: int) -> tuple[int, ...]:
        """The index of the slice that ``rank`` holds, for each dimension; each is less than its :meth:`split_sizes`."""
        index = [0] * num_dims
        for axis, state in zip(self.axes, self.states):
            if isinstance(state, Split):
                index[state.dim] = index[state.dim] * axis.size + axis.coordinate(rank)
        return tuple(index)

    def slices(self, rank: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """The slices of a tensor of ``shape`` that ``rank`` holds (of a summand, if an axis is a partial sum)."""
        local = self.local_shape(shape)
        return tuple(slice(i * n, (i + 1) * n) for i, n in zip(self.block(rank, len(shape)), local))

    def dual(self) -> Distribution:
        """The distribution of the gradient of a tensor with this distribution."""
        return Distribution(self.axes, tuple(dual(state) for state in self.states))

    def without_unit_axes(self) -> Distribution:
        """The same distribution without its axes of size 1."""
        kept = [(axis, state) for axis, state in zip(self.axes, self.states) if axis.size > 1]
        return Distribution(tuple(axis for axis, _ in kept), tuple(state for _, state in kept))


@lru_cache(maxsize=4096)
def _text(distribution: Distribution) -> str:
    """The printed form.  Cached, since a plan prints the same distributions for every repetition of a block."""
    in_rank_order = distribution == distribution._in_rank_order()
    levels: dict[int, list[str]] = {
        level: [] for level in range(max((axis.level for axis in distribution.axes), default=0) + 1)
    }
    for axis, state in zip(distribution.axes, distribution.states):
        name = f"S{state.dim}" if isinstance(state, Split) else str(state)
        levels[axis.level].append(f"{name}:{axis.size}" + ("" if in_rank_order else f"@{axis.stride}"))
    return "(" + " | ".join(", ".join(items) for items in levels.values()) + ")"


@cache
def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors in ascending order.

    >>> prime_factors(12)
    (2, 2, 3)
    """
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple([*factors, number] if number > 1 else factors)


@lru_cache(maxsize=65536)
def canonical(levels: RowsAndFeatures) -> Distribution:
    """The canonical layout of activations between layers (see the module's docstring).

    Args:
        levels: ``(p0, s)`` for each network level, outermost first: rows, dimension 0, over ``p0`` ranks, features, dimension 1,
            over ``s``; or ``(p0, s, c)``, with columns, dimension 2, over the innermost ``c`` of the ``p0`` ranks.

    >>> str(canonical(((2, 4),))), str(canonical(((4, 1, 2),)))
    ('(S0:2@4, S1:2@1, S1:2@2)', '(S0:2, S2:2)')
    """
    cuts = canonical_axes(levels)
    return Distribution(tuple(axis for axis, _ in cuts), tuple(Split(dim) for _, dim in cuts))


def canonical_axes(levels: RowsAndFeatures) -> tuple[tuple[Axis, int], ...]:
    """The axes of `canonical` in the order in which they cut, each with the dimension that it cuts."""
    stride = prod(p0 * s for p0, s, *_ in levels)
    axes = []
    for level, (p0, s, *tiled) in enumerate(levels):
        stride //= p0 * s
        across = prod(tiled)
        if p0 > across:
            axes.append((Axis(p0 // across, stride * s * across, level), 0))
        if across > 1:
            axes.append((Axis(across, stride * s, level), 2))
        inner = stride
        for prime in reversed(prime_factors(s)):
            axes.append((Axis(prime, inner, level), 1))
            inner *= prime
    return tuple(axes)


def is_tiled(*layouts: RowsAndFeatures) -> bool:
    """Whether columns of images are cut in one of several canonical layouts."""
    return any(len(level) > 2 for layout in layouts for level in layout)


def row_slices(layout: RowsAndFeatures) -> int:
    """Number of slices of the rows and columns of a canonical layout: the product of p0 over the levels."""
    return prod(p0 for p0, *_ in layout)
