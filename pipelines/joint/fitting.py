"""Rows for the stages of a given cut, so that all fit their workers: good ones, quickly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .cut_graph import CutGraph
from .cut_regions import Cut
from .stage_search import StageFront, joined

__all__ = ["fitting_rows"]

#: By how much more, or less, all-reduces count in some of these rows.
_ALL_REDUCES = (0.1, 4.0, 16.0)
#: Rows that are exchanged for a shorter step.
_MAX_EXCHANGES = 30

#: Prices of a byte at which rows of stages that share workers are tried, in steps per limit.
_PRICES = np.array([0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 1.0, 3.0, 30.0])


def fitting_rows(
    cut_graph: CutGraph, cut: Cut, weights: np.ndarray, step_s: float, steps: Callable[[np.ndarray], np.ndarray] | None
) -> tuple[list[StageFront], np.ndarray] | None:
    """A row for every stage of a cut, so that all fit their workers, and what every term takes then; None where none was found.

    Args:
        weights: of seconds forward, backward, recompute and all-reduce of every stage; shape (stages, 4).
        step_s: about what a step takes.
        steps: what steps take where terms take so long, shape (terms, many) -> (many,); rows are then exchanged, one at a time,
            as long as that makes the step shorter.
    """
    hulls = _hulls(cut_graph, cut, weights, step_s)
    if hulls is None:
        return None
    if cut_graph.is_alone:
        for stage, (first, stop) in enumerate(cut):
            row = _alone(cut_graph, stage, first, stop, weights[stage].tolist())
            if row is None:
                return None
            hulls[stage] = joined([hulls[stage], row])
    choice = _Choice(cut_graph, cut, hulls, weights)
    if not choice.fit():
        return None
    times = choice.times()
    if steps is not None:
        choice.exchange(times, steps)
    return [rows.only(np.array([row])) for rows, row in zip(hulls, choice.rows)], times


def _alone(cut_graph: CutGraph, stage: int, first: int, stop: int, weights: Sequence[float]) -> StageFront | None:
    """The row of the least weighted seconds that fits the worker of a stage that has it for itself."""
    best: tuple[float, StageFront] | None = None
    for way in cut_graph.ways:
        most = math.inf if best is None else best[0]
        found = cut_graph.stages[stage].cheapest(
            first, stop, way, cut_graph.passes[stage], cut_graph.need[stage], weights, cut_graph.limit, most
        )
        best = found or best
    return None if best is None else best[1]


def _hulls(cut_graph: CutGraph, cut: Cut, weights: np.ndarray, step_s: float) -> list[StageFront] | None:
    """Of every stage the rows that are the cheapest at some price of a byte.

    All stages are weighed alike: those of one shape have the same rows, then, which are worked out once.
    """
    alike = weights.mean(axis=0)
    prices = step_s / cut_graph.limit * _PRICES
    wanted = np.vstack(
        [
            np.column_stack([np.tile(alike, (len(prices), 1)), prices]),
            *((*(alike * (1.0, 1.0, 1.0, more)), prices[0]) for more in _ALL_REDUCES),
        ]
    )
    hulls: list[StageFront] = []
    for stage, (first, stop) in enumerate(cut):
        passes, need = cut_graph.passes[stage], cut_graph.need[stage]
        of_ways = [cut_graph.stages[stage].hull(first, stop, way, passes, need, wanted) for way in cut_graph.ways]
        parts = [rows for rows in of_ways if rows is not None]
        if not parts:
            return None
        hulls.append(joined(parts))
    return hulls


class _Choice:
    """A row of each of several stages: all begin with their fastest one.

    On workers whose stages do not fit those give way that lose the fewest seconds by a byte; what room is then left is taken back
    by those that gain most.
    """

    def __init__(self, cut_graph: CutGraph, cut: Cut, hulls: Sequence[StageFront], weights: np.ndarray):
        self.cut_graph, self.cut, self.limit, self.hulls = cut_graph, cut, cut_graph.limit, hulls
        self.sides = [cut_graph.sides(rows) for rows in hulls]
        self.homes = [[stage for _, stage in held] for held in cut_graph.demand.homes]
        self.holders: list[list[int]] = [[] for _ in hulls]
        for worker, held in enumerate(self.homes):
            for stage in held:
                self.holders[stage].append(worker)
        self.costs = [rows.times @ own for rows, own in zip(hulls, weights)]
        self.lines = [self._line(rows, cost) for rows, cost in zip(hulls, self.costs)]
        self.at = [0] * len(hulls)
        self.rows: list[int] = []

    @staticmethod
    def _line(rows: StageFront, cost: np.ndarray) -> list[int]:
        """From the fastest row to the smallest, each smaller than the one before."""
        line: list[int] = []
        nbytes = rows.memory + rows.buffer
        for row in np.lexsort((nbytes, cost)).tolist():
            if not line or nbytes[row] < nbytes[line[-1]]:
                line.append(row)
        return line

    def fit(self) -> bool:
        """Choose rows; whether all workers' stages fit."""
        for worker, held in enumerate(self.homes):
            while self._room(worker) < 0:
                left = [stage for stage in held if self.at[stage] + 1 < len(self.lines[stage])]
                if not left:
                    return False
                self.at[min(left, key=self._loss)] += 1
        for stage in sorted(range(len(self.hulls)), key=self._gain):
            while self.at[stage]:
                self.at[stage] -= 1
                if any(self._room(worker) < 0 for worker in self.holders[stage]):
                    self.at[stage] += 1
                    break
        self.rows = [line[place] for line, place in zip(self.lines, self.at)]
        return True

    def times(self) -> np.ndarray:
        """What every term takes."""
        times = np.zeros(self.cut_graph.terms.count)
        for stage, row in enumerate(self.rows):
            self._put(times, stage, row)
        return times

    def _put(self, times: np.ndarray, stage: int, row: int) -> None:
        """What a stage takes at a row, with what crosses at both sides."""
        terms = self.cut_graph.terms
        for part, value in zip(terms.of_stages, self.hulls[stage].times[row]):
            times[part.start + stage] = value
        ends = []
        if stage:
            ends.append((stage - 1, self.sides[stage - 1][1][self.rows[stage - 1]], self.sides[stage][0][row]))
        if stage < len(self.hulls) - 1:
            ends.append((stage, self.sides[stage][1][row], self.sides[stage + 1][0][self.rows[stage + 1]]))
        for boundary, source, target in ends:
            forward, backward = self.cut_graph.crossing(boundary, self.cut[boundary][1], int(source), int(target))
            times[terms.transfer_forward.start + boundary] = forward
            times[terms.transfer_backward.start + boundary] = backward

    def exchange(self, times: np.ndarray, steps: Callable[[np.ndarray], np.ndarray]) -> None:
        """Take another row for one stage, as long as the step gets shorter; ``times`` are then what terms take."""
        best_s = float(steps(times[:, None])[0])
        for _ in range(_MAX_EXCHANGES):
            others = [
                (stage, row)
                for stage, rows in enumerate(self.hulls)
                for row in range(len(rows))
                if row != self.rows[stage] and self._fits(stage, row)
            ]
            if not others:
                return
            changed = np.repeat(times[:, None], len(others), axis=1)
            for place, (stage, row) in enumerate(others):
                self._put(changed[:, place], stage, row)
            found = steps(changed)
            least = int(found.argmin())
            if found[least] >= best_s * (1 - 1e-9):
                return
            stage, row = others[least]
            best_s, self.rows[stage] = float(found[least]), row
            times[:] = changed[:, least]

    def _fits(self, stage: int, row: int) -> bool:
        """Whether a stage's workers have the room for another row of it."""
        for worker in self.holders[stage]:
            own = [(self.hulls[s], row if s == stage else self.rows[s]) for s in self.homes[worker]]
            if self._left(own) < 0:
                return False
        return True

    def _room(self, worker: int) -> float:
        """Bytes that are left on a worker."""
        return self._left([(self.hulls[stage], self.lines[stage][self.at[stage]]) for stage in self.homes[worker]])

    def _left(self, own: Sequence[tuple[StageFront, int]]) -> float:
        memory = sum(float(rows.memory[row]) for rows, row in own)
        return self.limit - memory - max(float(rows.buffer[row]) for rows, row in own)

    def _loss(self, stage: int) -> float:
        """Seconds for a byte that a stage's next row takes."""
        here, there = self.lines[stage][self.at[stage]], self.lines[stage][self.at[stage] + 1]
        seconds = float(self.costs[stage][there] - self.costs[stage][here])
        return seconds / max(float(self.hulls[stage].memory[here] - self.hulls[stage].memory[there]), 1.0)

    def _gain(self, stage: int) -> float:
        """Seconds, below 0, that a stage's row before takes less."""
        if not self.at[stage]:
            return 0.0
        here, there = self.lines[stage][self.at[stage]], self.lines[stage][self.at[stage] - 1]
        return float(self.costs[stage][there] - self.costs[stage][here])
