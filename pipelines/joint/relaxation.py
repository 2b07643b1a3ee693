"""The linear relaxation of a setting: the best fractional cut, whose units may be divided between stages and ways to run them.

A *column* c is a way to run one unit of a run r(c) (equal units that follow each other) at a stage s(c): the seconds t(c, k) of its
forward pass, backward pass, recomputation and all-reduce (k = 1, ..., 4), the bytes m(c) that it needs, and the seconds e(c) to
exchange its part of the gradients that the first and the last stage share.  The variable x(c) >= 0 is the number of units that are
run so; it may be fractional.  A path P of the schedule passes term k of stage s n(P, s, k) times, and the exchange n(P) times, as
often as both stages' all-reduces.  With the step theta and the seconds g of the exchange, the program is

    minimise  theta  subject to                                                                                      dual value
        sum over c, k of n(P, s(c), k) t(c, k) x(c)  +  n(P) g  +  transfers  <=  theta for every path P             share of P
        sum over the columns of stage s of e(c) x(c)  <=  g                             for the first and last s     its weight
        sum over the columns of run r of x(c)  =  units of r                            for every run r
        sum over the columns of stage s of x(c)  >=  1, or within its range             for every stage s
        sum over the columns of stages 0 to b of x(c)  within its range                 for every boundary b
        sum over the columns of w's stages of x(c)  within its range                    for every worker w
        sum over the columns of w's stages of m(c) x(c)  <=  limit                      for every worker w           price on w

The transfers over a boundary are the linear lower bounds of :class:`.unit_runs.UnitRuns`.  A path also takes fixed seconds of terms
(:attr:`.cut_graph.CutGraph.fixed_times`), which are constants of its row.

Paths and columns are generated as they are needed.  The longest path of the schedule at the best x becomes a new row (Kelley's
cutting planes).  The cheapest way to run a unit at the dual values becomes a new column, if its reduced cost is negative.

The dual values make the best linear bound over all cuts together: the mean of the paths at their shares, which sum to 1, with bytes
at their prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stepgraph import Terms
from .cut_regions import Region
from .linear_program import LinearProgram
from .unit_runs import UnitRuns

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

__all__ = ["Relaxation", "Relaxed"]

#: Mean number of columns per stage and run that it may have that are kept.  Columns are dropped when there are twice as many.
_MAX_COLUMNS = 6
#: No limits of numbers of units, but that each stage has one.
NO_LIMITS: Mapping[Any, tuple[int, int]] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solution of the linear program.

    Attributes:
        step_s: The optimum: the longest of the known paths at the best fractional cut, for the known columns.
        shares: Weight of each path in the mean, shape (paths,); the sum is 1.
        price: Price of a byte on the workers of each stage [s per byte], shape (stages,).
        exchange: Weights of the exchange, counted by the bytes of the first and of the last stage (:class:`.bounds.Bound`); None if
            they exchange nothing.
        times: Seconds of each term at the best fractional cut, in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
        boundaries: Number of units before each boundary at the best fractional cut, shape (stages - 1,).
    """

    step_s: float
    shares: np.ndarray
    price: np.ndarray
    exchange: tuple[float, float] | None
    times: np.ndarray
    boundaries: np.ndarray


