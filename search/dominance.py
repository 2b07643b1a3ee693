"""Which rows of a table no other row dominates.

Row a *dominates* row b of the same group if it is no more in any column.  In the order of their sums, no row is dominated by a
later one.  So a row remains if no row that remains before it dominates it (Kung, Luccio and Preparata, "On finding the maxima of a
set of vectors", 1975, who also give better orders of growth for few columns).

Small groups are filtered together: in each round the first rows of all groups remain, and what they dominate is dropped.  A large
group is filtered alone, by a block of rows at a time, because a round of numpy calls for each row would take longer than their
arithmetic.
"""

from __future__ import annotations

import math

import numpy as np

from autoddl.costmodel.stopping import Stop

__all__ = ["TOLERANCE", "TooManyError", "undominated"]

#: Relative difference of numbers that counts as equal.
TOLERANCE = 1e-12
#: Mean number of rows of a group from which on groups are filtered one by one.
_LARGE_GROUP = 32
#: Rows of a block.
_BLOCK = 64


class TooManyError(Exception):
    """More entries or rows are needed than allowed."""


def undominated(
    group: np.ndarray, values: np.ndarray, stop: Stop | None = None, most_rows: float = math.inf
) -> np.ndarray:
    """Ascending indices of the rows that no other row of their group dominates; of equal rows one remains.

    Args:
        group: non-negative integers, shape (rows,).
        values: non-negative numbers, shape (rows, columns); row a dominates row b if it is no more in every column.
        stop: ends the computation early: it compares each remaining row with many rows.
        most_rows: largest number of rows of the result.

    Raises:
        TooManyError: more than ``most_rows`` rows remain.
        StopRequestedError: the stop was requested.

    >>> undominated(np.array([0, 0, 0, 1]), np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [5.0, 5.0]])).tolist()
    [0, 1, 3]
    """
    if len(group) < 2:
        return np.arange(len(group))
    scale = values.max(axis=0)
    values = values[:, scale > 0]
    if not values.shape[1]:
        return np.sort(np.unique(group, return_index=True)[1])
    unit = values / scale[scale > 0]
    rows = np.lexsort((unit.sum(axis=1), group))
    group, unit = group[rows], np.ascontiguousarray(unit[rows].T)
    kept, num_kept = list[np.ndarray](), 0
    while len(rows):
        if stop is not None:
            stop.check()
        # Nothing dominates the first remaining row of each group.
        is_first = np.ones(len(rows), dtype=bool)
        np.not_equal(group[1:], group[:-1], out=is_first[1:])
        first = np.flatnonzero(is_first)
        if len(rows) >= _LARGE_GROUP * len(first):
            for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(rows)]):
                kept.append(rows[begin:end][_of_one_group(unit[:, begin:end], stop, most_rows - num_kept)])
                num_kept += len(kept[-1])
            break
        kept.append(rows[first])
        num_kept += len(first)
        if num_kept > most_rows:
            raise TooManyError
        first_of = first[np.cumsum(is_first) - 1]
        left = (unit[:, first_of] > unit + TOLERANCE).any(axis=0)
        rows, group, unit = rows[left], group[left], unit[:, left]
    return np.sort(np.concatenate(kept))


def _of_one_group(unit: np.ndarray, stop: Stop | None, most_rows: float) -> np.ndarray:
    """The positions of the rows of one group that no other one dominates.

    Args:
        unit: the rows in the order of their sums, divided by the largest number of each column; shape (columns, rows).
        stop, most_rows: as of :func:`undominated`.

    Raises:
        TooManyError, StopRequestedError: as :func:`undominated`.
    """
    rows, kept, num_kept = np.arange(unit.shape[1]), list[np.ndarray](), 0
    while len(rows):
        if stop is not None:
            stop.check()
        block, rest = unit[:, :_BLOCK], unit[:, _BLOCK:]
        dominates = np.triu(_dominates(block, block), 1)
        remains = np.ones(block.shape[1], dtype=bool)
        for row in np.flatnonzero(dominates.any(axis=1)).tolist():
            if remains[row]:
                remains &= ~dominates[row]
        kept.append(rows[:_BLOCK][remains])
        num_kept += len(kept[-1])
        if num_kept > most_rows:
            raise TooManyError
        left = ~_dominates(block[:, remains], rest).any(axis=0)
        rows, unit = rows[_BLOCK:][left], rest[:, left]
    return np.concatenate(kept)


def _dominates(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether each of some rows dominates each of others; shapes (columns, some), (columns, others) -> (some, others)."""
    limits = others + TOLERANCE
    found = some[0][:, None] <= limits[0]
    for column, limit in zip(some[1:], limits[1:]):
        found &= column[:, None] <= limit
    return np.asarray(found)
