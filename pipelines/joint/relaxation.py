"""The best cut of a setting where units may be divided, and run in several ways at once: a linear program.

Its *columns* are ways to run a unit of run r (equal units that follow each other) at stage s: seconds t(k) forward, backward, of
running forward again, of the all-reduce, and bytes m.  Let x(k) be how many units are run so, in parts.  With n(P) what a path P of
the schedule counts for each of these, the step is the largest of the sums over the paths known:

    minimise  theta  over  sum of n(P) t(k) x(k) + transfers of P  <=  theta    for every path P                    share of P
                           sum over the columns of r of x(k)        =  units of r
                           sum over the columns of s of x(k)        >=  1,  boundaries within their ranges
                           sum over the stages of w of m(k) x(k)    <=  limit    for every worker w                 price on w

Both grow as they are needed: the schedule's longest path at the best x joins the paths (Kelley's cutting planes), and what is the
cheapest of all ways to run a unit at these shares and prices joins the columns.  The mean of the paths, at the shares, with bytes
at these prices, is the *linear bound* that is as sharp for all cuts together as one can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..stepgraph import Terms
from .cut_graph import UnitRuns

__all__ = ["Relaxation", "Relaxed", "UnsolvedError"]

#: Columns for each run at each stage that are held at a time, on the mean.
_MAX_COLUMNS = 6
#: SciPy's status of a program that has no solution.
_INFEASIBLE = 2


class UnsolvedError(Exception):
    """The solver had numerical difficulties."""


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solution.

    Attributes:
        step_s: the longest of the paths known at the best divided cut, of the columns known.
        shares: of the paths in the mean.
        price: of a byte on the workers of each stage [s]; shape (stages,).
        times: what every term takes at the best divided cut, in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
        places: where its boundaries are, in units.
    """

    step_s: float
    shares: np.ndarray
    price: np.ndarray
    times: np.ndarray
    places: np.ndarray


