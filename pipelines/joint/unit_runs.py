"""The runs of equal units of a chain, with linear lower bounds on the transfers between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from .cut_regions import Region

__all__ = ["UnitRuns", "runs_of"]


@dataclass(frozen=True, eq=False)
class UnitRuns:
    """The runs of a chain (equal units that follow each other), and linear lower bounds on the transfers over boundaries.

    The transfer over boundary b in one direction takes at least ``base[b]`` + the sum, over all units before the boundary, of
    ``slopes[b, run of the unit]`` seconds.

    Attributes:
        first: First unit of each run.
        sizes: Number of units of each run.
        base: Shape (stages - 1,).
        slopes: Shape (stages - 1, runs).
    """

    first: np.ndarray
    sizes: np.ndarray
    base: np.ndarray
    slopes: np.ndarray

    @cached_property
    def possible(self) -> np.ndarray:
        """Whether a stage may have units of a run in any cut, shape (stages, runs)."""
        return self.possible_in(Region.whole(len(self.base) + 1, int(self.sizes.sum())).ranges)

    def possible_in(self, ranges: Sequence[tuple[float, float]]) -> np.ndarray:
        """Return whether a stage may have units of a run if the boundaries are within ``ranges``; shape (stages, runs)."""
        begins = np.array([0, *(low for low, _ in ranges)])[:, None]
        ends = np.array([*(high for _, high in ranges), int(self.sizes.sum())])[:, None]
        return np.asarray(np.maximum(begins, self.first) < np.minimum(ends, self.first + self.sizes))

    def transfer_coefficients(self, weights: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the weighted sum of the transfers as a linear function of the numbers of units n(stage, run).

        Args:
            weights: Weight of the transfer over each boundary, shape (..., stages - 1).

        Returns:
            The coefficients of n, shape (..., stages, runs), and the constant.
        """
        by_boundary = weights[..., None] * self.slopes
        # A unit of stage s is before the boundaries s, s + 1, ...: sums from the last boundary on.
        none = np.zeros((*by_boundary.shape[:-2], 1, len(self.sizes)))
        sums = np.concatenate([np.cumsum(by_boundary[..., ::-1, :], axis=-2)[..., ::-1, :], none], axis=-2)
        return sums, weights @ self.base

    def counts_at(self, boundaries: Sequence[float]) -> np.ndarray:
        """Return the numbers of units of each run at each stage, shape (stages, runs).

        Args:
            boundaries: The number of units before each boundary, which may be fractional.
        """
        ends = np.array([0.0, *boundaries, float(self.sizes.sum())])
        last = np.minimum(ends[1:, None], self.first + self.sizes)
        return np.asarray(np.maximum(last - np.maximum(ends[:-1, None], self.first), 0.0))


def runs_of(kinds: Sequence[int], transfers_of: np.ndarray) -> UnitRuns:
    """Return the runs of a chain.

    Args:
        kinds: The kind of each unit; units of one kind are equal.
        transfers_of: Least seconds of a transfer over each boundary, by the first unit behind it; shape (stages - 1, units + 1).
    """
    sizes = np.array([len(list(units)) for _, units in groupby(kinds)])
    first = np.cumsum(sizes) - sizes
    base, slopes = np.zeros(len(transfers_of)), np.zeros((len(transfers_of), len(sizes)))
    for boundary, transfers in enumerate(transfers_of):
        previous = 0.0
        for run, unit in enumerate(first.tolist()):
            # Behind every unit of a run tensors of equal size cross.  If they are larger than those of the run before, the
            # difference is added while this run fills; if they are smaller, it is subtracted while the run before fills.
            # Both are at most the truth.  For a single unit both are exact.
            current = float(transfers[unit + 1])
            filling = run if current >= previous or sizes[run] == 1 else run - 1
            if run == 0:
                base[boundary] = current
            else:
                slopes[boundary, filling] += (current - previous) / sizes[filling]
            previous = current
    return UnitRuns(first, sizes, base, slopes)
