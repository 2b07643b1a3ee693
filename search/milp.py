"""The optimum by integer programming, for graphs that are too wide for elimination.

With a binary x_i[a] for each label a of each variable i (see `reduction`), and y_e[A, B] >= 0 for each pair of classes that edge
e = (i, j) allows (the local marginal linearisation of pairwise models):

    minimise    sum_i cost_i . x_i  +  sum_e cost_e . y_e
    choice      sum_a x_i[a] = 1                                    for each i
    marginals   sum_B y_e[A, B] = sum of x_i[a], a in class A       for each e and A;   likewise for j and B
    peak        b >= buffer_i . x_i                                 for each i
    limit       sum_i memory_i . x_i + b <= M

If x is integral, y is integral and b is the largest buffer, so the program is exact.  HiGHS solves it by branch and bound
(`scipy.optimize.milp`).  Costs are scaled so that its absolute tolerance of 1e-6 is a relative 1e-10, and memory is scaled to a
limit of 10^4.  Choices are checked against the limit in whole bytes.  If a choice exceeds it by less than the tolerance of the
solver, a cut excludes it (not all of its labels again), and the program is solved again.  The bound is that of HiGHS, to its
relative tolerance of 1e-6.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, vstack

from autoddl.costmodel.stopping import Deadline, Stop, StopRequestedError
from autoddl.costmodel.table import CostTable

from .outcomes import check_limits, infeasible, unless_stopped, unproven
from .progress import Progress, silent
from .reduction import Reduced, check_table, reduce_table
from .result import Result, Status

__all__ = ["MilpOutcome", "milp_least_memory", "milp_optimum", "solve_milp"]

#: Largest coefficient of the scaled objective.
_SCALE = 1e4
#: Interval [s] at which a stop is polled while HiGHS runs.
_POLL_S = 0.05
#: Largest number of cuts that exclude choices over the limit by a rounding error.
_MAX_CUTS = 100


@dataclass(frozen=True)
class MilpOutcome:
    """The outcome of an integer program.

    Attributes:
        bound: a lower bound on the objective; ``inf`` if infeasible.
        choice: the best choice found; None if there is none.
        finished: whether the choice is the optimum, or infeasibility is proven.
        nodes: number of nodes of the branch and bound.
    """

    bound: float
    choice: tuple[int, ...] | None
    finished: bool
    nodes: int


def solve_milp(
    table: CostTable,
    *,
    memory_limit: float | None = None,
    time_limit: float | None = None,
    progress: Progress = silent,
    stop: Stop | None = None,
) -> Result:
    """Find the optimum by HiGHS.

    The search ends with a gap at the time limit [s] (LIMIT_REACHED), or when a ``stop`` is requested (INTERRUPTED).
    ``evaluations`` counts the choices that HiGHS returned.

    Raises:
        SearchError: a limit is not positive, or the table is invalid.
    """
    start = time.perf_counter()
    check_limits(memory_limit=memory_limit, time_limit=time_limit)
    deadline = Deadline(time_limit, stop)
    check_table(table)
    reduced = reduce_table(table)
    found = milp_optimum(table, reduced, memory_limit, deadline)
    statistics = {"nodes": found.nodes}
    if found.finished and found.choice is None:
        smallest = unless_stopped(lambda stop: milp_least_memory(table, reduced, stop)[0], deadline.stop)
        return infeasible(table, "milp", start, memory_limit, smallest, statistics)
    cost = math.inf if found.choice is None else table.evaluate(found.choice)
    progress(cost, min(found.bound, cost), 1)
    return Result(
        method="milp",
        status=Status.OPTIMAL if found.finished else unproven(deadline),
        choice=found.choice,
        cost=cost,
        lower_bound=cost if found.finished else min(found.bound, cost),
        memory_bytes=math.nan if found.choice is None else table.peak_memory(found.choice),
        space_size=table.space_size,
        evaluations=int(found.choice is not None),
        seconds=time.perf_counter() - start,
        memory_limit_bytes=memory_limit,
        statistics=statistics,
    )


def milp_optimum(table: CostTable, reduced: Reduced, memory_limit: float | None, deadline: Deadline) -> MilpOutcome:
    """Minimise the cost under the limit on peak memory, until the deadline."""
    if deadline.stop.is_requested:
        return MilpOutcome(-math.inf, None, False, 0)
    if reduced.empty:
        return MilpOutcome(math.inf, None, True, 0)
    program = _Program(reduced)
    return program.minimise(table, program.cost, program.offset, memory_limit, deadline)


def milp_least_memory(table: CostTable, reduced: Reduced, stop: Stop) -> tuple[float, tuple[int, ...] | None]:
    """The least peak memory [bytes] of a choice of finite cost, and such a choice; ``(inf, None)`` if there is none.

    Raises:
        StopRequestedError: the stop was requested.
    """
    if reduced.empty:
        return math.inf, None
    program = _Program(reduced)
    found = program.minimise(table, program.peak, 0.0, None, Deadline(None, stop))
    if not found.finished:
        stop.check()
    return (math.inf, None) if found.choice is None else (table.peak_memory(found.choice), found.choice)


class _Program:
    """The columns (x, then y, then b) and rows of the program, without the memory limit."""

    def __init__(self, reduced: Reduced) -> None:
        self.reduced = reduced
        labels = [len(domain.cost) for domain in reduced.domains]
        self.first = np.concatenate([[0], np.cumsum(labels)]).astype(np.intp)
        self.num_labels = int(self.first[-1])
        pairs = [np.isfinite(array) for _, _, array in reduced.edges]
        self.num_columns = self.num_labels + sum(int(allowed.sum()) for allowed in pairs) + 1
        # Subtract the least cost of each variable and edge from the objective, so that it has the differences between choices.
        least = [float(domain.cost.min()) for domain in reduced.domains]
        least_edge = [
            float(array[allowed].min(initial=math.inf)) for (_, _, array), allowed in zip(reduced.edges, pairs)
        ]
        self.feasible = all(map(math.isfinite, least_edge))
        self.offset = sum(least) + sum(least_edge)
        self.cost = np.zeros(self.num_columns)
        self.peak = np.zeros(self.num_columns)
        for i, domain in enumerate(reduced.domains):
            self.cost[self.first[i] : self.first[i + 1]] = domain.cost - least[i]
            self.peak[self.first[i] : self.first[i + 1]] = domain.memory
        self.peak[-1] = 1.0
        entries = [self._choice_rows()]
        column = self.num_labels
        for (i, j, array), allowed, subtract in zip(reduced.edges, pairs, least_edge):
            size = int(allowed.sum())
            self.cost[column : column + size] = array[allowed] - subtract
            classes = np.nonzero(allowed)
            entries.extend(self._marginal_rows(v, side, column) for v, side in zip((i, j), classes))
            column += size
        equal_to_one = len(reduced.domains)
        self.rows = vstack(entries, format="csr")
        self.right = np.r_[np.ones(equal_to_one), np.zeros(self.rows.shape[0] - equal_to_one)]

    def _matrix(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, num_rows: int) -> csr_array:
        return coo_array((values, (rows, columns)), shape=(num_rows, self.num_columns)).tocsr()

    def _owner(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def _choice_rows(self) -> csr_array:
        columns = np.arange(self.num_labels)
        return self._matrix(self._owner(), columns, np.ones(self.num_labels), len(self.reduced.domains))

    def _marginal_rows(self, variable: int, classes: np.ndarray, column: int) -> csr_array:
        """sum of y over the other side - sum of x of the class = 0, for each class of a variable."""
        domain = self.reduced.domains[variable]
        label_class = np.repeat(np.arange(domain.num_classes), np.diff(domain.first))
        rows = np.r_[classes, label_class]
        columns = np.r_[column + np.arange(len(classes)), self.first[variable] + np.arange(len(label_class))]
        values = np.r_[np.ones(len(classes)), -np.ones(len(label_class))]
        return self._matrix(rows, columns, values, domain.num_classes)

    def _buffer_rows(self, unit: float) -> csr_array:
        """buffer_i . x_i - b <= 0, in units of memory."""
        owner = self._owner()
        buffers = np.concatenate([domain.buffer for domain in self.reduced.domains]) / unit
        num = len(self.reduced.domains)
        rows, columns = (
            np.r_[owner, np.arange(num)],
            np.r_[np.arange(self.num_labels), np.full(num, self.num_columns - 1)],
        )
        return self._matrix(rows, columns, np.r_[buffers, -np.ones(num)], num)

    def minimise(
        self,
        table: CostTable,
        objective: np.ndarray,
        offset: float,
        memory_limit: float | None,
        deadline: Deadline,
    ) -> MilpOutcome:
        """Minimise an objective, whose coefficients of x and y are in its own unit, and that of b per byte."""
        if not self.feasible:
            return MilpOutcome(math.inf, None, True, 0)
        most = float(self.peak[: self.num_labels].max(initial=1.0))
        unit = (memory_limit if memory_limit is not None else max(most, 1.0)) / _SCALE
        constraints = [LinearConstraint(self.rows, self.right, self.right)]
        constraints.append(LinearConstraint(self._buffer_rows(unit), -np.inf, 0.0))
        if memory_limit is not None:
            in_units = np.r_[self.peak[:-1] / unit, 1.0]
            constraints.append(LinearConstraint(csr_array(in_units[None, :]), -np.inf, memory_limit / unit))
        scaled = objective.copy()
        scaled[-1] *= unit
        scale = _SCALE / max(float(np.abs(scaled).max()), abs(offset), 1e-300)
        integrality = np.r_[np.ones(self.num_labels), np.zeros(self.num_columns - self.num_labels)]
        upper = np.r_[np.ones(self.num_columns - 1), np.inf]
        bound, nodes = -math.inf, 0
        for _ in range(_MAX_CUTS):
            try:
                answer = _solved(
                    deadline,
                    c=scaled * scale,
                    integrality=integrality,
                    bounds=Bounds(0.0, upper),
                    constraints=constraints,
                )
            except StopRequestedError:
                return MilpOutcome(bound, None, False, nodes)
            nodes += int(answer.mip_node_count or 0) if answer.get("mip_node_count") is not None else 0
            if answer.status == 2:
                return MilpOutcome(math.inf, None, True, nodes)
            dual = answer.get("mip_dual_bound")
            if dual is not None and math.isfinite(dual):
                bound = max(bound, dual / scale + offset)
            if answer.x is None:
                return MilpOutcome(bound, None, False, nodes)
            labels = self._labels(answer.x)
            choice = tuple(int(domain.option[label]) for domain, label in zip(self.reduced.domains, labels))
            fits = memory_limit is None or table.peak_memory(choice) <= memory_limit
            if fits and math.isfinite(table.evaluate(choice)):
                return MilpOutcome(bound, choice, answer.status == 0, nodes)
            if answer.status != 0:
                return MilpOutcome(bound, None, False, nodes)
            constraints.append(self._not_again(labels))
        return MilpOutcome(bound, None, False, nodes)

    def _labels(self, x: np.ndarray) -> list[int]:
        return [int(x[a:b].argmax()) for a, b in zip(self.first[:-1], self.first[1:])]

    def _not_again(self, labels: list[int]) -> LinearConstraint:
        row = np.zeros(self.num_columns)
        row[self.first[:-1] + labels] = 1.0
        return LinearConstraint(csr_array(row[None, :]), -np.inf, len(labels) - 1.0)


def _solved(deadline: Deadline, **program: Any) -> Any:
    """Run `scipy.optimize.milp` until it finishes, or until the deadline.

    HiGHS cannot be interrupted, and Python handles signals only in the main thread, between two instructions.  So HiGHS runs in a
    thread of its own.  When a stop is requested the thread is abandoned; it ends at its time limit, or with the process.

    Raises:
        StopRequestedError: the stop was requested.
    """
    options = {"mip_rel_gap": 0.0}
    if math.isfinite(deadline.limit_s):
        options["time_limit"] = max(1e-3, deadline.left_s)
    answers: list[Any] = []
    faults: list[Exception] = []

    def solve() -> None:
        try:
            answers.append(milp(**program, options=options))
        except Exception as fault:
            faults.append(fault)

    thread = threading.Thread(target=solve, name="HiGHS", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        if thread.is_alive():
            deadline.stop.check()
    if faults:
        raise faults[0]
    return answers[0]