class Relaxation:
    """The program of one setting.

    Args:
        runs: of the chain, with what crosses boundaries.
        homes: the stages of every worker.
        limit: bytes of each worker's devices.
    """

    def __init__(self, runs: UnitRuns, homes: Sequence[Sequence[int]], limit: float):
        self.num_stages, self.num_units = len(runs.base) + 1, int(runs.sizes.sum())
        self.runs, self.first, self.sizes = runs, runs.first, runs.sizes
        self.terms = Terms(self.num_stages)
        self.limit = limit
        held = sorted({tuple(sorted(stages)) for stages in homes})
        #: Which stages a worker has; workers that have the same ones count once.
        self._holds = np.zeros((len(held), self.num_stages))
        for worker, stages in enumerate(held):
            np.add.at(self._holds[worker], list(stages), 1.0)
        self._paths = np.zeros((0, self.terms.count))
        self._used = np.zeros(0, dtype=np.intp)
        self._stage = self._run = self._column_used = np.zeros(0, dtype=np.intp)
        self._vectors = np.zeros((0, 5))
        self._solved = 0

    # ------------------------------------------------------------------------------------------------- paths and columns

    @property
    def paths(self) -> np.ndarray:
        """Those that are held; shape (paths, terms)."""
        return self._paths

    def add_path(self, path: np.ndarray) -> None:
        """A further path."""
        self._paths = np.vstack([self._paths, path])
        self._used = np.append(self._used, self._solved)

    def latest(self, most: int) -> list[np.ndarray]:
        """The paths that had a share the latest."""
        return [self._paths[number] for number in np.argsort(-self._used, kind="stable")[:most].tolist()]

    def forget(self, count: int) -> None:
        """Drop so many paths that have had no share for the longest time."""
        kept = np.sort(np.argsort(self._used, kind="stable")[count:])
        self._paths, self._used = self._paths[kept], self._used[kept]

    def add_columns(self, vectors: np.ndarray, reduced: np.ndarray | None = None) -> bool:
        """A way to run a unit of every run at every stage: seconds forward, backward, recompute, all-reduce, bytes; shape (stages,
        runs, 5); whether one is new.

        Args:
            reduced: of each what it would take away from the step; those alone that would.
        """
        wanted = np.ones(vectors.shape[:2], dtype=bool) if reduced is None else reduced < 0
        stage, run = np.nonzero(wanted)
        fresh = vectors[stage, run]
        if not len(fresh):
            return False
        scale = np.maximum(vectors.max(axis=(0, 1)), 1e-30)
        known = {(s, r, *row) for s, r, row in zip(self._stage, self._run, np.round(self._vectors / scale, 9).tolist())}
        rounded = np.round(fresh / scale, 9).tolist()
        new = np.array([(s, r, *row) not in known for s, r, row in zip(stage, run, rounded)])
        self._stage, self._run = np.append(self._stage, stage[new]), np.append(self._run, run[new])
        self._vectors = np.vstack([self._vectors, fresh[new]])
        self._column_used = np.append(self._column_used, np.full(int(new.sum()), self._solved))
        most = _MAX_COLUMNS * vectors.shape[0] * vectors.shape[1]
        if len(self._stage) > 2 * most:
            kept = np.sort(np.argsort(-self._column_used, kind="stable")[:most])
            self._stage, self._run = self._stage[kept], self._run[kept]
            self._vectors, self._column_used = self._vectors[kept], self._column_used[kept]
        return bool(new.any())

    # --------------------------------------------------------------------------------------------------------- solutions

    def solve(self, ranges: Sequence[tuple[int, int]]) -> Relaxed | None:
        """The best divided cut whose boundaries are within ranges; None where no one fits.

        :meth:`reduced` tells of ways to run units what they would change.

        Raises:
            UnsolvedError
        """
        # Only here: loading SciPy's optimizers takes longer than most searches.
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        terms, stages, count = self.terms, self.num_stages, len(self._stage)
        weights = np.stack([self._paths[:, part] for part in terms.of_stages])
        of_paths = np.einsum("kpc,ck->pc", weights[:, :, self._stage], self._vectors[:, :4])
        of_boundaries = self._paths[:, terms.transfer_forward] + self._paths[:, terms.transfer_backward]
        crossing, constants = self.runs.crossing(of_boundaries)
        of_paths = of_paths + crossing[:, self._stage, self._run]
        scale = max(float(of_paths.max(initial=0.0)), 1e-30)
        at = self._stage[None] == np.arange(stages)[:, None]
        bounded = [b for b, ends in enumerate(ranges) if ends != (b + 1, self.num_units - stages + b + 1)]
        before = np.cumsum(at, axis=0)[bounded].astype(float)
        memory = self._holds[:, self._stage] * self._vectors[:, 4] / self.limit
        held = np.vstack([of_paths / scale, -1.0 * at, before, -before, memory])
        limits = np.concatenate(
            [
                -constants / scale,
                np.full(stages, -1.0),
                [ranges[b][1] for b in bounded],
                [-ranges[b][0] for b in bounded],
                np.ones(len(memory)),
            ]
        )
        theta = np.zeros((len(held), 1))
        theta[: len(of_paths)] = -1.0
        is_open = self.runs.may_be_in(ranges)[self._stage, self._run]
        whole = (self._run[None] == np.arange(len(self.sizes))[:, None]).astype(float)
        found = linprog(
            np.append(np.zeros(count), 1.0),
            A_ub=csr_matrix(np.hstack([held, theta])),
            b_ub=limits,
            A_eq=csr_matrix(np.hstack([whole, np.zeros((len(whole), 1))])),
            b_eq=self.sizes.astype(float),
            bounds=np.column_stack([np.zeros(count + 1), np.append(np.where(is_open, np.inf, 0.0), np.inf)]),
            method="highs-ds",
        )
        if found.status == _INFEASIBLE:
            return None
        if found.status != 0:
            raise UnsolvedError(found.message)
        self._solved += 1
        duals = -found.ineqlin.marginals
        shares = np.maximum(duals[: len(of_paths)], 0.0)
        total = float(shares.sum()) or 1.0
        self._used[shares > 0] = self._solved
        amounts = found.x[:count]
        self._column_used[amounts > 0] = self._solved
        prices = np.maximum(duals[len(duals) - len(memory) :], 0.0) * scale / self.limit / total
        # What a unit at a stage is worth: of its run, of its stage, and of the boundaries behind it.
        worth = np.zeros((stages, len(self.sizes))) + found.eqlin.marginals[None]
        worth += duals[len(of_paths) : len(of_paths) + stages, None]
        ups = duals[len(of_paths) + stages : len(of_paths) + stages + 2 * len(bounded)].reshape(2, -1)
        for b, up, down in zip(bounded, *ups.tolist()):
            worth[: b + 1] += down - up
        self._worth = worth * scale / total - np.einsum("p,psr->sr", shares / total, crossing)
        return Relaxed(
            step_s=float(found.x[-1]) * scale,
            shares=shares / total,
            price=prices @ self._holds,
            times=self._times(amounts),
            places=np.cumsum(at @ amounts)[:-1],
        )

    def reduced(self, values: np.ndarray) -> np.ndarray:
        """What units that come to so much at the last solution's shares and prices would change; below 0: they make the step
        shorter.

        Args:
            values: shape (stages, runs).
        """
        return np.asarray(values - self._worth)

    def _times(self, amounts: np.ndarray) -> np.ndarray:
        terms, times = self.terms, np.zeros(self.terms.count)
        parts = terms.of_stages
        for number, part in enumerate(parts):
            times[part] = np.bincount(self._stage, amounts * self._vectors[:, number], self.num_stages)
        units = np.zeros((self.num_stages, len(self.sizes)))
        np.add.at(units, (self._stage, self._run), amounts)
        before = np.cumsum(units, axis=0)[:-1]
        crossing = self.runs.base + (self.runs.slopes * before).sum(axis=1)
        times[terms.transfer_forward] = times[terms.transfer_backward] = np.maximum(crossing, 0.0)
        return times
