"""Some of the cuts of a chain, and the best cut among arcs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Cut", "Region", "closed_arcs", "least_cut", "level_cut"]

#: First unit and unit behind it of every stage.
Cut = list[tuple[int, int]]


@dataclass(frozen=True)
class Region:
    """Some of the cuts: for each boundary the units that may stand first behind it, from one to another."""

    ranges: tuple[tuple[int, int], ...]
    num_units: int

    @classmethod
    def whole(cls, num_stages: int, num_units: int) -> Region:
        return cls(tuple((b, num_units - num_stages + b) for b in range(1, num_stages)), num_units)

    @classmethod
    def only(cls, cut: Cut) -> Region:
        """One cut."""
        return cls(tuple((stop, stop) for _, stop in cut[:-1]), cut[-1][1])

    def among(self, costs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The costs of arcs, infinite outside of the region."""
        found = [cost.copy() for cost in costs]
        for boundary, (first, last) in enumerate(self.ranges):
            found[boundary][:, :first] = found[boundary][:, last + 1 :] = np.inf
        return found

    def nearest(self, places: np.ndarray) -> tuple[int, ...]:
        """The cut whose boundaries are near the places."""
        found, before = [], 0
        for (first, last), place in zip(self.ranges, places.tolist()):
            before = min(max(round(place), first, before + 1), last)
            found.append(before)
        return tuple(found)

    def without(self, cut: Cut) -> list[Region]:
        """Regions of which every other cut of this one is in one: by the first boundary that stands elsewhere, before or behind."""
        found, rest = [], self
        for boundary, (_, stop) in enumerate(cut[:-1]):
            first, last = rest.ranges[boundary]
            if first < stop:
                found.append(rest._with(boundary, (first, stop - 1)))
            if stop < last:
                found.append(rest._with(boundary, (stop + 1, last)))
            rest = rest._with(boundary, (stop, stop))
        return found

    def _with(self, boundary: int, ends: tuple[int, int]) -> Region:
        """With one boundary from ``ends``, and the others where that leaves a unit for every stage."""
        ranges = list(self.ranges)
        ranges[boundary] = ends
        for b in range(boundary + 1, len(ranges)):
            ranges[b] = max(ranges[b][0], ranges[b - 1][0] + 1), ranges[b][1]
        for b in range(boundary - 1, -1, -1):
            ranges[b] = ranges[b][0], min(ranges[b][1], ranges[b + 1][1] - 1)
        return Region(tuple(ranges), self.num_units)


def closed_arcs(stage: int, num_stages: int, num_units: int) -> np.ndarray:
    """Which arcs of a stage leave no unit for some other one; shape (units + 1, units + 1)."""
    i, j = np.indices((num_units + 1, num_units + 1))
    last = num_stages - 1
    closed = (i >= j) | (i < stage) | (num_units - j < last - stage)
    closed |= (i != 0) if stage == 0 else (i == 0)
    closed |= (j != num_units) if stage == last else (j == num_units)
    return closed


def least_cut(costs: Sequence[np.ndarray]) -> tuple[float, Cut]:
    """The least sum over all cuts, and the units of every stage at it; the costs of all arcs are given for every stage."""
    return _best_cut(costs, np.add, 0.0)


def level_cut(costs: Sequence[np.ndarray]) -> tuple[float, Cut]:
    """The cut whose dearest arc is the cheapest, and what that costs."""
    return _best_cut(costs, np.maximum, -np.inf)


def _best_cut(costs: Sequence[np.ndarray], join: np.ufunc, nothing: float) -> tuple[float, Cut]:
    """The cut whose arcs' costs, joined, are the least, from ``nothing`` on; infinite, and no cut, where there is none."""
    size = costs[0].shape[0]
    best = np.full(size, np.inf)
    best[0] = nothing
    origins = []
    for cost in costs:
        whole = join(best[:, None], cost)
        origins.append(whole.argmin(axis=0))
        best = whole.min(axis=0)
    if not math.isfinite(best[-1]):
        return math.inf, []
    cut, stop = [], size - 1
    for origin in reversed(origins):
        first = int(origin[stop])
        cut.append((first, stop))
        stop = first
    return float(best[-1]), cut[::-1]
