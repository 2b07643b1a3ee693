"""Cuts of a chain of units, sets of cuts, and the best cut for given costs of arcs.

A *cut* divides the units 0 to n - 1 of the model into S stages of consecutive units.  Its boundary b (0 <= b < S - 1) is the index
of the first unit of stage b + 1.  An *arc* (s, i, j) is stage s with the units i to j - 1.  A cut is a path from unit 0 to unit n
in the layered graph of arcs, so that the best cut for given costs of arcs is a shortest path: of the least sum
(:func:`cheapest_cut`) or of the least maximum (:func:`bottleneck_cut`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

__all__ = ["Cut", "Region", "bottleneck_cut", "cheapest_cut", "cut_at", "impossible_arcs"]

#: Per stage its first unit and the unit behind its last one.
Cut = list[tuple[int, int]]


def cut_at(boundaries: Sequence[int], num_units: int) -> Cut:
    """Return the cut with these boundaries.

    >>> cut_at([2, 5], 8)
    [(0, 2), (2, 5), (5, 8)]
    """
    return list(zip((0, *boundaries), (*boundaries, num_units)))


@dataclass(frozen=True)
class Region:
    """A set of cuts: all cuts whose boundaries, and numbers of units of stages, are within given ranges.

    Attributes:
        ranges: Smallest and largest unit of each boundary, both included.
        num_units: Number of units of the chain.
        sizes: Least and largest number of units of some stages, by stage; all others have one unit or more.
        totals: Number of units of all stages of some workers, by the worker's stages.
    """

    ranges: tuple[tuple[int, int], ...]
    num_units: int
    sizes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    totals: Mapping[tuple[int, ...], int] = field(default_factory=dict)

    @classmethod
    def whole(cls, num_stages: int, num_units: int) -> Region:
        """Return the region of all cuts in stages of at least one unit.

        >>> Region.whole(3, 8).ranges
        ((1, 6), (2, 7))
        """
        return cls(tuple((b, num_units - num_stages + b) for b in range(1, num_stages)), num_units)

    @classmethod
    def of_cut(cls, cut: Cut) -> Region:
        """Return the region of a single cut."""
        return cls(tuple((stop, stop) for _, stop in cut[:-1]), cut[-1][1])

    @property
    def limits_of_sizes(self) -> np.ndarray:
        """The least and the largest number of units of every stage, shape (2, stages)."""
        num_stages = len(self.ranges) + 1
        whole = 1, self.num_units - len(self.ranges)
        return np.array([self.sizes.get(stage, whole) for stage in range(num_stages)]).T

    @property
    def only_cut(self) -> Cut | None:
        """The cut of the region, if the ranges of sizes leave one; None if they leave others."""
        least, most = self.limits_of_sizes
        if (least < most).any():
            return None
        return cut_at(np.cumsum(least)[:-1].tolist(), self.num_units)

    def restrict(self, costs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the costs of arcs with infinity for arcs that end outside of the ranges of boundaries.

        Args:
            costs: Per stage the costs of its arcs, shape (units + 1, units + 1).
        """
        restricted = [cost.copy() for cost in costs]
        for boundary, (first, last) in enumerate(self.ranges):
            restricted[boundary][:, :first] = restricted[boundary][:, last + 1 :] = np.inf
        return restricted

    def nearest_boundaries(self, positions: np.ndarray) -> tuple[int, ...]:
        """Return boundaries within the region that are near fractional positions, which are in units."""
        boundaries, previous = [], 0
        for (first, last), position in zip(self.ranges, positions.tolist()):
            previous = min(max(round(position), first, previous + 1), last)
            boundaries.append(previous)
        return tuple(boundaries)

    def without(self, cut: Cut) -> list[Region]:
        """Return disjoint regions that contain all cuts of this region but one.

        The regions differ by the first boundary that is not at its place in ``cut``: it is before that place, or behind it.

        >>> [part.ranges for part in Region.whole(2, 5).without([(0, 3), (3, 5)])]
        [((1, 2),), ((4, 4),)]
        """
        if self.only_cut is not None:
            return []
        parts, rest = [], self
        for boundary, (_, stop) in enumerate(cut[:-1]):
            first, last = rest.ranges[boundary]
            if first < stop:
                parts.append(rest._with_range(boundary, (first, stop - 1)))
            if stop < last:
                parts.append(rest._with_range(boundary, (stop + 1, last)))
            rest = rest._with_range(boundary, (stop, stop))
        return parts

    def split(self, stage: int, size: int) -> tuple[Region, Region]:
        """Return the cuts of the region in which a stage has at most ``size`` units, and those in which it has more.

        >>> few, many = Region.whole(2, 5).split(0, 3)
        >>> few.sizes, many.sizes
        ({0: (1, 3)}, {0: (4, 4)})
        """
        least, most = self.limits_of_sizes[:, stage].tolist()
        few, many = {**self.sizes, stage: (least, size)}, {**self.sizes, stage: (size + 1, most)}
        return replace(self, sizes=few), replace(self, sizes=many)

    def _with_range(self, boundary: int, new_range: tuple[int, int]) -> Region:
        """Return the region with another range of one boundary; ranges of other boundaries shrink so that every stage has a
        unit."""
        ranges = list(self.ranges)
        ranges[boundary] = new_range
        for b in range(boundary + 1, len(ranges)):
            ranges[b] = max(ranges[b][0], ranges[b - 1][0] + 1), ranges[b][1]
        for b in range(boundary - 1, -1, -1):
            ranges[b] = ranges[b][0], min(ranges[b][1], ranges[b + 1][1] - 1)
        return replace(self, ranges=tuple(ranges))


