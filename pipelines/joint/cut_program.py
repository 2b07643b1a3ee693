"""Cuts of a setting that are below a threshold on all known linear bounds: an integer program.

A chain consists of runs of equal units that follow each other.  The variable n(s, r) is the number of units of run r at stage s.
With v(k, s, r) the least that such a unit costs in bound k, the program is

    minimise  theta  subject to
        theta  >=  sum over s, r of v(k, s, r) n(s, r)  +  transfers over the boundaries in bound k      for every bound k
        sum over s of n(s, r)  =  size(r), the units of run r                                            for every run r
        sum over r of n(s, r)  >=  1                                                                     for every stage s
        the units are in the order of the chain: n is a cut

Its optimum is the least, over all cuts, of the largest bound (:meth:`CutProgram.solve`).  With theta fixed at a threshold, any cut
that satisfies the constraints is as good as another one, and found much sooner (:meth:`CutProgram.find`).

**Order of the units.**  A stage has units of the next run only if all units of this run are at the stage or before it.  With
c(b, r) = n(0, r) + ... + n(b, r), the number of units of run r before boundary b,

    c(b, r + 1) > 0   only if   c(b, r) = size(r)

This is linear if one of the two runs is a single unit.  Otherwise it needs a binary variable z(b, r), which is 1 if run r is
complete before boundary b:

    c(b, r + 1) / size(r + 1)   <=   z(b, r)   <=   c(b, r) / size(r)

**Totals.**  The number of units of all stages of a worker w is a variable of its own if the worker has several stages:

    t(w)  =  sum over w's stages s and over r of n(s, r)

It says nothing new.  But every worker must work for most of a good step, so that its total has few values, while units can move
between its stages almost freely.  So it is good to branch on totals.  With theta fixed, the largest value of each total without
integrality, rounded down, leaves even fewer.

**Memory.**  Prices of memory make cuts that do not fit expensive.  Without an incumbent no cut is too expensive.  Then memory
limits are constraints, with m(s, r) the least bytes of a unit of run r at stage s:

    sum over w's stages s and over r of m(s, r) n(s, r)  <=  limit                                           for every worker w

**Transfers.**  A transfer depends on the last unit before its boundary.  It is bounded by a sum over all units before the boundary
(:class:`.unit_runs.UnitRuns`), which is linear in n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .bounds import Bound
from .cut_graph import CutGraph
from .cut_regions import Cut, Region
from .dual_simplex import DualSimplex
from .linear_program import LinearProgram, UnsolvedError

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint, OptimizeResult
    from scipy.sparse import csr_matrix

__all__ = ["TOLERANCE", "CutProgram"]

#: Relative tolerance of the solver: an answer for a threshold is certain only for a threshold that is smaller by this.
TOLERANCE = 2e-6
#: Relative gap between the solver's cut and its bound at which the solver ends.
_GAP = 1e-4
#: Number of bounds that are kept when there are twice as many, for fractional cuts.
_MAX_BOUNDS = 120
#: A largest total is rounded down, after this is added to it: far more than the tolerance of the solver.
_ROUNDING = 1e-3
#: Status of SciPy's `milp` for an infeasible program.
_INFEASIBLE = 2


class CutProgram:
    """The integer program of one setting; bounds are added between solutions.

    Args:
        cut_graph: The cut graph of the setting.
    """

    def __init__(self, cut_graph: CutGraph):
        self.cut_graph = cut_graph
        self.stages, self.num_units = cut_graph.num_stages, cut_graph.num_units
        self.first, self.sizes = cut_graph.runs.first, cut_graph.runs.sizes
        self.runs = len(self.sizes)
        self.bounds: list[Bound] = []
        #: Per bound the coefficients v(k, s, r) with transfers, as one row, and the constant.
        self._rows: list[np.ndarray] = []
        self._constants: list[float] = []
        #: The boundaries and runs (b, r) that have a binary variable z(b, r).
        pairs = [r for r in range(self.runs - 1) if self.sizes[r] > 1 and self.sizes[r + 1] > 1]
        self._binaries = [(b, r) for b in range(self.stages - 1) for r in pairs]
        #: Number of variables n(s, r).
        self._num_counts = self.stages * self.runs
        #: The stages of each worker; workers of equal stages count once.
        self.stages_of_workers = sorted({tuple(sorted(stage for _, stage in held)) for held in cut_graph.demand.homes})
        #: Those that have a variable t(w).
        self._shared = [stages for stages in self.stages_of_workers if len(stages) > 1]
        #: Number of all variables: n(s, r), z(b, r), t(w) and theta.
        self._num_variables = self._num_counts + len(self._binaries) + len(self._shared) + 1
        #: The largest value of each t(w).
        self._most_totals = np.full(len(self._shared), float(self.num_units))
        #: Number of solutions without integrality, and per bound that of the latest one that it limits.
        self._num_relaxed = 0
        self._last_used: list[int] = []
        #: Solutions without integrality, and the unit of theta in them [s].
        self._simplex: DualSimplex | None = None
        self._unit_s = 0.0

    def copy(self) -> CutProgram:
        """Return a program with the same bounds; bounds that are added to one of the two, or dropped, do not change the other."""
        program = copy(self)
        program.bounds, program._rows = list(self.bounds), list(self._rows)
        program._constants, program._last_used = list(self._constants), list(self._last_used)
        program._most_totals = self._most_totals.copy()
        program._simplex = None
        return program

    def knows(self, path: np.ndarray) -> bool:
        """Return whether a path, without prices of memory, is one of the bounds."""
        return any(bound.is_path(path) for bound in self.bounds)

    def add(self, bound: Bound, of_units: np.ndarray | None = None) -> None:
        """Add a bound, which has one vector of prices at most.

        Args:
            bound: The bound.
            of_units: What every unit costs in it at least at every stage, shape (stages, units), if that is known.
        """
        if of_units is None:
            price = bound.prices[0] if bound.prices else np.zeros(self.stages)
            of_units = self.cut_graph.least_of_units(bound.weights, price, bound.exchange)
            assert of_units is not None
        row, constant = self.cut_graph.row_of(bound, of_units)
        self.bounds.append(bound)
        self._rows.append(row.ravel())
        self._constants.append(constant)
        self._last_used.append(self._num_relaxed)
        if self._simplex is not None:
            self._simplex.add_rows(self._simplex_rows(len(self.bounds) - 1))

    def value(self, number: int, cut: Cut) -> float:
        """Return the value of a bound, given by its number, at a cut [s]."""
        return self.value_at(number, self._unit_counts(cut))

    def largest_value(self, cut: Cut) -> float:
        """Return the largest bound of a cut [s]."""
        counts = self._unit_counts(cut).ravel()
        return float((np.array(self._rows) @ counts + np.array(self._constants)).max())

    def value_at(self, number: int, counts: np.ndarray) -> float:
        """Return the value of a bound, given by its number, for numbers of units n, shape (stages, runs) [s]."""
        return float(self._rows[number] @ counts.ravel()) + self._constants[number]

    def _unit_counts(self, cut: Cut) -> np.ndarray:
        """Return n of a cut, shape (stages, runs)."""
        ends = self.first + self.sizes
        return np.array([np.maximum(np.minimum(stop, ends) - np.maximum(first, self.first), 0) for first, stop in cut])

    def find(self, region: Region, threshold: float, seconds: float) -> Cut | None:
        """Find any cut of a region that is below a threshold on all bounds; None if there is none.

        Args:
            region: The region.
            threshold: The finite threshold [s].
            seconds: Time limit of the solver.

        Raises:
            TimeoutError: The solver did not end within the time limit.
        """
        solution = self._solution(region, threshold * (1 + TOLERANCE), 1.0, False, seconds)
        if solution is None:
            return None
        if solution.x is None:
            raise TimeoutError
        return self._cut_of(solution.x)

    def solve(self, region: Region, threshold: float, seconds: float) -> tuple[float, Cut] | None:
        """Find the cut of a region whose largest bound is the least.

        Args:
            region: The region.
            threshold: Cuts whose largest bound is above it are not searched [s]; may be infinite.
            seconds: Time limit of the solver.

        Returns:
            A lower bound on the optimum, and a cut whose value is close to it; None if no cut is below the threshold.

        Raises:
            TimeoutError: The solver found no cut within the time limit.
        """
        # Costs are scaled so that theta is 1 at the threshold.
        scale, most = threshold * (1 + TOLERANCE), 1.0
        if math.isinf(threshold):
            scale, most = max(float(np.abs(row).max()) for row in self._rows) * self.num_units or 1.0, np.inf
        solution = self._solution(region, scale, most, True, seconds)
        if solution is None:
            return None
        if solution.x is None:
            raise TimeoutError
        return float(solution.mip_dual_bound) * scale * (1 - TOLERANCE), self._cut_of(solution.x)

    def least(self, region: Region, threshold: float, seconds: float) -> float:
        """Return a lower bound on the largest bound of any cut of a region, or the threshold if that is less.

        Args:
            region: The region.
            threshold: The finite threshold [s].
            seconds: Time limit of the solver; with more of it the bound is better.
        """
        scale = threshold * (1 + TOLERANCE)
        solution = self._solution(region, scale, 1.0, True, seconds)
        if solution is None:
            return threshold
        dual_bound = solution.mip_dual_bound
        if dual_bound is None or not math.isfinite(dual_bound):
            return 0.0
        return min(threshold, float(dual_bound) * scale * (1 - TOLERANCE))

    def relaxed(self, region: Region, threshold: float) -> tuple[float, np.ndarray] | None:
        """Find the fractional cut of a region whose largest bound is the least.

        Bounds that have not limited such a cut for the longest time are dropped, if there are many.

        Args:
            region: The region; its ranges of boundaries count only by the units that a stage may have.
            threshold: The finite threshold [s].

        Returns:
            A lower bound on the largest bound of any cut of the region [s], and the numbers of units n of the fractional cut, shape
            (stages, runs); None if no cut is below the threshold.

        Raises:
            TimeoutError: The solver had numerical difficulties.
        """
        solved = self._relaxed(region, threshold)
        if solved is None:
            return None
        value_s, counts = solved
        self._num_relaxed += 1
        values = np.array(self._rows) @ counts + np.array(self._constants)
        for number in np.flatnonzero(values >= value_s * (1 - TOLERANCE)).tolist():
            self._last_used[number] = self._num_relaxed
        if len(self.bounds) > 2 * _MAX_BOUNDS:
            self._drop_bounds()
        return value_s, counts.reshape(self.stages, self.runs)

    def _drop_bounds(self) -> None:
        """Drop the bounds that have not limited a fractional cut for the longest time."""
        order = np.argsort(-np.array(self._last_used), kind="stable")
        latest = order[:_MAX_BOUNDS]
        if self._simplex is not None:
            self._simplex.drop_rows(int(self._cut_rows[1].sum()) + order[_MAX_BOUNDS:])
        for name in ("bounds", "_rows", "_constants", "_last_used"):
            known = getattr(self, name)
            setattr(self, name, [known[number] for number in sorted(latest.tolist())])

    def _relaxed(self, region: Region, threshold: float) -> tuple[float, np.ndarray] | None:
        """As :meth:`relaxed`; the numbers of units have the shape (stages * runs,)."""
        if self._simplex is None:
            self._unit_s, self._simplex = threshold, DualSimplex(len(self._used))
            self._simplex.add_rows(self._cut_rows[0][self._cut_rows[1]].toarray()[:, self._used])
            self._simplex.add_rows(self._simplex_rows(0))
        most_theta = 2 * threshold / self._unit_s
        lower, upper = self._ranges(region, most_theta)
        lower[-1] = 0.0
        low, high = (limits[self._cut_rows[1]] for limits in self._cut_limits(region))
        constants = np.array(self._constants) / self._unit_s
        least = np.concatenate([lower[self._used], low, constants])
        most = np.concatenate([upper[self._used], np.minimum(high, self.num_units), np.full(len(constants), np.inf)])
        x = np.zeros(self._num_variables)
        try:
            solved = self._simplex.minimise(least, most, threshold / self._unit_s)
            if solved is None:
                return None
            value_s, x[self._used] = solved[0] * self._unit_s, solved[1]
        except UnsolvedError:
            constraints = self._constraints(region, self._unit_s, most_theta, is_relaxed=True)
            minimum = self._minimised(_without_integrality(constraints, lower, upper), -1, 1.0)
            if minimum is None or minimum[0] * self._unit_s >= threshold:
                return None
            value_s, x = minimum[0] * self._unit_s, minimum[1]
        return value_s, x[: self._num_counts]

    @cached_property
    def _used(self) -> np.ndarray:
        """The variables that are not 0 in all cuts."""
        is_used = np.ones(self._num_variables, dtype=bool)
        is_used[: self._num_counts] = self.cut_graph.runs.possible.ravel()
        return np.flatnonzero(is_used)

    def _simplex_rows(self, first: int) -> np.ndarray:
        """The rows of the bounds from the given one on: theta - v n, at least the constant."""
        rows = -self._padded(np.array(self._rows[first:]) / self._unit_s)
        rows[:, -1] = 1.0
        return rows[:, self._used]

    def limits_of_totals(self, region: Region) -> dict[tuple[int, ...], tuple[int, int]]:
        """The least and the largest total of every worker with several stages in a region, by its stages."""
        most = [region.totals.get(stages, int(limit)) for stages, limit in zip(self._shared, self._most_totals)]
        least = [region.totals.get(stages, len(stages)) for stages in self._shared]
        if len(self._shared) == len(self.stages_of_workers):
            # All units of other stages are in the totals of other workers.
            least = [max(few, self.num_units - sum(most) + many) for few, many in zip(least, most)]
        return dict(zip(self._shared, zip(least, most)))

    def narrow_totals(self, region: Region, threshold: float) -> None:
        """Lower the largest totals to those that a cut below a finite threshold may have; they hold from now on.

        Args:
            region: The region of all cuts that are searched from now on.
            threshold: The largest threshold from now on [s].
        """
        constraints = self._constraints(region, threshold * (1 + TOLERANCE), 1.0, is_relaxed=True)
        lower, upper = self._ranges(region, 1.0)
        with suppress(TimeoutError):
            if self._narrows(constraints, lower, upper):
                self._most_totals = upper[self._totals]

    def _narrows(self, constraints: list[LinearConstraint], lower: np.ndarray, upper: np.ndarray) -> bool:
        """Lower the upper limits of totals to those without integrality, rounded down; return whether there is a solution.

        Raises:
            TimeoutError: The solver had numerical difficulties.
        """
        program = _without_integrality(constraints, lower, upper)
        for total in self._totals:
            solved = self._minimised(program, total, -1.0)
            if solved is None:
                return False
            upper[total] = program.ranges[total, 1] = math.floor(-solved[0] + _ROUNDING)
        return True

    def _minimised(self, program: LinearProgram, variable: int, sign: float) -> tuple[float, np.ndarray] | None:
        """Minimise a variable times ``sign``.

        Returns:
            A certain lower bound, and the values of all variables; None if there is no solution.

        Raises:
            TimeoutError: The solver had numerical difficulties.
        """
        objective = np.zeros(self._num_variables)
        objective[variable] = sign
        program = replace(program, objective=objective)
        try:
            solution = program.solved()
        except UnsolvedError:
            raise TimeoutError from None
        return None if solution is None else (program.certain_least(solution), solution.x)

    def _solution(
        self, region: Region, scale: float, most: float, minimises: bool, seconds: float
    ) -> OptimizeResult | None:
        """Solve the program; its variables are n(s, r), z(b, r), t(w) and theta.  None if it has no solution.

        Args:
            region: The region of the cuts.
            scale: Unit of theta [s].
            most: Largest theta, in units of ``scale``; without a limit the memory of workers is limited.
            minimises: Whether theta is minimised; if not, the ranges of totals are narrowed first.
            seconds: Time limit of the solver.

        Raises:
            TimeoutError: The solver had numerical difficulties.
        """
        # Imported here because loading SciPy's optimizers takes longer than most searches.
        from scipy.optimize import Bounds, milp

        constraints = self._constraints(region, scale, most)
        lower, upper = self._ranges(region, most)
        if not minimises and not self._narrows(constraints, lower, upper):
            return None
        solution = milp(
            np.eye(1, self._num_variables, self._num_variables - 1)[0] * minimises,
            constraints=constraints,
            integrality=np.append(np.ones(self._num_variables - 1), 0.0),
            bounds=Bounds(lower, upper),
            options={"mip_rel_gap": _GAP, "time_limit": max(seconds, 0.01)},
        )
        return None if solution.status == _INFEASIBLE else solution

    @property
    def _totals(self) -> range:
        """The variables t(w)."""
        return range(self._num_variables - 1 - len(self._shared), self._num_variables - 1)

    def _constraints(
        self, region: Region, scale: float, most: float, is_relaxed: bool = False
    ) -> list[LinearConstraint]:
        """Return the constraints of the program; arguments as those of :meth:`_solution`.

        Constraints that hold by themselves in all cuts are left out if ``is_relaxed``.  They make linear programs slow, but integer
        programs branch better with them.
        """
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_matrix

        of_bounds = self._padded(np.array(self._rows) / scale)
        of_bounds[:, -1] = -1.0
        constraints = [
            LinearConstraint(csr_matrix(of_bounds), -np.inf, -np.array(self._constants) / scale),
            self._cut_constraint(region, is_relaxed),
        ]
        if math.isinf(most):
            constraints.append(LinearConstraint(csr_matrix(self._padded(self._memory_rows)), -np.inf, 1 + TOLERANCE))
        return constraints

    def _cut_constraint(self, region: Region, is_relaxed: bool) -> LinearConstraint:
        """Return the constraints by which n is a cut of a region; arguments as those of :meth:`_constraints`."""
        from scipy.optimize import LinearConstraint

        matrix, is_needed = self._cut_rows
        low, high = self._cut_limits(region)
        if not is_relaxed or region.ranges != Region.whole(self.stages, self.num_units).ranges:
            return LinearConstraint(matrix, low, high)
        return LinearConstraint(matrix[is_needed], low[is_needed], high[is_needed])

    def _ranges(self, region: Region, most: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the largest value of each variable; arguments as those of :meth:`_solution`."""
        lower, upper = np.zeros(self._num_variables), np.ones(self._num_variables)
        lower[-1], upper[-1] = -np.inf, most
        upper[: self._num_counts] = np.where(
            self.cut_graph.runs.possible_in(region.ranges), self.sizes[None], 0
        ).ravel()
        # Every stage has a unit.  With 0 in place of that the solver would see that totals are free, and remove them.
        lower[self._totals] = [region.totals.get(stages, len(stages)) for stages in self._shared]
        upper[self._totals] = [region.totals.get(stages, most) for stages, most in zip(self._shared, self._most_totals)]
        return lower, upper

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        """Coefficients of all variables, from those of n: shape (rows, variables) from (rows, stages * runs)."""
        return np.pad(rows, ((0, 0), (0, self._num_variables - self._num_counts)))

    def _cut_of(self, solution: np.ndarray) -> Cut:
        """Return the cut of a solution's variables."""
        counts = np.round(solution[: self._num_counts]).astype(int).reshape(self.stages, self.runs)
        stops = np.cumsum(counts.sum(axis=1)).tolist()
        return list(zip((0, *stops[:-1]), stops))

    @cached_property
    def _memory_rows(self) -> np.ndarray:
        """Coefficients of n in the least bytes on each worker, in memory limits."""
        least = self.cut_graph.least_of_units(np.zeros(self.cut_graph.terms.count), np.ones(self.stages))
        assert least is not None
        nbytes = least[:, self.first]
        rows = np.zeros((len(self.stages_of_workers), *nbytes.shape))
        for row, stages in zip(rows, self.stages_of_workers):
            for stage in stages:
                row[stage] += nbytes[stage]
        return rows.reshape(len(rows), -1) / self.cut_graph.limit_bytes

    @cached_property
    def _cut_rows(self) -> tuple[csr_matrix, np.ndarray]:
        """Coefficients of the constraints by which n is a cut, and which of them do not hold by themselves in all cuts.

        The constraints are those of :meth:`_cut_limits`: of the runs, of the stages, of the totals, and for each boundary that of
        its place and those of the order of units.
        """
        from scipy.sparse import csr_matrix

        rows: list[np.ndarray] = []
        needed: list[bool] = []

        def put(coefficients: np.ndarray, other: tuple[int, float] | None = None, is_needed: bool = True) -> None:
            row = np.zeros(self._num_variables)
            row[: self._num_counts] = coefficients.ravel()
            if other is not None:
                row[self._num_counts + other[0]] = other[1]
            rows.append(row)
            needed.append(is_needed)

        shape = (self.stages, self.runs)
        is_possible = self.cut_graph.runs.possible
        # Every unit is at one stage.
        for run in range(self.runs):
            of_run = np.zeros(shape)
            of_run[:, run] = 1.0
            put(of_run)
        # The units of every stage are within their range.
        for stage in range(self.stages):
            of_stage = np.zeros(shape)
            of_stage[stage] = 1.0
            put(of_stage)
        for number, stages in enumerate(self._shared):
            # The units of the worker's stages are its total.
            of_worker = np.zeros(shape)
            of_worker[list(stages)] = 1.0
            put(of_worker, (len(self._binaries) + number, -1.0))
        for boundary in range(self.stages - 1):
            # The boundary is within its range.
            before = np.zeros(shape)
            before[: boundary + 1] = 1.0
            put(before, is_needed=False)
            # Units of the next run are before the boundary only if this run is complete there.
            for run in range(self.runs - 1):
                may_break = bool(is_possible[boundary + 1 :, run].any() and is_possible[: boundary + 1, run + 1].any())
                this, following = np.zeros(shape), np.zeros(shape)
                this[: boundary + 1, run] = 1.0 / self.sizes[run]
                following[: boundary + 1, run + 1] = 1.0 / self.sizes[run + 1]
                if self.sizes[run] == 1 or self.sizes[run + 1] == 1:
                    put(this - following, is_needed=may_break)
                else:
                    number = self._binaries.index((boundary, run))
                    put(this, (number, -1.0), may_break)
                    put(-following, (number, 1.0), may_break)
        return csr_matrix(np.array(rows)), np.array(needed)

    def _cut_limits(self, region: Region) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the largest values of the constraints by which n is a cut of a region (:attr:`_cut_rows`)."""
        num_totals, num_rows = len(self._shared), self._cut_rows[0].shape[0]
        least, most = region.limits_of_sizes.astype(float)
        most[most > self.num_units - self.stages] = np.inf  # it follows from the other stages
        low, high = np.zeros(num_rows), np.full(num_rows, np.inf)
        first = self.runs + self.stages + num_totals
        low[:first] = np.concatenate([self.sizes, least, np.zeros(num_totals)])
        high[:first] = np.concatenate([self.sizes, most, np.zeros(num_totals)])
        if region.ranges:
            places = np.arange(first, num_rows, (num_rows - first) // len(region.ranges))
            low[places], high[places] = np.array(region.ranges).T
        return low, high


def _without_integrality(
    constraints: Sequence[LinearConstraint], lower: np.ndarray, upper: np.ndarray
) -> LinearProgram:
    """Return the program with these constraints, and ranges of its variables, without an objective."""
    from scipy.sparse import vstack

    matrix = vstack([one.A for one in constraints], format="csr")
    low, high = (
        np.concatenate([np.broadcast_to(getattr(one, end), one.A.shape[0]) for one in constraints])
        for end in ("lb", "ub")
    )
    is_equal = low == high
    has_high, has_low = np.isfinite(high) & ~is_equal, np.isfinite(low) & ~is_equal
    return LinearProgram(
        objective=np.zeros(len(lower)),
        rows=vstack([matrix[has_high], -matrix[has_low]], format="csr"),
        most=np.concatenate([high[has_high], -low[has_low]]),
        equal_rows=matrix[is_equal],
        equal=high[is_equal],
        # No step takes less than no time; the certain bound needs finite ranges.
        ranges=np.column_stack([np.maximum(lower, 0.0), upper]),
    )