class Relaxation:
    """The linear program of one setting; paths and columns are added between solutions.

    Args:
        runs: The runs of equal units, with their transfers.
        homes: Per worker its stages.
        limit_bytes: Memory limit of a device [bytes].
        fixed_times: Seconds of every term beside what units and transfers take, in the order of
            :class:`autoddl.pipelines.stepgraph.Terms`.
        byte_s: Seconds to exchange a byte of the gradients that the first and the last stage share; 0 if they share none.
    """

    def __init__(
        self,
        runs: UnitRuns,
        homes: Sequence[Sequence[int]],
        limit_bytes: float,
        fixed_times: np.ndarray | float = 0.0,
        byte_s: float = 0.0,
    ):
        self.num_stages, self.num_units = len(runs.base) + 1, int(runs.sizes.sum())
        self.runs, self.first, self.sizes = runs, runs.first, runs.sizes
        self.terms = Terms(self.num_stages)
        self.limit_bytes, self.fixed_times, self.byte_s = limit_bytes, fixed_times, byte_s
        stage_sets = sorted({tuple(sorted(stages)) for stages in homes})
        #: How often a worker holds each stage; workers of equal stages count once.  Shape (workers, stages).
        self._holds = np.zeros((len(stage_sets), self.num_stages))
        for worker, stages in enumerate(stage_sets):
            np.add.at(self._holds[worker], list(stages), 1.0)
        self._num_solved = 0
        self._paths = np.zeros((0, self.terms.count))
        #: Per path the number of the latest solution in which it had a share.
        self._path_last_used = np.zeros(0, dtype=np.intp)
        #: Per column its stage, its run, the number of the latest solution that used it, and its vector (t(c, .), m(c), exchanged
        #: bytes).
        self.drop_columns()

    # ------------------------------------------------------------------------------------------------- paths and columns

    @property
    def paths(self) -> np.ndarray:
        """The known paths, shape (paths, terms)."""
        return self._paths

    def add_path(self, path: np.ndarray) -> None:
        """Add a path of the schedule: how often it passes each term."""
        self._paths = np.vstack([self._paths, path])
        self._path_last_used = np.append(self._path_last_used, self._num_solved)

    def latest_paths(self, count: int) -> list[np.ndarray]:
        """Return up to ``count`` paths, those first that had a share in the latest solutions."""
        order = np.argsort(-self._path_last_used, kind="stable")
        return [self._paths[number] for number in order[:count].tolist()]

    def drop_paths(self, count: int) -> None:
        """Drop the ``count`` paths that have had no share for the most solutions."""
        remaining = np.sort(np.argsort(self._path_last_used, kind="stable")[count:])
        self._paths, self._path_last_used = self._paths[remaining], self._path_last_used[remaining]

    def drop_columns(self) -> None:
        """Drop all columns."""
        self._stage = self._run = self._column_last_used = np.zeros(0, dtype=np.intp)
        self._vectors = np.zeros((0, 6))
        #: Whether each column is never dropped.
        self._stays = np.zeros(0, dtype=bool)

    def add_columns(self, vectors: np.ndarray, reduced_costs: np.ndarray | None = None, stay: bool = False) -> bool:
        """Add a way to run a unit of every run at every stage.

        Args:
            vectors: Seconds forward, backward, of recomputation and of all-reduce, bytes, and exchanged bytes; shape (stages, runs,
                6).
            reduced_costs: Shape (stages, runs); columns are added only where it is negative.  By default all possible ones are.
            stay: Whether the columns are never dropped: without those of the least bytes a program might seem to have no solution.

        Returns:
            Whether a column is new.
        """
        is_possible = self.runs.possible
        wanted = is_possible if reduced_costs is None else is_possible & (reduced_costs < 0)
        stage, run = np.nonzero(wanted)
        candidates = vectors[stage, run]
        if not len(candidates):
            return False
        # Columns that are equal to 9 digits of the largest value count as equal.
        scale = np.maximum(vectors.max(axis=(0, 1)), 1e-30)
        known = {(s, r, *row) for s, r, row in zip(self._stage, self._run, np.round(self._vectors / scale, 9).tolist())}
        rounded = np.round(candidates / scale, 9).tolist()
        new = np.array([(s, r, *row) not in known for s, r, row in zip(stage, run, rounded)])
        self._stage, self._run = np.append(self._stage, stage[new]), np.append(self._run, run[new])
        self._vectors = np.vstack([self._vectors, candidates[new]])
        self._column_last_used = np.append(self._column_last_used, np.full(int(new.sum()), self._num_solved))
        self._stays = np.append(self._stays, np.full(int(new.sum()), stay))
        # Drop the columns that have not been used for the most solutions.
        most = _MAX_COLUMNS * int(is_possible.sum())
        if len(self._stage) > 2 * most:
            remaining = np.sort(np.lexsort((-self._column_last_used, ~self._stays))[:most])
            self._stage, self._run = self._stage[remaining], self._run[remaining]
            self._vectors, self._column_last_used = self._vectors[remaining], self._column_last_used[remaining]
            self._stays = self._stays[remaining]
        return bool(new.any())

    # --------------------------------------------------------------------------------------------------------- solutions

    def solve(
        self,
        ranges: Sequence[tuple[float, float]],
        sizes: Mapping[int, tuple[int, int]] = NO_LIMITS,
        totals: Mapping[tuple[int, ...], tuple[int, int]] = NO_LIMITS,
    ) -> Relaxed | None:
        """Find the best fractional cut for the known paths and columns.

        Afterwards :meth:`reduced_costs` refers to this solution.

        Args:
            ranges: Least and largest number of units before each boundary.
            sizes: Least and largest number of units of some stages.
            totals: Least and largest number of units of some sets of stages.

        Returns:
            The solution; None if no fractional cut of the known columns is within the ranges and the memory limit.

        Raises:
            UnsolvedError: The solver had numerical difficulties.
        """
        stages, count = self.num_stages, len(self._stage)
        of_paths, crossing, constants = self._path_rows()
        scale = max(float(of_paths.max(initial=0.0)), 1e-30)
        of_stages = self._stage[None] == np.arange(stages)[:, None]
        of_units, most_units = self._unit_rows(ranges, sizes, totals)
        ends = [0, stages - 1] if self.byte_s else []
        counts = self._paths[:, self.terms.all_reduce][:, ends].sum(axis=1)
        # The inequalities: coefficients of the columns, of the exchange and of theta, and the largest values.
        rows = [
            (of_paths / scale, counts, -1.0, -constants / scale),
            (of_units @ of_stages, 0.0, 0.0, most_units),
            (self._holds[:, self._stage] * self._vectors[:, 4] / self.limit_bytes, 0.0, 0.0, np.ones(len(self._holds))),
            (of_stages[ends] * self._exchange_seconds / scale, -1.0, 0.0, np.zeros(len(ends))),
        ]
        solution = self._solved(rows, bool(ends), self.runs.possible_in(ranges)[self._stage, self._run])
        if solution is None:
            return None
        self._num_solved += 1
        # The shares of paths and the prices of bytes, normalised so that the shares sum to 1.
        ends_of_groups = np.cumsum([len(coefficients) for coefficients, *_ in rows])
        shares, at_units, of_memory, of_exchanges = np.split(-solution.ineqlin.marginals, ends_of_groups[:-1])
        shares = np.maximum(shares, 0.0)
        total = float(shares.sum()) or 1.0
        self._path_last_used[shares > 0] = self._num_solved
        amounts = solution.x[:count]
        self._column_last_used[amounts > 0] = self._num_solved
        prices = np.maximum(of_memory, 0.0) * scale / self.limit_bytes / total
        # The dual value of a unit at a stage: of its run, and of the limits of numbers of units.
        values = solution.eqlin.marginals[None] - (of_units.T @ at_units)[:, None]
        self._unit_values = values * scale / total - np.einsum("p,psr->sr", shares / total, crossing)
        return Relaxed(
            step_s=float(solution.x[-1]) * scale,
            shares=shares / total,
            price=prices @ self._holds,
            exchange=self._exchange_weights(np.maximum(of_exchanges, 0.0) / total, float(counts @ shares) / total),
            times=self._times(amounts),
            boundaries=np.cumsum(of_stages @ amounts)[:-1],
        )

    def _unit_rows(
        self,
        ranges: Sequence[tuple[float, float]],
        sizes: Mapping[int, tuple[int, int]],
        totals: Mapping[tuple[int, ...], tuple[int, int]],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the inequalities of the numbers of units of stages: coefficients, shape (rows, stages), and the largest values;
        arguments as of :meth:`solve`."""
        stages = self.num_stages
        # Sets of stages with the least and the largest number of units of the whole set.
        limited: list[tuple[tuple[int, ...], tuple[float, float]]] = [
            ((stage,), sizes.get(stage, (1, math.inf))) for stage in range(stages)
        ]
        whole = Region.whole(stages, self.num_units).ranges
        limited += [(tuple(range(b + 1)), ends) for b, ends in enumerate(ranges) if ends != whole[b]]
        limited += totals.items()
        rows = np.zeros((len(limited), stages))
        for row, (members, _) in zip(rows, limited):
            row[list(members)] = 1.0
        least, most = np.array([limits for _, limits in limited], dtype=float).T
        has_most = np.isfinite(most)
        return np.concatenate([-rows, rows[has_most]]), np.concatenate([-least, most[has_most]])

    def _solved(
        self, rows: Sequence[tuple[np.ndarray, Any, float, Any]], has_exchange: bool, is_possible: np.ndarray
    ) -> OptimizeResult | None:
        """Return the solution of the program; None if there is none.

        Args:
            rows: The inequalities in groups: the coefficients of the columns, of the seconds of the exchange and of theta, and the
                largest values.
            has_exchange: Whether the seconds of the exchange are a variable.
            is_possible: Whether each column may be used.

        Raises:
            UnsolvedError: The solver had numerical difficulties.
        """
        num_others = 2 if has_exchange else 1
        parts = []
        for coefficients, of_exchange, of_theta, _ in rows:
            others = np.zeros((len(coefficients), num_others))
            others[:, 0], others[:, -1] = of_exchange if has_exchange else 0.0, of_theta
            parts.append(np.hstack([coefficients, others]))
        of_runs = (self._run[None] == np.arange(len(self.sizes))[:, None]).astype(float)
        most = np.append(np.where(is_possible, np.inf, 0.0), [np.inf] * num_others)
        program = LinearProgram(
            objective=np.append(np.zeros(len(most) - 1), 1.0),
            rows=np.vstack(parts),
            most=np.concatenate([upper for *_, upper in rows]),
            equal_rows=np.hstack([of_runs, np.zeros((len(of_runs), num_others))]),
            equal=self.sizes.astype(float),
            ranges=np.column_stack([np.zeros(len(most)), most]),
        )
        return program.solved()

    def _path_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
        """Return the coefficients of the program's rows of paths.

        Returns:
            The coefficients of the columns, transfers included, shape (paths, columns); those of the transfers alone, shape (paths,
            stages, runs); and the constant transfers of the paths [s].
        """
        terms = self.terms
        weights = np.stack([self._paths[:, part] for part in terms.of_stages])
        of_columns = np.einsum("kpc,ck->pc", weights[:, :, self._stage], self._vectors[:, :4])
        of_boundaries = self._paths[:, terms.transfer_forward] + self._paths[:, terms.transfer_backward]
        crossing, constants = self.runs.transfer_coefficients(of_boundaries)
        fixed = (self._paths * self.fixed_times).sum(axis=1)
        return of_columns + crossing[:, self._stage, self._run], crossing, constants + fixed

    @property
    def _exchange_seconds(self) -> np.ndarray:
        """The seconds e(c) of every column."""
        return np.asarray(self.byte_s * self._vectors[:, 5])

    @staticmethod
    def _exchange_weights(duals: np.ndarray, most: float) -> tuple[float, float] | None:
        """The weights of the exchange by their dual values, without the excess by rounding errors of their sum over ``most``."""
        if not len(duals):
            return None
        first, last = (duals * min(1.0, most / max(float(duals.sum()), 1e-300))).tolist()
        return first, last

    def reduced_costs(self, costs: np.ndarray) -> np.ndarray:
        """Return the reduced costs of ways to run units at the latest solution; a negative one shortens the step.

        Args:
            costs: What a unit of each run costs at each stage, at the solution's shares and prices [s]; shape (stages, runs).

        Returns:
            Shape (stages, runs).
        """
        return np.asarray(costs - self._unit_values)

    def _times(self, amounts: np.ndarray) -> np.ndarray:
        """Return the seconds of each term if ``amounts`` of units are run as each column."""
        terms, times = self.terms, np.zeros(self.terms.count)
        for number, part in enumerate(terms.of_stages):
            times[part] = np.bincount(self._stage, amounts * self._vectors[:, number], self.num_stages)
        exchanges = np.bincount(self._stage, amounts * self._exchange_seconds, self.num_stages)[[0, -1]]
        times[terms.all_reduce][[0, -1]] += exchanges.max()
        units = np.zeros((self.num_stages, len(self.sizes)))
        np.add.at(units, (self._stage, self._run), amounts)
        before = np.cumsum(units, axis=0)[:-1]
        crossing = self.runs.base + (self.runs.slopes * before).sum(axis=1)
        times[terms.transfer_forward] = times[terms.transfer_backward] = np.maximum(crossing, 0.0)
        return np.asarray(times + self.fixed_times)