def impossible_arcs(stage: int, num_stages: int, num_units: int) -> np.ndarray:
    """Return which arcs of a stage are in no cut, because the stage or another one would have no unit.

    Returns:
        Booleans by first unit and by the unit behind the last one, shape (units + 1, units + 1).

    >>> impossible_arcs(0, 2, 3)[0].tolist()  # the first stage has unit 0, or the units 0 and 1
    [True, False, False, True]
    """
    i, j = np.indices((num_units + 1, num_units + 1))
    last = num_stages - 1
    impossible = (i >= j) | (i < stage) | (num_units - j < last - stage)
    impossible |= (i != 0) if stage == 0 else (i == 0)
    impossible |= (j != num_units) if stage == last else (j == num_units)
    return impossible


def cheapest_cut(costs: Sequence[np.ndarray]) -> tuple[float, Cut]:
    """Return the least sum of the costs of a cut's arcs, and a cut that has it.

    Args:
        costs: Per stage the costs of its arcs, shape (units + 1, units + 1); infinite for impossible arcs.

    Returns:
        The sum and the cut; infinity and an empty list if all cuts cost infinity.
    """
    return _best_cut(costs, np.add, 0.0)


def bottleneck_cut(costs: Sequence[np.ndarray]) -> tuple[float, Cut]:
    """Return the least maximum of the costs of a cut's arcs, and a cut that has it; arguments as :func:`cheapest_cut`."""
    return _best_cut(costs, np.maximum, -np.inf)


def _best_cut(costs: Sequence[np.ndarray], combine: np.ufunc, neutral: float) -> tuple[float, Cut]:
    """Return the least combined cost of a cut's arcs and a cut that has it; ``neutral`` is the neutral element of ``combine``."""
    size = costs[0].shape[0]
    # The least cost of the stages so far, by the unit behind them; and the first unit of the last of these stages at that cost.
    best = np.full(size, np.inf)
    best[0] = neutral
    origins = []
    for cost in costs:
        candidates = combine(best[:, None], cost)
        origins.append(candidates.argmin(axis=0))
        best = candidates.min(axis=0)
    if not math.isfinite(best[-1]):
        return math.inf, []
    # Trace the best cut back, from the last stage on.
    cut, stop = [], size - 1
    for origin in reversed(origins):
        first = int(origin[stop])
        cut.append((first, stop))
        stop = first
    return float(best[-1]), cut[::-1]
