"""The dual simplex method for linear programs that change little from one to the next.

A program has variables x and *activities* z = A x, all with ranges.  It minimises the last variable, theta:

    minimise  theta  subject to  z = A x,  low <= (x, z) <= high

A *basis* divides x and z into nonbasic ones v, each at an end of its range, and basic ones w = D v.  In particular
theta = d v.  If each nonbasic variable is at the end at which d v is the least, then d v is a lower bound on the optimum, whatever
the ranges of the basic ones are: the basis is *dual feasible*.  If the basic ones are within their ranges, it is the optimum.  Else
the method exchanges a basic variable that is outside its range for a nonbasic one, so that the bound rises.

Three properties make it good for branch and cut:

-   Ranges may change: a dual feasible basis remains one.  A program begins where the one before ended, and needs few exchanges.
-   A new row is a new activity, which is basic.
-   The bound rises, so that the method ends as soon as the bound reaches a cutoff.

**Rounding.**  d v is computed again from the rows and the ranges themselves, with the residual theta - d v as a linear function of
x, which should be 0.  So the bound is certain however large the errors of D are (as in :mod:`.linear_program`).

**Choices.**  The basic variable is the one farthest outside its range, measured along the edge of the dual polyhedron (Forrest and
Goldfarb, "Steepest-edge simplex algorithms for linear programming", 1992).  The nonbasic one is found by a long step: variables
whose ranges are short change to their other end as long as the bound rises (Maros, "A generalized dual phase-2 simplex algorithm",
2003).  Small random costs of x prevent cycles; they are left out of the bound.
"""

from __future__ import annotations

import numpy as np

from .linear_program import UnsolvedError

__all__ = ["DualSimplex"]

#: A basic variable is within its range if it is outside by less than this.
_FEASIBLE = 1e-9
#: Smallest element of D for an exchange.
_PIVOT = 1e-8
#: Size of random costs.
_COSTS = 1e-7
#: Number of exchanges after which D is computed again, and the largest number for one program.
_MAX_AGE, _MAX_EXCHANGES = 100, 3000


