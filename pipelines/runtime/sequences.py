"""Positions of sequences that several ranks share, and the keys and values that these ranks exchange in attention.

q ranks share a sample: each has S / q of its positions. Rows between layers are in the order of the positions, or, if attention is
causal, in *mirrored* order, 0, S-1, 1, S-2, ... (:mod:`autoddl.costmodel.kinds.attention`). Either way the part of a rank consists
of *segments* of consecutive positions:

    S = 8, q = 2                     in order             mirrored
    rank 0                           0 1 2 3              0 7 1 6, that is 0 1 and 6 7
    rank 1                           4 5 6 7              2 5 3 4, that is 2 3 and 4 5

Attention works on ascending positions: `ascending` sorts the rows of a rank, `mirrored` restores their order.

Keys and values visit the queries of each rank in parts. A sharing (`Alone`, `Gathered`, `Ring`) decides when:

=========  =====================================================  ===============================================================
sharing    forward                                                backward
=========  =====================================================  ===============================================================
Alone      one visit, of the rank's own part                      the same
Gathered   all-gather, then one visit of all parts                the same; the gradients of all parts are reduce-scattered
Ring       a visit of the own part, then after each of q - 1      the same; the gradients of the other parts follow them along
           shifts a visit of the part that arrived                the ring, and a last shift brings them home
=========  =====================================================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis, flat_coordinate

from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()

__all__ = [
    "Alone",
    "Gathered",
    "Ring",
    "Segments",
    "apart",
    "ascending",
    "mirrored",
    "positions_of",
    "segments_of",
    "sharing_of",
]

Tensor = Any
#: (first position, number of positions) of each run of consecutive positions, in the order of the rows.
Segments = Sequence[tuple[int, int]]
#: Called with keys, values and their segments; in the backward pass it returns the gradients of keys and values.
Visit = Callable[[Tensor, Tensor, Segments], Any]


def segments_of(part: int, num_parts: int, length: int, is_mirrored: bool) -> tuple[tuple[int, int], ...]:
    """Return the segments of one of ``num_parts`` equal parts of a sequence of ``length`` positions, ascending.

    >>> segments_of(1, 2, 8, is_mirrored=False), segments_of(0, 2, 8, is_mirrored=True)
    (((4, 4),), ((0, 2), (6, 2)))
    """
    size = length // num_parts
    if not is_mirrored:
        return ((part * size, size),)
    half = size // 2
    return ((part * half, half), (length - (part + 1) * half, half))


def positions_of(segments: Segments) -> np.ndarray:
    """Return the positions of segments, in their order."""
    return np.concatenate([np.arange(first, first + length) for first, length in segments])


def ascending(x: Tensor) -> Tensor:
    """Sort rows from mirrored order to ascending positions: (samples, rows, features)."""
    pairs = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2])
    return flow.cat([pairs[:, :, 0], flow.flip(pairs[:, :, 1], [1])], dim=1)


def mirrored(x: Tensor) -> Tensor:
    """Bring ascending positions into mirrored order: the inverse of `ascending`."""
    half = x.shape[1] // 2
    early, late = flow.narrow(x, 1, 0, half), flow.flip(flow.narrow(x, 1, half, half), [1])
    return flow.cat([early.unsqueeze(2), late.unsqueeze(2)], dim=2).reshape(*x.shape)


class Alone:
    """Every rank has whole samples.

    Args:
        own: Segments of the positions.

    Attributes:
        own: Segments of this rank's positions.
        every: Segments of the positions of all ranks, in the order of the ranks.
        has_one_visit: Whether all keys and values come in one visit.
    """

    has_one_visit = True

    def __init__(self, own: Segments, every: Segments = ()):
        self.own = own
        self.every = every or own

    def forward(self, key: Tensor, value: Tensor, visit: Visit) -> None:
        """Call ``visit`` with all keys and values, given those of this rank: (samples, groups, positions, head_dim)."""
        visit(key, value, self.own)

    def backward(self, key: Tensor, value: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
        """Call ``visit`` as `forward` does, and return the gradients of this rank's keys and values, summed over the ranks."""
        gradients: tuple[Tensor, Tensor] = visit(key, value, self.own)
        return gradients


