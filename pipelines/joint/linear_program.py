"""Linear programs, which SciPy solves, and lower bounds on their optima that hold whatever the solver has rounded.

    minimise  c x  subject to  A x <= b,  E x = d,  low <= x <= high

For all y >= 0 and all z, every x that satisfies the constraints has

    c x  >=  c x + y (A x - b) + z (E x - d)  >=  -(y b + z d) + sum over j of the least r(j) x(j)  with  r = c + y A + z E

where the least r(j) x(j) is at low(j) or at high(j).  At the dual values of an optimum that is the optimum, but for rounding errors
of these values, which make it only worse (Neumaier and Shcherbina, "Safe bounds in linear and mixed-integer linear programming",
2004).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult
    from scipy.sparse import csr_matrix

__all__ = ["LinearProgram", "UnsolvedError"]

#: Statuses of SciPy's `linprog` for a program that is solved, and for one that has no solution.
_SOLVED, _INFEASIBLE = 0, 2


class UnsolvedError(Exception):
    """The linear program was not solved, because of numerical difficulties."""


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """A linear program of n variables.

    Attributes:
        objective: c, shape (n,).
        rows, most: A, shape (inequalities, n), and b.
        equal_rows, equal: E, shape (equations, n), and d.
        ranges: Least and largest value of each variable, shape (n, 2).
    """

    objective: np.ndarray
    rows: np.ndarray | csr_matrix
    most: np.ndarray
    equal_rows: np.ndarray | csr_matrix
    equal: np.ndarray
    ranges: np.ndarray

    def solved(self) -> OptimizeResult | None:
        """Return SciPy's solution; None if there is none.

        Raises:
            UnsolvedError: The solver had numerical difficulties.
        """
        # Imported here because loading SciPy's optimizers takes longer than most searches.
        from scipy.optimize import linprog

        program = self.objective, self.rows, self.most, self.equal_rows, self.equal, self.ranges
        # The simplex method has numerical difficulties with some programs that have no solution.  To presolve small programs takes
        # longer than it saves.
        for method, options in (("highs-ds", {"presolve": False}), ("highs-ipm", {})):
            solution = linprog(*program, method=method, options=options)
            if solution.status == _SOLVED:
                return solution
            if solution.status == _INFEASIBLE:
                return None
        raise UnsolvedError(solution.message)

    def certain_least(self, solution: OptimizeResult) -> float:
        """Return a lower bound on the optimum by the dual values of a solution; all ranges that these use must be finite."""
        of_rows, of_equations = np.minimum(solution.ineqlin.marginals, 0.0), solution.eqlin.marginals
        reduced = self.objective - of_rows @ self.rows - of_equations @ self.equal_rows
        low, high = self.ranges.T
        ends = np.where(reduced > 0, low, high)
        return float(of_rows @ self.most + of_equations @ self.equal + reduced[reduced != 0] @ ends[reduced != 0])
