"""Whether a cut has a selection of rows below a threshold on every bound: an integer program.

Stage s has candidate rows (:mod:`.row_search`).  Row i costs c(k, s, i) in bound k, with the least transfers behind the stage.  The
variable x(s, i) is 1 if row i is selected.  Beside the constraints of :mod:`.row_constraints` the program has

    sum over s, i of c(k, s, i) x(s, i)  +  crossings  +  shared weights  <=  threshold       for every bound k

*Crossings.*  A transfer between two layouts, l before the boundary and m behind it, may take longer than the least.  Its extra
seconds count y times, where y >= 0 and

    y  >=  sum over the rows i of exit l of x(s, i)  +  sum over the rows i of entry m of x(s + 1, i)  -  1

*Shared weights.*  Two stages that share a weight reduce as many bytes as the one with more of them has.  This takes g seconds:

    g  >=  sum over i of seconds(s, i) x(s, i)                                                for both stages s

A solver keeps to these constraints up to a tolerance.  To make that small, costs count from the least cost of each stage on, in
units of what this leaves below the threshold, and g in units of the longest all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.search.dominance import undominated

from .row_constraints import RowConstraints
from .row_states import Extensions

__all__ = ["Crossing", "SelectionProgram", "SharedSeconds"]

#: Part of the room below the threshold, and of the memory limit, by which the solver may exceed them.  Nothing within them is lost.
_TOLERANCE = 2e-6
#: Relative gap at which the solver ends, for the value of a selection in the first bound above the least.
_GAP = 0.02
#: Status of SciPy's `milp` for an infeasible program.
_INFEASIBLE = 2


@dataclass(frozen=True, eq=False)
class Crossing:
    """A transfer between two layouts that takes longer than the least.

    Attributes:
        stage: The stage before the boundary.
        source, target: Numbers of the layouts before and behind the boundary.
        costs: What it costs in every bound beyond the least transfer [s], shape (bounds,).
    """

    stage: int
    source: int
    target: int
    costs: np.ndarray


@dataclass(frozen=True, eq=False)
class SharedSeconds:
    """The all-reduce of a weight that two stages share.

    Attributes:
        of_rows: Per stage that holds the weight, the seconds of the all-reduce for the bytes of each of its rows, shape (rows,).
        weights: How often the all-reduce counts in every bound, shape (bounds,).
    """

    of_rows: dict[int, np.ndarray]
    weights: np.ndarray

    @property
    def longest_s(self) -> float:
        """The longest all-reduce of any row; 1 if none takes any time."""
        return max(float(seconds.max()) for seconds in self.of_rows.values()) or 1.0


class SelectionProgram:
    """The program of one cut.

    Args:
        rows: Per stage its rows.
        workers: The stages of each worker that holds several.
        limit_bytes: Memory limit of a device [bytes].
        threshold: A selection is below it in every bound [s].
        crossings: Known transfers that take longer than the least.
        shared: The weights that two stages of different workers share.
    """

    def __init__(
        self,
        rows: Sequence[Extensions],
        workers: Sequence[Sequence[int]],
        limit_bytes: float,
        threshold: float,
        crossings: Sequence[Crossing],
        shared: Sequence[SharedSeconds],
    ) -> None:
        self.rows = rows
        least = [of_stage.costs.min(axis=0) for of_stage in rows]
        #: What the least costs of all stages leave below the threshold, per bound.
        self._room = threshold - np.sum(least, axis=0)
        #: Per stage the rows that can be of use, and what they cost beyond the least, in units of the room.
        self._useful: list[np.ndarray] = []
        self._costs: list[np.ndarray] = []
        self.is_possible = bool((self._room > 0).all())
        if not self.is_possible:
            return
        for stage, (of_stage, lowest) in enumerate(zip(rows, least)):
            costs = (of_stage.costs - lowest) / self._room
            own = np.flatnonzero((costs <= 1.0).all(axis=1))
            kinds = np.unique(np.stack([of_stage.entry, of_stage.exit], axis=1)[own], axis=0, return_inverse=True)[1]
            others = [of_rows[own] for of_rows in (one.of_rows.get(stage) for one in shared) if of_rows is not None]
            vectors = np.column_stack([costs[own], of_stage.memory[own], of_stage.buffer[own], *others])
            own = own[undominated(kinds.ravel(), vectors)]
            self._useful.append(own)
            self._costs.append(costs[own])
        self.is_possible = all(len(own) for own in self._useful)
        if self.is_possible:
            self._constraints = self._constrained(workers, limit_bytes, crossings, shared)

    def exclude(self, selected: Sequence[int]) -> None:
        """Exclude one selection, given by the row of every stage."""
        chosen = [(span, own == row) for span, own, row in zip(self._constraints.spans, self._useful, selected)]
        self._constraints.put(-np.inf, len(selected) - 1.0, chosen)

    def find(self, seconds: float) -> list[int] | None:
        """Return the row of every stage for a selection that is below the threshold, up to rounding errors; None if there is none.

        It is one of the best in the first bound: any other one would do, but better ones are found in fewer steps from good ones.

        Args:
            seconds: Time limit of the solver.

        Raises:
            TimeoutError: The solver did not end within the time limit.
        """
        # Imported here because loading SciPy's optimizers takes longer than most searches.
        from scipy.optimize import Bounds, milp

        if not self.is_possible:
            return None
        integrality = self._constraints.integrality
        cost = np.zeros(len(integrality))
        for span, costs in zip(self._constraints.spans, self._costs):
            cost[span] = costs[:, 0]
        solution = milp(
            cost,
            constraints=self._constraints.constraint,
            integrality=integrality,
            bounds=Bounds(np.zeros(len(integrality)), np.where(integrality > 0, 1.0, np.inf)),
            options={"mip_rel_gap": _GAP, "time_limit": max(seconds, 0.01)},
        )
        if solution.status == _INFEASIBLE:
            return None
        if solution.x is None:
            raise TimeoutError
        return [int(own[np.argmax(solution.x[span])]) for own, span in zip(self._useful, self._constraints.spans)]

    def _constrained(
        self,
        workers: Sequence[Sequence[int]],
        limit_bytes: float,
        crossings: Sequence[Crossing],
        shared: Sequence[SharedSeconds],
    ) -> RowConstraints:
        """Return the constraints; arguments as of the class."""
        memory, buffers = (
            [nbytes[own] / limit_bytes for nbytes, own in zip(of_stages, self._useful)]
            for of_stages in ([one.memory for one in self.rows], [one.buffer for one in self.rows])
        )
        constraints = RowConstraints(memory, buffers, workers, 1.0 + _TOLERANCE, len(crossings) + len(shared))
        spans = constraints.spans
        extra = list(zip(constraints.others, crossings))
        reduced = list(zip(constraints.others[len(crossings) :], shared))
        for bound, room in enumerate(self._room.tolist()):
            parts: list[tuple[slice, np.ndarray | float]] = [
                (span, costs[:, bound]) for span, costs in zip(spans, self._costs)
            ]
            # A crossing that takes more than the room is as impossible as one that takes twice the room.
            parts += [(variable, min(float(one.costs[bound]) / room, 2.0)) for variable, one in extra]
            parts += [(variable, one.weights[bound] * one.longest_s / room) for variable, one in reduced]
            constraints.put(-np.inf, 1.0 + _TOLERANCE, parts)
        for variable, one in extra:
            before, behind = one.stage, one.stage + 1
            leaves = self.rows[before].exit[self._useful[before]] == one.source
            enters = self.rows[behind].entry[self._useful[behind]] == one.target
            constraints.put(-np.inf, 1.0, [(variable, -1.0), (spans[before], leaves), (spans[behind], enters)])
        for variable, weight in reduced:
            for stage, seconds in weight.of_rows.items():
                parts_of_longest = seconds[self._useful[stage]] / weight.longest_s
                constraints.put(-np.inf, 0.0, [(variable, -1.0), (spans[stage], parts_of_longest)])
        return constraints