class Gathered(Alone):
    """Keys and values are gathered along ``axes``.

    Args:
        ranks: The ranks.
        axes: Mesh axes of the ranks that share a sample, outermost first.
        parts: Segments of each part, in the order of the ranks.
    """

    def __init__(self, ranks: Ranks, axes: Sequence[Axis], parts: Sequence[Segments]):
        # The order in which an all-gather along one axis after the other concatenates the parts: the last axis is the slowest.
        order = np.arange(len(parts)).reshape([axis.size for axis in axes]).transpose().reshape(-1)
        every = [segment for part in order for segment in parts[part]]
        super().__init__(parts[flat_coordinate(axes, ranks.rank)], every)
        self._ranks, self._axes = ranks, axes

    def forward(self, key: Tensor, value: Tensor, visit: Visit) -> None:
        visit(*self._gather(key, value), self.every)

    def backward(self, key: Tensor, value: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
        gradients = visit(*self._gather(key, value), self.every)
        return apart(self._ranks.scatter(flow.cat(gradients, dim=3), list(self._axes), 2))

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return apart(self._ranks.gather(flow.cat([key, value], dim=3), list(self._axes), 2))


class Ring(Alone):
    """Keys and values pass from rank to rank along an axis; arguments as those of `Gathered`, with one axis."""

    has_one_visit = False

    def __init__(self, ranks: Ranks, axes: Sequence[Axis], parts: Sequence[Segments]):
        (self._axis,) = axes
        self._place = self._axis.coordinate(ranks.rank)
        super().__init__(parts[self._place])
        self._ranks, self._parts = ranks, parts

    def _part(self, hop: int) -> Segments:
        """Return the segments of the part that is here after so many shifts."""
        return self._parts[(self._place - hop) % len(self._parts)]

    def forward(self, key: Tensor, value: Tensor, visit: Visit) -> None:
        both = flow.cat([key, value], dim=3)
        visit(key, value, self.own)
        for hop in range(1, len(self._parts)):
            both = self._ranks.shift(both, self._axis)
            visit(*apart(both), self._part(hop))

    def backward(self, key: Tensor, value: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
        both, passing = flow.cat([key, value], dim=3), None
        own = flow.cat(visit(key, value, self.own), dim=3)
        for hop in range(1, len(self._parts)):
            both = self._ranks.shift(both, self._axis)
            if passing is not None:
                passing = self._ranks.shift(passing, self._axis)
            gradient = flow.cat(visit(*apart(both), self._part(hop)), dim=3)
            passing = gradient if passing is None else passing + gradient
        return apart(own + self._ranks.shift(passing, self._axis))


def sharing_of(way: str, ranks: Ranks, axes: Sequence[Axis], length: int, is_mirrored: bool) -> Alone:
    """Return how the ranks along ``axes`` share samples of ``length`` positions.

    Args:
        way: ``gather`` or ``ring``; empty if every rank has whole samples.
        ranks: The ranks.
        axes: Mesh axes of the ranks that share a sample, outermost first.
        length: Positions of a sample.
        is_mirrored: Whether positions are in mirrored order.
    """
    num_parts = int(np.prod([axis.size for axis in axes], dtype=int))
    parts = [segments_of(part, num_parts, length, is_mirrored) for part in range(num_parts)]
    if not way:
        return Alone(((0, length),))
    return (Ring if way == "ring" else Gathered)(ranks, axes, parts)


def apart(both: Tensor) -> tuple[Tensor, Tensor]:
    """Separate keys and values, which are concatenated along their features."""
    width = both.shape[3] // 2
    return flow.narrow(both, 3, 0, width).contiguous(), flow.narrow(both, 3, width, width).contiguous()
