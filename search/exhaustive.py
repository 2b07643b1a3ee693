"""Exhaustive search: the cost of every assignment is computed.

The variables are divided into an *outer* part, which is enumerated, and an *inner* part of at most a few thousand joint options.
The scores of all inner joint options form a vector V of their own costs and the edges between them, computed once.  Fixing an
outer variable adds to V a row, the edges between it and the inner part, and a number, its own cost and its edges to other outer
variables.  The scores of the last outer variable form a matrix with one row for each of its options,

    score[x, y] = s[x] + V[y] + T[x, y]          (T only if the last outer variable has edges into the inner part)

which is computed in place, in blocks that stay in the cache, and reduced to its minimum.  No assignment is skipped or inferred
from another: ``evaluations`` counts scores that were computed and compared.  Under a memory limit, resident memory and largest
buffer are computed in the same way, and scores over the limit become infinite.  The search holds one row of T for each option of
each outer variable with edges into the inner part, and one block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.stopping import Deadline, Stop
from autoddl.costmodel.table import CostTable

from .branching import lower_bound
from .exact import smallest_memory
from .outcomes import check_limits, infeasible, unless_stopped, unproven
from .progress import Progress, silent
from .result import Result, Status

__all__ = ["exhaustive"]

#: Largest number of joint options of the inner part.
_MAX_INNER = 2**13
#: Number of scores of a block (8 bytes each); a block and its vector fit into the second-level cache.
_BLOCK = 2**15


def exhaustive(
    table: CostTable,
    *,
    memory_limit: float | None = None,
    evaluations: int | None = None,
    time_limit: float | None = None,
    progress: Progress = silent,
    stop: Stop | None = None,
) -> Result:
    """Compute the cost of every assignment.

    A limit on ``evaluations`` or on time [s] ends the search with a gap (LIMIT_REACHED), and so does a requested ``stop``
    (INTERRUPTED).

    Raises:
        SearchError: a limit is not positive.
    """
    start = time.perf_counter()
    check_limits(memory_limit=memory_limit, time_limit=time_limit, evaluations=evaluations)
    deadline = Deadline(time_limit, stop)
    budget = math.inf if evaluations is None else evaluations
    scan = _Scan(table, memory_limit)
    next_report, finished = start + 0.2, True
    for done in scan.blocks(budget):
        now = time.perf_counter()
        if now >= next_report:
            progress(scan.best, -math.inf, done)
            next_report = now + 0.2
        if done < table.space_size and deadline.is_over:
            finished = False
            break
    finished = finished and scan.evaluations == table.space_size
    if finished and scan.choice is None:
        least = unless_stopped(lambda stop: smallest_memory(table, stop)[0], deadline.stop)
        return infeasible(table, "exhaustive", start, memory_limit, least, evaluations=scan.evaluations)
    bound = scan.best if finished else min(lower_bound(table, memory_limit, deadline.stop), scan.best)
    cost = table.evaluate(scan.choice) if scan.choice else math.inf
    return Result(
        method="exhaustive",
        status=Status.OPTIMAL if finished else unproven(deadline),
        choice=scan.choice,
        cost=cost,
        lower_bound=min(bound, cost) if finished else bound,
        memory_bytes=table.peak_memory(scan.choice) if scan.choice else math.nan,
        space_size=table.space_size,
        evaluations=scan.evaluations,
        seconds=time.perf_counter() - start,
        memory_limit_bytes=memory_limit,
    )


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums of the inner joint options with some outer variables fixed; each array has one entry per joint option.

    Attributes:
        score: cost [s].
        memory, buffer: resident memory and largest buffer [bytes].
    """

    score: np.ndarray
    memory: np.ndarray
    buffer: np.ndarray


