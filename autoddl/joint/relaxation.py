"""The best cut of a setting where units may be divided: a linear program over its long paths.

Let y(r, s) be how many of the units of run r (equal units that follow each other) stage s has, in parts, whatever stands before
them. With c(P, r, s) what one of them adds to a path at least, the step is the largest of the sums over the paths known,

    minimise  theta   over   theta >= sum over stages and runs of c(P, r, s) y(r, s)  +  transfers of P            for every path P
                             sum over s of y(r, s) = units of r,   sum over r of y(r, s) >= 1

The schedule's longest path at the best y joins the paths known, until none is longer than theta (Kelley's cutting planes).
What the program's dual makes of the paths is a mean of them, and so a bound that is as sharp for all cuts together as one can
be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from autoddl.pipelines.stepgraph import Terms

__all__ = ["Relaxation", "Relaxed"]


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solution.

    Attributes:
        step_s: the least over all divided cuts of the longest of the paths known.
        shares: of the paths in the mean.
        amounts: units of every run at every stage of the best divided cut; shape (stages, runs).
        places: where its boundaries are, in units.
    """

    step_s: float
    shares: np.ndarray
    amounts: np.ndarray
    places: np.ndarray


class Relaxation:
    """The program of one setting.

    Args:
        kinds: of the chain's units.
        num_stages: of the schedule.
        transfers: the least seconds of every boundary, each way.
    """

    def __init__(self, kinds: Sequence[int], num_stages: int, transfers: np.ndarray):
        self.num_stages, self.num_units = num_stages, len(kinds)
        runs = [len(list(units)) for _, units in groupby(kinds)]
        self.sizes = np.array(runs)
        self.first = np.concatenate([[0], np.cumsum(runs)[:-1]])
        self.terms = Terms(self.num_stages)
        self.transfers = transfers
        self._rows: list[np.ndarray] = []
        self._constants: list[float] = []
        #: The last solution in which each path had a share.
        self._used: list[int] = []
        self._solved = 0

    def add(self, path: np.ndarray, of_units: np.ndarray) -> None:
        """A further path, and what every unit adds to it at least at every stage; shape (stages, units)."""
        terms = self.terms
        self._rows.append(of_units[:, self.first].ravel())
        crossing = path[terms.transfer_forward] + path[terms.transfer_backward]
        self._constants.append(float(crossing @ self.transfers))
        self._used.append(self._solved)

    def latest(self, most: int) -> list[int]:
        """The numbers of the paths that had a share the latest."""
        return np.argsort(-np.array(self._used), kind="stable")[:most].tolist()

    def least_used(self, count: int) -> set[int]:
        """Drop so many paths that have had no share for the longest time, and say which."""
        dropped = set(np.argsort(self._used, kind="stable")[:count].tolist())
        kept = [number for number in range(len(self._used)) if number not in dropped]
        self._rows = [self._rows[number] for number in kept]
        self._constants = [self._constants[number] for number in kept]
        self._used = [self._used[number] for number in kept]
        return dropped

    def solve(self, ranges: Sequence[tuple[int, int]]) -> Relaxed | None:
        """The best divided cut whose boundaries are within ranges; None where there is none."""
        # Only here: loading SciPy's optimizers takes longer than most searches.
        from scipy.optimize import linprog

        stages, runs = self.num_stages, len(self.sizes)
        count = stages * runs
        rows, limits = [np.append(row, -1.0) for row in self._rows], [-c for c in self._constants]
        scale = max(float(np.abs(self._rows).max()), 1e-30)
        rows, limits = [np.append(row[:-1] / scale, -1.0) for row in rows], [value / scale for value in limits]
        for stage in range(stages):
            row = np.zeros((stages, runs))
            row[stage] = -1.0
            rows.append(np.append(row.ravel(), 0.0))
            limits.append(-1.0)
        for boundary, (low, high) in enumerate(ranges):
            row = np.zeros((stages, runs))
            row[: boundary + 1] = 1.0
            for sign, value in ((1.0, high), (-1.0, -low)):
                rows.append(np.append(sign * row.ravel(), 0.0))
                limits.append(sign * abs(value))
        whole = np.zeros((runs, count + 1))
        for run in range(runs):
            whole[run, run:count:runs] = 1.0
        found = linprog(
            np.append(np.zeros(count), 1.0),
            A_ub=np.array(rows),
            b_ub=np.array(limits),
            A_eq=whole,
            b_eq=self.sizes.astype(float),
            bounds=[(0, None)] * (count + 1),
            method="highs-ds",
        )
        if found.status != 0:
            return None
        shares = np.maximum(-found.ineqlin.marginals[: len(self._rows)], 0.0)
        self._solved += 1
        for number in np.flatnonzero(shares > 0).tolist():
            self._used[number] = self._solved
        total = float(shares.sum())
        shares = shares / total if total > 0 else np.full(len(shares), 1.0 / len(shares))
        amounts = found.x[:count].reshape(stages, runs)
        places = np.cumsum(amounts.sum(axis=1))[:-1]
        return Relaxed(float(found.x[-1]) * scale, shares, amounts, places)

    def even(self, widths: Sequence[int]) -> np.ndarray:
        """Units of every run at every stage where each stage has as many as its devices want, in the order of the chain; shape
        (stages, runs)."""
        ends = np.concatenate([[0.0], np.cumsum(widths)]) / sum(widths) * self.num_units
        starts = self.first[None, :]
        overlap = np.minimum(ends[1:, None], starts + self.sizes[None]) - np.maximum(ends[:-1, None], starts)
        return np.maximum(overlap, 0.0)

    def times(self, amounts: np.ndarray, of_units: np.ndarray) -> np.ndarray:
        """What every term takes at a divided cut.

        Args:
            amounts: units of every run at every stage; shape (stages, runs).
            of_units: forward, backward, recompute and all-reduce seconds; shape (4, stages, units).
        """
        terms, times = self.terms, np.zeros(self.terms.count)
        parts = (terms.forward, terms.backward, terms.recompute, terms.all_reduce)
        for part, of_one in zip(parts, of_units[:, :, self.first]):
            times[part] = (of_one * amounts).sum(axis=1)
        times[terms.transfer_forward] = times[terms.transfer_backward] = self.transfers
        return times