class DualSimplex:
    """The programs of one sequence.

    Args:
        num_variables: Number of variables x; the last one is theta.
    """

    def __init__(self, num_variables: int):
        self._rows = np.zeros((0, num_variables))
        self._num_variables = num_variables
        self._costs = _COSTS * (1 + np.random.default_rng(0).random(num_variables))
        self._costs[-1] = 1.0
        #: The nonbasic variables; activities are numbered from ``num_variables`` on.
        self._nonbasic = np.arange(num_variables)

    def add_rows(self, rows: np.ndarray) -> None:
        """Add rows of A, shape (rows, variables)."""
        self._rows = np.vstack([self._rows, rows])

    def drop_rows(self, numbers: np.ndarray) -> None:
        """Drop some rows of A, by their numbers."""
        activities = self._nonbasic - self._num_variables
        if np.isin(activities, numbers).any():
            self._nonbasic = np.arange(self._num_variables)
        else:
            before = np.searchsorted(np.sort(numbers), activities)
            self._nonbasic = self._nonbasic - np.where(activities >= 0, before, 0)
        self._rows = np.delete(self._rows, numbers, axis=0)

    def minimise(self, low: np.ndarray, high: np.ndarray, cutoff: float) -> tuple[float, np.ndarray] | None:
        """Minimise theta.

        Args:
            low, high: Least and largest value of every variable and activity, shape (variables + rows,).  Variables have finite
                ranges; of an activity one end at least is finite, and remains finite.
            cutoff: The method ends when the optimum is known to be at least this.

        Returns:
            A certain lower bound on the optimum, and x at the optimum; None if the optimum is at least the cutoff, or if there is
            no solution.

        Raises:
            UnsolvedError: The method has numerical difficulties.
        """
        self._low, self._high = low, high
        if low[self._num_variables - 1] >= cutoff:
            return None
        for number in range(_MAX_EXCHANGES):
            if number % _MAX_AGE == 0:
                self._rebuild()
            is_low = self._is_low()
            at = np.where(is_low, low[self._nonbasic], high[self._nonbasic])
            values = self._matrix @ at
            of_theta = np.flatnonzero(self._basic == self._num_variables - 1)  # none if theta is nonbasic
            if (values[of_theta] >= cutoff).any() and self._certain_least(int(of_theta[0]), 1.0) >= cutoff:
                return None
            below = low[self._basic] - values
            outside = np.maximum(below, values - high[self._basic])
            if outside.max(initial=0.0) <= _FEASIBLE:
                both = np.empty(len(low))
                both[self._nonbasic], both[self._basic] = at, values
                x = both[: self._num_variables]
                return self._certain_least(int(of_theta[0]), 1.0) if len(of_theta) else float(x[-1]), x
            leaving = self._leaving(outside)
            sign = 1.0 if below[leaving] > 0 else -1.0
            entering = self._entering(sign * self._matrix[leaving], is_low, float(outside[leaving]))
            if entering is None:
                end = low if sign > 0 else high
                if self._certain_least(leaving, -sign) > -sign * end[self._basic[leaving]]:
                    return None
                break
            self._exchange(leaving, entering)
        self._nonbasic = np.arange(self._num_variables)
        raise UnsolvedError("neither a solution nor a proof that there is none")

    def _rebuild(self) -> None:
        """Compute D from the rows."""
        n, rows = self._num_variables, self._rows
        is_nonbasic = np.zeros(n + len(rows), dtype=bool)
        is_nonbasic[self._nonbasic] = True
        basic = np.flatnonzero(~is_nonbasic)
        nonbasic = np.flatnonzero(is_nonbasic)
        x_in, x_out = basic[basic < n], nonbasic[nonbasic < n]
        z_in, z_out = basic[basic >= n] - n, nonbasic[nonbasic >= n] - n
        # The nonbasic activities give the basic variables: z_out = A[z_out, x_in] x_in + A[z_out, x_out] x_out.
        of_others = np.hstack([-rows[np.ix_(z_out, x_out)], np.eye(len(z_out))])
        try:
            of_x = np.linalg.solve(rows[np.ix_(z_out, x_in)], of_others)
        except np.linalg.LinAlgError as error:
            self._nonbasic = np.arange(n)
            raise UnsolvedError("a singular basis") from error
        of_z = rows[np.ix_(z_in, x_in)] @ of_x
        of_z[:, : len(x_out)] += rows[np.ix_(z_in, x_out)]
        self._matrix, self._basic, self._nonbasic = np.vstack([of_x, of_z]), basic, nonbasic
        costs = np.concatenate([self._costs, np.zeros(len(rows))])
        self._reduced = costs[nonbasic] + costs[basic] @ self._matrix

    def _is_low(self) -> np.ndarray:
        """Whether each nonbasic variable is at the low end of its range."""
        has_low, has_high = np.isfinite(self._low[self._nonbasic]), np.isfinite(self._high[self._nonbasic])
        return np.where(has_low & has_high, self._reduced >= 0, has_low)

    def _leaving(self, outside: np.ndarray) -> int:
        """The basic variable that is exchanged, by how far each is outside its range."""
        norms = 1.0 + np.einsum("ij,ij->i", self._matrix, self._matrix)
        return int(np.argmax(np.maximum(outside, 0.0) ** 2 / norms))

    def _entering(self, row: np.ndarray, is_low: np.ndarray, outside: float) -> int | None:
        """The nonbasic variable that a basic one is exchanged for, which is ``outside`` below its range (or above, if the row of D
        has the opposite sign); None if there is no solution."""
        low, high = self._low[self._nonbasic], self._high[self._nonbasic]
        candidates = np.flatnonzero(np.where(is_low, row > _PIVOT, row < -_PIVOT) & (low < high))
        steps = np.abs(row[candidates])
        ratios = np.abs(self._reduced[candidates]) / steps
        order = np.argsort(ratios, kind="stable")
        gains = np.cumsum(steps[order] * (high - low)[candidates[order]])
        place = int(np.searchsorted(gains, outside - _FEASIBLE))
        if place == len(order):
            return None
        return int(candidates[order[place]])

    def _exchange(self, leaving: int, entering: int) -> None:
        """Exchange a basic variable for a nonbasic one, by their numbers in D."""
        matrix, pivot = self._matrix, self._matrix[leaving, entering]
        row = matrix[leaving] / -pivot
        row[entering] = 1.0 / pivot
        column = matrix[:, entering].copy()
        matrix[:, entering] = 0.0
        matrix += np.outer(column, row)
        matrix[leaving] = row
        of_entering = self._reduced[entering]
        self._reduced[entering] = 0.0
        self._reduced = self._reduced + of_entering * row
        basic, nonbasic = self._basic[leaving], self._nonbasic[entering]
        self._basic[leaving], self._nonbasic[entering] = nonbasic, basic

    def _certain_least(self, place: int, sign: float) -> float:
        """A certain lower bound on a basic variable, times ``sign``, by its row of D and the ranges of nonbasic variables."""
        n = self._num_variables
        weights = np.zeros(len(self._low))
        weights[self._nonbasic] = sign * self._matrix[place]
        # Weights of the wrong sign are rounding errors.
        weights[(weights > 0) & ~np.isfinite(self._low)] = 0.0
        weights[(weights < 0) & ~np.isfinite(self._high)] = 0.0
        number = self._basic[place]
        of_x = np.eye(1, n, number)[0] if number < n else self._rows[number - n]
        weights[:n] = sign * of_x - weights[n:] @ self._rows
        used = np.flatnonzero(weights)
        return float(weights[used] @ np.where(weights[used] > 0, self._low[used], self._high[used]))