class _Scan:
    """The enumeration and its best assignment so far."""

    def __init__(self, table: CostTable, memory_limit: float | None):
        self.table, self.limit = table, memory_limit
        self.best, self.evaluations = math.inf, 0
        self.choice: tuple[int, ...] | None = None
        self.inner = self._inner_variables()
        outer = [v for v in range(len(table.names)) if v not in self.inner]
        self.sizes = [len(table.cost[v]) for v in self.inner]
        self.rows = {v: row for v in outer if (row := self._edges_to_inner(v)) is not None}
        # Variables with edges into the inner part come first, so that the vector changes rarely.
        self.outer = sorted(outer, key=lambda v: v not in self.rows)
        self.block = np.empty(_BLOCK)

    def _inner_variables(self) -> list[int]:
        inner: list[int] = []
        size = 1
        for v in reversed(range(len(self.table.names))):
            if size * len(self.table.cost[v]) > _MAX_INNER:
                break
            size *= len(self.table.cost[v])
            inner.insert(0, v)
        return inner

    def _spread(self, values: np.ndarray, *positions: int) -> np.ndarray:
        """A view of a vector or matrix over inner variables that broadcasts over all inner joint options."""
        shape = [1] * len(self.inner)
        for axis, position in enumerate(positions):
            shape[position] = values.shape[axis]
        return values.reshape(shape)

    def _inner_sums(self) -> _Sums:
        table, sums = self.table, _Sums(*(np.zeros(self.sizes) for _ in range(3)))
        for position, v in enumerate(self.inner):
            sums.score[...] += self._spread(table.cost[v], position)
            sums.memory[...] += self._spread(table.memory[v], position)
            np.maximum(sums.buffer, self._spread(table.buffer[v], position), out=sums.buffer)
        for edge in table.edges:
            if edge.source in self.inner and edge.target in self.inner:
                source, target = self.inner.index(edge.source), self.inner.index(edge.target)
                matrix = edge.cost if source < target else edge.cost.T
                sums.score[...] += self._spread(matrix, min(source, target), max(source, target))
        return _Sums(sums.score.ravel(), sums.memory.ravel(), sums.buffer.ravel())

    def _edges_to_inner(self, v: int) -> np.ndarray | None:
        """Costs of v's edges into the inner part, shape (options of v, inner joint options); None if there are none."""
        rows = None
        for edge in self.table.edges:
            for mine, other, matrix in ((edge.source, edge.target, edge.cost), (edge.target, edge.source, edge.cost.T)):
                if mine == v and other in self.inner:
                    if rows is None:
                        rows = np.zeros((len(self.table.cost[v]), *self.sizes))
                    shape = [matrix.shape[0], *([1] * len(self.inner))]
                    shape[1 + self.inner.index(other)] = matrix.shape[1]
                    rows += matrix.reshape(shape)
        return None if rows is None else rows.reshape(len(rows), -1)

    def _edges_to_fixed(self, v: int, fixed: dict[int, int]) -> np.ndarray:
        """v's own costs and those of its edges to fixed variables, shape (options of v,)."""
        costs = self.table.cost[v].astype(float)
        for edge in self.table.edges:
            if edge.source == v and edge.target in fixed:
                costs = costs + edge.cost[:, fixed[edge.target]]
            elif edge.target == v and edge.source in fixed:
                costs = costs + edge.cost[fixed[edge.source], :]
        return costs

    def blocks(self, budget: float) -> Iterator[int]:
        """Compute block after block; yields the number of evaluations so far."""
        sums = self._inner_sums()
        if not self.outer:
            self._score(sums, np.zeros(1), None, {}, None, budget)
            yield self.evaluations
            return
        yield from self._enumerate(0, sums, 0.0, {}, budget)

    def _enumerate(self, depth: int, sums: _Sums, score: float, fixed: dict[int, int], budget: float) -> Iterator[int]:
        v = self.outer[depth]
        scores = score + self._edges_to_fixed(v, fixed)
        if depth == len(self.outer) - 1:
            self._score(sums, scores, self.rows.get(v), fixed, v, budget)
            yield self.evaluations
            return
        for option, fixed_score in enumerate(scores):
            if self.evaluations >= budget:
                return
            row = self.rows.get(v)
            deeper = _Sums(
                sums.score if row is None else sums.score + row[option],
                sums.memory if self.limit is None else sums.memory + self.table.memory[v][option],
                sums.buffer if self.limit is None else np.maximum(sums.buffer, self.table.buffer[v][option]),
            )
            yield from self._enumerate(depth + 1, deeper, float(fixed_score), {**fixed, v: option}, budget)

    def _score(
        self,
        sums: _Sums,
        scores: np.ndarray,
        rows: np.ndarray | None,
        fixed: dict[int, int],
        last: int | None,
        budget: float,
    ) -> None:
        """Score all pairs of an option of the last outer variable and an inner joint option, in blocks of whole rows."""
        width = len(sums.score)
        height = max(1, _BLOCK // width)
        for first in range(0, len(scores), height):
            chosen = slice(first, first + height)
            count = len(scores[chosen])
            left = budget - self.evaluations
            if left < count * width:
                # The budget ends inside this block: score the whole rows that remain, or a part of one.
                count, width = (int(left // width), width) if left >= width else (1, int(left))
                if count * width == 0:
                    return
                chosen = slice(first, first + count)
            block = self.block[: count * width].reshape(count, width)
            np.add(scores[chosen, None], sums.score[None, :width], out=block)
            if rows is not None:
                block += rows[chosen, :width]
            if self.limit is not None:
                self._set_aside(block, sums, chosen, last)
            self.evaluations += block.size
            lowest = block.min()
            if lowest < self.best:
                row, column = divmod(int(block.argmin()), width)
                self.best = float(lowest)
                self.choice = self._assignment(fixed, last, first + row, column)
            if self.evaluations >= budget:
                return

    def _set_aside(self, block: np.ndarray, sums: _Sums, chosen: slice, last: int | None) -> None:
        """Set the scores of assignments over the memory limit to inf."""
        width = block.shape[1]
        memory, buffer = sums.memory[None, :width], sums.buffer[None, :width]
        if last is not None:
            memory = memory + self.table.memory[last][chosen, None]
            buffer = np.maximum(buffer, self.table.buffer[last][chosen, None])
        block[memory + buffer > self.limit] = math.inf

    def _assignment(self, fixed: dict[int, int], last: int | None, option: int, column: int) -> tuple[int, ...]:
        found = dict(fixed)
        if last is not None:
            found[last] = option
        found.update(zip(self.inner, (int(i) for i in np.unravel_index(column, self.sizes))))
        return tuple(found[v] for v in range(len(self.table.names)))
