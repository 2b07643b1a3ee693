"""A heuristic that selects a row for every stage of a cut, so that all workers fit the memory limit and the step is short.

1.  *Candidates.*  For each stage the rows of the least weighted sum of seconds and bytes, at several prices of a byte.
2.  *Fit.*  All stages begin with their fastest row.  While a worker does not fit, its stage that loses the fewest seconds per byte
    takes its next smaller row.  Then stages go back to faster rows where there is room, those that gain most first.
3.  *Exchange.*  The row of a single stage is exchanged as long as this shortens the step of the schedule.
4.  *Select.*  An integer program selects the rows of all stages at once (:mod:`.row_program`), if asked to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autoddl.costmodel.recomputation import first_blocks

from .cut_graph import CutGraph
from .cut_regions import Cut
from .row_program import Longest, select_rows
from .space import SOME_BLOCKS
from .stage_search import StageFront, concatenated_fronts

__all__ = ["fitting_rows"]

#: Factors of the weight of all-reduces, for further candidates.
_ALL_REDUCE_FACTORS = (0.1, 4.0, 16.0)
#: Prices of a byte for candidates, in steps per memory limit.
_PRICES = np.array([0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 1.0, 3.0, 30.0])
#: Numbers of recomputed blocks of a stage that are tried, as parts of all its blocks.
_PARTS_OF_BLOCKS = (0.25, 0.5, 0.75)
#: Largest number of exchanged rows.
_MAX_EXCHANGES = 30


def fitting_rows(
    cut_graph: CutGraph,
    cut: Cut,
    weights: np.ndarray,
    step_s: float,
    steps: Callable[[np.ndarray], np.ndarray] | None,
    together: tuple[Longest, Sequence[np.ndarray]] | None = None,
) -> tuple[list[StageFront], np.ndarray] | None:
    """Select a row for every stage of a cut, so that all workers fit the memory limit.

    Args:
        cut_graph: The cut graph of the setting.
        cut: The cut.
        weights: Weights of the seconds forward, backward, of recomputation and of all-reduce of each stage; shape (stages, 4).
        step_s: Seconds that a step takes, approximately; it scales the prices of memory.
        steps: Computes the steps for vectors of all terms, shape (terms, vectors) -> (vectors,).  None: rows are not exchanged.
        together: Computes the step and its longest path for one vector (:meth:`.StepGraph.step`), and paths that are likely to be
            long, to select the rows of all stages together.  None: no program is solved.

    Returns:
        Per stage a front of one row, and the seconds of every term; None if no selection was found that fits.
    """
    candidates = _candidates(cut_graph, cut, weights, step_s)
    if candidates is None:
        return None
    if cut_graph.has_one_stage_per_worker:
        # The worker has the whole memory for this stage, so its best row that fits is a candidate, too.
        for stage, (first, stop) in enumerate(cut):
            row = _cheapest_row(cut_graph, stage, first, stop, weights[stage].tolist())
            if row is None:
                return None
            candidates[stage] = concatenated_fronts([candidates[stage], row])
    selection = _RowSelection(cut_graph, cut, candidates, weights)
    if not selection.fit():
        return None
    times = selection.times()
    if steps is not None:
        selection.exchange(times, steps)
    if together is not None:
        selection.solve(*together)
        times = selection.times()
    return [rows.only(np.array([row])) for rows, row in zip(candidates, selection.rows)], times


def _cheapest_row(
    cut_graph: CutGraph, stage: int, first: int, stop: int, weights: Sequence[float]
) -> StageFront | None:
    """Return the row of the least weighted seconds within the memory limit; None if there is none."""
    best: tuple[float, StageFront] | None = None
    for recompute in _ways_of(cut_graph, stage, first, stop):
        most = math.inf if best is None else best[0]
        cheapest = cut_graph.stage_searches[stage].cheapest(
            first,
            stop,
            recompute,
            cut_graph.passes[stage],
            cut_graph.stage_demands[stage],
            weights,
            cut_graph.limit_bytes,
            most,
        )
        best = cheapest or best
    return None if best is None else best[1]


def _ways_of(cut_graph: CutGraph, stage: int, first: int, stop: int) -> list[str]:
    """Return the ways of recomputation of a stage that are tried: of the numbers of blocks a few."""
    ways = cut_graph.recomputations_of(stage)
    chosen = [way for way in ways if way != SOME_BLOCKS]
    if len(chosen) < len(ways):
        num_blocks = sum(cut_graph.stage_searches[stage].tables.graph(first, stop).graph.block_runs)
        counts = {round(part * num_blocks) for part in _PARTS_OF_BLOCKS}
        chosen += [first_blocks(count) for count in sorted(counts) if 0 < count < num_blocks]
    return chosen


def _candidates(cut_graph: CutGraph, cut: Cut, weights: np.ndarray, step_s: float) -> list[StageFront] | None:
    """Return, for each stage, the rows of the least weighted sum at several prices of a byte; None if a stage has none.

    All stages have the mean of all weights, so that stages of equal shape share a search.
    """
    mean = weights.mean(axis=0)
    prices = step_s / cut_graph.limit_bytes * _PRICES
    priced = np.vstack(
        [
            np.column_stack([np.tile(mean, (len(prices), 1)), prices]),
            *((*(mean * (1.0, 1.0, 1.0, factor)), prices[0]) for factor in _ALL_REDUCE_FACTORS),
        ]
    )
    candidates: list[StageFront] = []
    for stage, (first, stop) in enumerate(cut):
        search, passes, demand = (
            cut_graph.stage_searches[stage],
            cut_graph.passes[stage],
            cut_graph.stage_demands[stage],
        )
        cut_graph.explorer.stop.check()
        ways = _ways_of(cut_graph, stage, first, stop)
        byte_s = cut_graph.exchange[1]
        hulls = [search.hull(first, stop, recompute, passes, demand, priced, byte_s) for recompute in ways]
        parts = [rows for rows in hulls if rows is not None]
        if not parts:
            return None
        candidates.append(concatenated_fronts(parts))
    return candidates


class _RowSelection:
    """One row of each stage of a cut, and the steps of the heuristic that change them.

    Args:
        cut_graph: The cut graph of the setting.
        cut: The cut.
        candidates: Per stage the rows to select from.
        weights: Weights of the seconds of each stage, shape (stages, 4).
    """

    def __init__(self, cut_graph: CutGraph, cut: Cut, candidates: Sequence[StageFront], weights: np.ndarray):
        self.cut_graph, self.cut, self.limit_bytes, self.candidates = cut_graph, cut, cut_graph.limit_bytes, candidates
        self.sides = [cut_graph.side_layouts(rows) for rows in candidates]
        self.stages_of_worker = [[stage for _, stage in held] for held in cut_graph.demand.homes]
        self.workers_of_stage: list[list[int]] = [[] for _ in candidates]
        for worker, held in enumerate(self.stages_of_worker):
            for stage in held:
                self.workers_of_stage[stage].append(worker)
        #: Per stage the seconds in which its rows exchange the gradients of weights that the first and the last stage share, by
        #: their own bytes; the exchange takes both stages as long as the one of them with more bytes.
        self.exchange_s = [np.zeros(len(rows)) for rows in candidates]
        latency_s, byte_s = cut_graph.exchange
        for stage in (0, len(candidates) - 1) if byte_s else ():
            self.exchange_s[stage] = latency_s + byte_s * candidates[stage].shared.sum(axis=1)
        self.costs = [
            rows.times @ own + own[3] * exchange for rows, own, exchange in zip(candidates, weights, self.exchange_s)
        ]
        #: Per stage the undominated rows, and the index of the current one among them.
        self.ladders = [self._ladder(rows, cost) for rows, cost in zip(candidates, self.costs)]
        self.rungs = [0] * len(candidates)
        #: Per stage the selected row; empty before :meth:`fit`.
        self.rows: list[int] = []

    @staticmethod
    def _ladder(rows: StageFront, cost: np.ndarray) -> list[int]:
        """Return the rows from the fastest to the smallest, each slower and smaller than the one before."""
        ladder: list[int] = []
        nbytes = rows.memory + rows.buffer
        for row in np.lexsort((nbytes, cost)).tolist():
            if not ladder or nbytes[row] < nbytes[ladder[-1]]:
                ladder.append(row)
        return ladder

    def fit(self) -> bool:
        """Select rows so that all workers fit the memory limit; return whether this is possible."""
        for worker, held in enumerate(self.stages_of_worker):
            while self._free_bytes(worker) < 0:
                reducible = [stage for stage in held if self.rungs[stage] + 1 < len(self.ladders[stage])]
                if not reducible:
                    return False
                self.rungs[min(reducible, key=self._loss)] += 1
        # Room that is left over is used for faster rows.
        for stage in sorted(range(len(self.candidates)), key=self._gain):
            while self.rungs[stage]:
                self.rungs[stage] -= 1
                if any(self._free_bytes(worker) < 0 for worker in self.workers_of_stage[stage]):
                    self.rungs[stage] += 1
                    break
        self.rows = [ladder[rung] for ladder, rung in zip(self.ladders, self.rungs)]
        return True

    def times(self) -> np.ndarray:
        """Return the seconds of every term at the selected rows."""
        times = np.zeros(self.cut_graph.terms.count)
        for stage, row in enumerate(self.rows):
            self._set_times(times, stage, row)
        return times

    def _set_times(self, times: np.ndarray, stage: int, row: int) -> None:
        """Set the times of a stage's terms to those of a row, with the transfers at both sides."""
        terms, last = self.cut_graph.terms, len(self.candidates) - 1
        for part, value in zip(terms.of_stages, self.candidates[stage].times[row]):
            times[part.start + stage] = value
        if stage in (0, last):
            ends = {0: self.rows[0], last: self.rows[last], stage: row}
            exchange = max(self.exchange_s[end][number] for end, number in ends.items())
            for end, number in ends.items():
                times[terms.all_reduce.start + end] = self.candidates[end].times[number, 3] + exchange
        crossings = []
        if stage:
            crossings.append((stage - 1, self.sides[stage - 1][1][self.rows[stage - 1]], self.sides[stage][0][row]))
        if stage < len(self.candidates) - 1:
            crossings.append((stage, self.sides[stage][1][row], self.sides[stage + 1][0][self.rows[stage + 1]]))
        for boundary, source, target in crossings:
            forward, backward = self.cut_graph.crossing(boundary, self.cut[boundary][1], int(source), int(target))
            times[terms.transfer_forward.start + boundary] = forward
            times[terms.transfer_backward.start + boundary] = backward

    def exchange(self, times: np.ndarray, steps: Callable[[np.ndarray], np.ndarray]) -> None:
        """Exchange the row of one stage at a time, as long as the step gets shorter.

        Args:
            times: Seconds of every term; updated.
            steps: As in :func:`fitting_rows`.
        """
        best_s = float(steps(times[:, None])[0])
        for _ in range(_MAX_EXCHANGES):
            self.cut_graph.explorer.stop.check()
            exchanges = [
                (stage, row)
                for stage, rows in enumerate(self.candidates)
                for row in range(len(rows))
                if row != self.rows[stage] and self._fits(stage, row)
            ]
            if not exchanges:
                return
            changed = np.repeat(times[:, None], len(exchanges), axis=1)
            for column, (stage, row) in enumerate(exchanges):
                self._set_times(changed[:, column], stage, row)
            changed_s = steps(changed)
            least = int(changed_s.argmin())
            if changed_s[least] >= best_s * (1 - 1e-9):
                return
            stage, row = exchanges[least]
            best_s, self.rows[stage] = float(changed_s[least]), row
            times[:] = changed[:, least]

    def solve(self, longest: Longest, known_paths: Sequence[np.ndarray]) -> None:
        """Select the rows of all stages by an integer program."""

        def times_of(rows: Sequence[int]) -> np.ndarray:
            self.cut_graph.explorer.stop.check()
            self.rows = list(rows)
            return self.times()

        figures = [
            (rows.times, rows.memory, rows.buffer, exchange) for rows, exchange in zip(self.candidates, self.exchange_s)
        ]
        parts = self.cut_graph.terms.of_stages
        self.rows = select_rows(
            figures, self.stages_of_worker, self.limit_bytes, self.rows, times_of, longest, parts, known_paths
        )

    def _fits(self, stage: int, row: int) -> bool:
        """Return whether the workers of a stage fit the memory limit with another row of the stage."""
        for worker in self.workers_of_stage[stage]:
            own = [(self.candidates[s], row if s == stage else self.rows[s]) for s in self.stages_of_worker[worker]]
            if self._free_bytes_with(own) < 0:
                return False
        return True

    def _free_bytes(self, worker: int) -> float:
        """Return the bytes of a worker's devices that its stages leave free; negative if they do not fit."""
        stages = self.stages_of_worker[worker]
        return self._free_bytes_with([(self.candidates[s], self.ladders[s][self.rungs[s]]) for s in stages])

    def _free_bytes_with(self, selected: Sequence[tuple[StageFront, int]]) -> float:
        memory = sum(float(rows.memory[row]) for rows, row in selected)
        return self.limit_bytes - memory - max(float(rows.buffer[row]) for rows, row in selected)

    def _loss(self, stage: int) -> float:
        """Return the seconds that a stage loses for each byte that its next smaller row saves."""
        current, smaller = self.ladders[stage][self.rungs[stage]], self.ladders[stage][self.rungs[stage] + 1]
        seconds = float(self.costs[stage][smaller] - self.costs[stage][current])
        return seconds / max(
            float(self.candidates[stage].memory[current] - self.candidates[stage].memory[smaller]), 1.0
        )

    def _gain(self, stage: int) -> float:
        """Return the seconds that a stage's next faster row adds: a negative number; 0 if its row is the fastest."""
        if not self.rungs[stage]:
            return 0.0
        current, faster = self.ladders[stage][self.rungs[stage]], self.ladders[stage][self.rungs[stage] - 1]
        return float(self.costs[stage][faster] - self.costs[stage][current])
