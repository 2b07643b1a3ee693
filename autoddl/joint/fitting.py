"""Rows for the stages of a given cut, so that all fit their workers: good ones, quickly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .regions import Cut
from .stages import Rows, joined
from .terrain import Terrain

__all__ = ["fitting_rows"]

#: Prices of a byte at which rows of stages that share workers are tried, in steps per limit.
_PRICES = np.array([0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 1.0, 3.0, 30.0])


def fitting_rows(terrain: Terrain, cut: Cut, weights: np.ndarray, step_s: float) -> list[Rows] | None:
    """A row for every stage of a cut, so that all fit their workers; None where none was found.

    Args:
        weights: of seconds forward, backward, recompute and all-reduce of every stage; shape (stages, 4).
        step_s: about what a step takes.
    """
    if not terrain.is_alone:
        return _together(terrain, cut, weights, step_s)
    rows: list[Rows] = []
    for stage, (first, stop) in enumerate(cut):
        row = _alone(terrain, stage, first, stop, weights[stage].tolist())
        if row is None:
            return None
        rows.append(row)
    return rows


def _alone(terrain: Terrain, stage: int, first: int, stop: int, weights: Sequence[float]) -> Rows | None:
    """The row of the least weighted seconds that fits the worker of a stage that has it for itself."""
    best: tuple[float, Rows] | None = None
    for way in terrain.ways:
        most = math.inf if best is None else best[0]
        found = terrain.stages[stage].cheapest(
            first, stop, way, terrain.passes[stage], terrain.need[stage], weights, terrain.limit, most
        )
        best = found or best
    return None if best is None else best[1]


def _together(terrain: Terrain, cut: Cut, weights: np.ndarray, step_s: float) -> list[Rows] | None:
    """Rows of stages that share workers: of each those that are the cheapest at some price of a byte.

    All stages are weighed alike: those of one shape have the same rows, then, which are worked out once.
    """
    alike, prices = weights.mean(axis=0).tolist(), step_s / terrain.limit * _PRICES
    hulls: list[Rows] = []
    for stage, (first, stop) in enumerate(cut):
        of_ways = [
            terrain.stages[stage].hull(first, stop, way, terrain.passes[stage], terrain.need[stage], alike, prices)
            for way in terrain.ways
        ]
        parts = [rows for rows in of_ways if rows is not None]
        if not parts:
            return None
        hulls.append(joined(parts))
    chosen = _Choice(terrain, hulls, weights).found()
    return None if chosen is None else [rows.only(np.array([row])) for rows, row in zip(hulls, chosen)]


class _Choice:
    """A row of each of several stages: all begin with their fastest one.

    On workers whose stages do not fit those give way that lose the fewest seconds by a byte; what room is then left is taken back
    by those that gain most.
    """

    def __init__(self, terrain: Terrain, hulls: Sequence[Rows], weights: np.ndarray):
        self.limit, self.hulls = terrain.limit, hulls
        self.homes = [[stage for _, stage in held] for held in terrain.needs.homes]
        self.holders: list[list[int]] = [[] for _ in hulls]
        for worker, held in enumerate(self.homes):
            for stage in held:
                self.holders[stage].append(worker)
        self.costs = [rows.times @ own for rows, own in zip(hulls, weights)]
        self.lines = [self._line(rows, cost) for rows, cost in zip(hulls, self.costs)]
        self.at = [0] * len(hulls)

    @staticmethod
    def _line(rows: Rows, cost: np.ndarray) -> list[int]:
        """From the fastest row to the smallest, each smaller than the one before."""
        line: list[int] = []
        nbytes = rows.memory + rows.buffer
        for row in np.lexsort((nbytes, cost)).tolist():
            if not line or nbytes[row] < nbytes[line[-1]]:
                line.append(row)
        return line

    def found(self) -> list[int] | None:
        """The rows; None where some worker's stages do not fit."""
        for worker, held in enumerate(self.homes):
            while self._room(worker) < 0:
                left = [stage for stage in held if self.at[stage] + 1 < len(self.lines[stage])]
                if not left:
                    return None
                self.at[min(left, key=self._loss)] += 1
        for stage in sorted(range(len(self.hulls)), key=self._gain):
            while self.at[stage]:
                self.at[stage] -= 1
                if any(self._room(worker) < 0 for worker in self.holders[stage]):
                    self.at[stage] += 1
                    break
        return [line[place] for line, place in zip(self.lines, self.at)]

    def _room(self, worker: int) -> float:
        """Bytes that are left on a worker."""
        own = [(self.hulls[stage], self.lines[stage][self.at[stage]]) for stage in self.homes[worker]]
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
