"""The numbers K of recomputed blocks with which a stage may have rows (``blocks:K``).

At any strategies the times of a stage are at least those of the smallest K of several ones, and its memory is at least that of the
greatest.  So a table with these times and this memory bounds all of them: if the least of a filter's weighted sum over the table is
above the filter's threshold, none of the numbers has a row that passes it.  Otherwise the numbers are divided in two halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autoddl.costmodel.recomputation import first_blocks
from autoddl.search.fronts import VectorTable, least

from .stage_cost import COMPONENTS, MEMORY

if TYPE_CHECKING:
    from .stage_search import Passes, RowFilter, StageDemand, StageSearch

__all__ = ["numbers_of_blocks"]

#: Position of the bytes that one micro-batch keeps, the only memory that depends on K.
_KEPT = COMPONENTS.index("kept")
#: Factor by which rounding may raise a least sum above its threshold.
_ROUNDING = 1 + 1e-9


def numbers_of_blocks(
    search: StageSearch,
    first: int,
    stop: int,
    passes: Passes,
    demand: StageDemand,
    filters: Sequence[RowFilter],
    limit: float,
) -> list[str]:
    """Return the ways ``blocks:K`` with which a stage may have rows that pass all filters; arguments as :meth:`StageSearch.rows`.

    K is at least 1 and less than the number of the stage's blocks.

    Raises:
        StopRequestedError: the stop of the search was requested.
    """
    counts, constant = search.memory_of(first, stop, "blocks", passes, demand)
    # Weights of the components of a stage's table, and thresholds: those of the filters, and the memory limit.
    rows, thresholds = [[0.0, 0.0, 0.0, *counts]], [limit - constant]
    for row_filter in filters:
        forward, backward, _, gradient, memory = row_filter.weights
        rows.append([forward, backward, gradient, *(memory * counts)])
        thresholds.append(row_filter.threshold - memory * constant)
    weights = np.array(rows)

    def may_have_rows(numbers: range) -> bool:
        search.stop.check()
        table = _bounding_table(search, first, stop, passes, numbers)
        if table is None:
            return False
        others = np.zeros((len(weights), table.num_components - MEMORY.stop))  # of shared weights
        values = least(table, np.hstack([weights, others]))
        slack = np.abs(thresholds) * (_ROUNDING - 1)
        return bool((values <= np.array(thresholds) + slack).all())

    found = []
    ranges = list(search.tables.graph(first, stop).graph.partial_block_counts)[::-1]
    while ranges:
        numbers = ranges.pop()
        if may_have_rows(numbers):
            half = len(numbers) // 2
            if half:
                ranges += [numbers[half:], numbers[:half]]
            else:
                found.append(first_blocks(numbers[0]))
    return found


def _bounding_table(search: StageSearch, first: int, stop: int, passes: Passes, numbers: range) -> VectorTable | None:
    """The table of a stage with the times of the smallest number and the memory of the greatest; None if it has no strategies."""
    low = search.table(first, stop, first_blocks(numbers[0]), passes)
    high = search.table(first, stop, first_blocks(numbers[-1]), passes)
    if low is None or high is None:
        return None
    return search.derived(("bounding", id(low), id(high)), lambda: _with_memory_of(low.table, high.table))


def _with_memory_of(low: VectorTable, high: VectorTable) -> VectorTable:
    """A table with the times of the first one and the memory of the second one, without sides."""
    sums = []
    for times, memory in zip(low.sums, high.sums):
        both = times.copy()
        both[:, _KEPT] = memory[:, _KEPT]
        sums.append(both)
    return replace(low, sums=tuple(sums), keys=())
