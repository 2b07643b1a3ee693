"""The best cut of a setting by the linear bounds that are known: an integer program.

Let n(s, r) be how many of the units of run r (equal units that follow each other) stage s has.  With v(k, s, r) what one of them
comes to at least in bound k, the least that the bounds let a cut take is

    minimise  theta   over   theta  >=  sum of v(k, s, r) n(s, r) + what crosses the boundaries in k          for every bound k
                             every unit is somewhere, every stage has one, and no unit is in a stage before that of another one
                             which it follows

A stage has units of the next run only behind all of the one before: with c(b, r) = n(0, r) + ... + n(b, r) units up to boundary b

    c(b, r + 1) > 0   only where   c(b, r) = units of r

which is linear where one of the two runs is a single unit, and else takes a binary for every boundary.  What crosses a boundary
depends on the last unit before it, so that it is a sum over the runs that have begun by then.
"""

from __future__ import annotations

import numpy as np

from .cut_graph import Bound, CutGraph
from .cut_regions import Cut, Region

__all__ = ["TOLERANCE", "CutProgram"]

#: The solver's tolerance, relative: what it tells of a threshold is true of one that is smaller by this.
TOLERANCE = 2e-6
#: How near to the best cut an answer has to be, relative.
_GAP = 1e-4


class CutProgram:
    """The program of one setting; bounds are added as they are found."""

    def __init__(self, cut_graph: CutGraph):
        self.cut_graph = cut_graph
        self.stages, self.num_units = cut_graph.num_stages, cut_graph.num_units
        self.first, self.sizes = cut_graph.runs.first, cut_graph.runs.sizes
        self.runs = len(self.sizes)
        self.bounds: list[Bound] = []
        self._rows: list[np.ndarray] = []
        self._constants: list[float] = []
        #: Boundaries and runs at which an own binary tells whether the run is complete.
        pairs = [r for r in range(self.runs - 1) if self.sizes[r] > 1 and self.sizes[r + 1] > 1]
        self._binaries = [(b, r) for b in range(self.stages - 1) for r in pairs]
        self._count = self.stages * self.runs

    def knows(self, path: np.ndarray) -> bool:
        """Whether a path is among the bounds, memory for nothing."""
        return any(bound.is_path(path) for bound in self.bounds)

    def add(self, bound: Bound) -> None:
        """A further bound, at one price of memory."""
        price = bound.prices[0] if bound.prices else np.zeros(self.stages)
        found = self.cut_graph.cheapest(bound.weights, price)
        assert found is not None
        terms = self.cut_graph.terms
        weights = bound.weights[terms.transfer_forward] + bound.weights[terms.transfer_backward]
        crossing, constant = self.cut_graph.runs.crossing(weights)
        row = found[0][:, self.first] + crossing
        constant = float(constant) - self.cut_graph.worth_of_limits(price)
        self.bounds.append(bound)
        self._rows.append(row.ravel())
        self._constants.append(constant)

    def value(self, number: int, cut: Cut) -> float:
        """What a bound comes to at a cut."""
        return float(self._rows[number] @ self._amounts(cut).ravel()) + self._constants[number]

    def _amounts(self, cut: Cut) -> np.ndarray:
        ends = self.first + self.sizes
        return np.array([np.maximum(np.minimum(stop, ends) - np.maximum(first, self.first), 0) for first, stop in cut])

    def solve(self, region: Region, threshold: float, seconds: float) -> tuple[float, Cut] | None:
        """No cut of a region is below the first figure in all bounds, and a cut that is about there; None where none is below the
        threshold.

        Raises:
            TimeoutError: no answer was found in so many seconds.
        """
        # Only here: loading SciPy's optimizers takes longer than most searches.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        limit = threshold * (1 + TOLERANCE)
        extra = len(self._binaries)
        size = self._count + extra + 1
        rows, constants = np.array(self._rows) / limit, np.array(self._constants) / limit
        of_bounds = np.hstack([rows, np.zeros((len(rows), extra)), -np.ones((len(rows), 1))])
        matrix, low, high = self._order(region)
        upper = np.append(
            np.where(self.cut_graph.runs.may_be_in(region.ranges), self.sizes[None], 0).ravel().astype(float),
            np.ones(extra + 1),
        )
        found = milp(
            np.append(np.zeros(size - 1), 1.0),
            constraints=[
                LinearConstraint(csr_matrix(of_bounds), -np.inf, -constants),
                LinearConstraint(csr_matrix(matrix), low, high),
            ],
            integrality=np.append(np.ones(size - 1), 0.0),
            bounds=Bounds(np.append(np.zeros(size - 1), -np.inf), upper),
            options={"mip_rel_gap": _GAP, "time_limit": max(seconds, 0.01)},
        )
        if found.status == 2:
            return None
        if found.x is None:
            raise TimeoutError
        amounts = np.round(found.x[: self._count]).astype(int).reshape(self.stages, self.runs)
        stops = np.cumsum(amounts.sum(axis=1)).tolist()
        return float(found.mip_dual_bound) * limit * (1 - TOLERANCE), list(zip((0, *stops[:-1]), stops))

    def _order(self, region: Region) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The constraints that make numbers of units a cut of the region: coefficients, least and most."""
        size = self._count + len(self._binaries) + 1
        rows: list[np.ndarray] = []
        low: list[float] = []
        high: list[float] = []

        def put(amounts: np.ndarray, least: float, most: float, binary: tuple[int, float] | None = None) -> None:
            row = np.zeros(size)
            row[: self._count] = amounts.ravel()
            if binary is not None:
                row[self._count + binary[0]] = binary[1]
            rows.append(row)
            low.append(least)
            high.append(most)

        shape = (self.stages, self.runs)
        for run, units in enumerate(self.sizes.tolist()):
            whole = np.zeros(shape)
            whole[:, run] = 1.0
            put(whole, units, units)
        for stage in range(self.stages):
            whole = np.zeros(shape)
            whole[stage] = 1.0
            put(whole, 1.0, np.inf)
        for boundary, (least, most) in enumerate(region.ranges):
            until = np.zeros(shape)
            until[: boundary + 1] = 1.0
            put(until, least, most)
            for run in range(self.runs - 1):
                here, there = np.zeros(shape), np.zeros(shape)
                here[: boundary + 1, run] = 1.0 / self.sizes[run]
                there[: boundary + 1, run + 1] = 1.0 / self.sizes[run + 1]
                if self.sizes[run] == 1 or self.sizes[run + 1] == 1:
                    put(here - there, 0.0, np.inf)
                else:
                    number = self._binaries.index((boundary, run))
                    put(here, 0.0, np.inf, (number, -1.0))
                    put(-there, 0.0, np.inf, (number, 1.0))
        return np.array(rows), np.array(low), np.array(high)
