"""The separable bound: a fast lower bound that treats all variables independently.

If every edge e costs at least m_e, the optimum of a table under a memory limit is at least the optimum without edges plus the sum
of all m_e.  Without edges the problem is a multiple-choice knapsack: choose one option of every variable, of least total cost,
with a total of at most

    room = limit - max_i min buffer_i

bytes (the largest buffer of a choice is at least that maximum).  Its linear relaxation, in which a variable may mix two options,
needs no solver (Sinha and Zoltners 1979).  Only options on the lower convex hull of (memory, cost) matter.  Each variable starts at
its least memory; then the segments of all hulls are taken in order of seconds saved per byte, largest first, until the room is
used up.  The result equals the maximum of the Lagrangian dual (`lagrangian`) of the table without edges.

Equal variables have equal hulls.  So the bound is the same whether they are tied to one choice (one hull, k times as large) or not
(k hulls), up to the rounding of bytes.  It takes a thousandth of the time of a search, and is nearly as sharp if layers cost more
than redistributions.  The planner computes it for all settings first.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.table import ClassCosts, CostTable

__all__ = ["separable_bound", "separable_memory"]


def separable_bound(table: CostTable, memory_limit: float | None = None) -> float:
    """A lower bound [s] on the cost of every choice within the limit on peak memory [bytes]; ``inf`` if nothing fits.

    It is the optimum of the linear relaxation without edges, plus the least cost of each edge.

    >>> column = np.array([1.0, 4.0]), np.array([30.0, 0.0]), np.array([0.0, 0.0])
    >>> table = CostTable(("a",), *((values,) for values in column), ())
    >>> separable_bound(table), separable_bound(table, memory_limit=20.0)
    (1.0, 2.0)
    """
    columns = _distinct(table)
    if any(not len(column.cost) for column in columns):
        return math.inf
    least = {key: _least(costs) for key, costs in {id(edge.costs): edge.costs for edge in table.edges}.items()}
    cost = math.fsum(least[id(edge.costs)] for edge in table.edges)
    if memory_limit is None:
        return cost + sum(column.count * float(column.cost.min()) for column in columns)
    room = memory_limit - separable_memory(table)
    if room < 0:
        return math.inf
    parts = []
    for column in columns:
        memory, seconds = _hull(column.memory, column.cost)
        cost += column.count * float(seconds[0])
        parts.append(column.count * np.stack((np.diff(memory), np.diff(seconds))))
    steps = np.concatenate(parts, axis=1) if parts else np.zeros((2, 0))
    nbytes, seconds = steps[:, np.argsort(steps[1] / steps[0], kind="stable")]
    walked = np.minimum(np.cumsum(nbytes), room) - np.minimum(np.cumsum(nbytes) - nbytes, room)
    return cost + float((seconds * (walked / nbytes)).sum())


def separable_memory(table: CostTable) -> float:
    """A lower bound [bytes] on the peak memory of every choice of finite cost; ``inf`` if there is none."""
    columns = _distinct(table)
    if any(not len(column.cost) for column in columns):
        return math.inf
    resident = sum(column.count * float(column.memory.min()) for column in columns)
    return resident + max((float(column.buffer.min()) for column in columns), default=0.0)


@dataclass(frozen=True, eq=False)
class _Column:
    """The options of finite cost of some equal variables.

    Attributes:
        cost: seconds, shape (options,).
        memory, buffer: resident and transient bytes, shape (options,).
        count: number of these variables.
    """

    cost: np.ndarray
    memory: np.ndarray
    buffer: np.ndarray
    count: int


def _distinct(table: CostTable) -> list[_Column]:
    """The distinct variables; equal ones share their arrays."""
    of_variable = list(zip(table.cost, table.memory, table.buffer))
    number = Counter(tuple(map(id, column)) for column in of_variable)
    columns = []
    for key, (cost, memory, buffer) in {tuple(map(id, column)): column for column in of_variable}.items():
        finite = np.isfinite(cost)
        columns.append(_Column(cost[finite], memory[finite], buffer[finite], number[key]))
    return columns


def _least(costs: ClassCosts | np.ndarray) -> float:
    return float((costs.class_costs if isinstance(costs, ClassCosts) else costs).min())


def _hull(memory: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Memory (ascending) and cost (descending) at the corners of the lower left convex hull, by Andrew's monotone chain."""
    corners: list[tuple[float, float]] = []
    order = np.lexsort((cost, memory))
    for m, c in zip(memory[order].tolist(), cost[order].tolist()):
        if corners and c >= corners[-1][1]:
            continue
        while len(corners) > 1 and not _turns_left(corners[-2], corners[-1], (m, c)):
            corners.pop()
        corners.append((m, c))
    m, c = zip(*corners)
    return np.array(m), np.array(c)


def _turns_left(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) < (c[1] - a[1]) * (b[0] - a[0])
