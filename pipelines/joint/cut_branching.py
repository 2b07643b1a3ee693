"""Branch and cut: a region of cuts is bounded by paths that are longest at fractional cuts, or else split in two.

**Separation.**  The program of :mod:`.cut_program` without integrality has the best fractional cut x of the region for all known
bounds.  If the schedule takes longer at x than these bounds say, its longest path there is a new bound that excludes x (Kelley's
cutting planes).  Solutions alone swing from one extreme to another.  So the path is that of the point

    c + STEP (x - c)

first, with c the best fractional cut of the region so far (the in-out separation of Ben-Ameur and Neto, 2007).  Where paths exclude
no more, prices of memory may: the best mean of paths at x (:meth:`.setting_bounds.SettingBounds.at`).

**Branching.**  As soon as bounds rise slowly, or c is below the threshold, so that no bound can exclude the region, one stage is
chosen whose number of units is fractional: the region is split in the cuts in which the stage has fewer, and more, units.  Of the
first few such stages it is the one whose parts have the best bounds (strong branching): the largest product of rises.  The stages
of one worker follow each other, because their total is fixed by the work of the worker, and the workers of the first and last
stages come first: what they do delays all others.

A solver of integer programs branches, too.  But it knows no paths except those of whole cuts that it has found, and needs
thousands of them where the stages of a worker can share its units in many ways.  Paths at fractional cuts bound all of these at
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .bounds import Bound, worker_paths
from .cut_program import TOLERANCE, CutProgram
from .cut_regions import Cut, Region
from .cut_times import times_of_counts
from .setting_bounds import SettingBounds, UnsettledError

__all__ = ["Branched", "CutBranching"]

#: How far from the best fractional cut of a region to the program's solution the point is whose longest path is added first.
_STEP = 0.2
#: A region is split when, in so many rounds, less than this part of the gap has been closed: from the bound to the threshold, or to
#: the best fractional cut.
_SLOW_ROUNDS, _SLOW_ROUNDS_OF_FIRST, _SLOW = 2, 20, 0.1
#: Largest number of stages that are tried for a split, and the least rise that counts, as a part of the rise to the threshold.
_MAX_CANDIDATES, _TINY = 8, 1e-3
#: Numbers of units count as whole within this.
_WHOLE = 1e-3


@dataclass(frozen=True)
class Branched:
    """What is known of a region.

    Attributes:
        least_s: No cut of the region is below it [s]; infinite if bounds exclude all of them.
        cut: A cut of the region that no known bound excludes; None if there is none, or if the region is split.
        parts: The parts of a region that is split; empty for others.
    """

    least_s: float
    cut: Cut | None = None
    parts: tuple[Region, ...] = ()


class CutBranching:
    """Branch and cut for one setting, whose schedule is synchronous.

    Args:
        bounds: The bounds of the setting, with the graph of its schedule.
        program: The known bounds on its cuts; new ones are added.
        mean: The best bound of all cuts together.
        vectors: How each unit is run at that bound; shape (stages, units, 6).
    """

    def __init__(self, bounds: SettingBounds, program: CutProgram, mean: Bound, vectors: np.ndarray):
        self.bounds, self.program, self.mean, self.vectors = bounds, program, mean, vectors
        self.cut_graph, self.incumbent = bounds.cut_graph, bounds.incumbent
        for path in (*worker_paths(bounds.setting.schedule), *bounds.relaxation.paths, *bounds.schedule_graph.paths):
            self._add_path(path)
        #: The stages in the order in which they are chosen.
        self._order = list(dict.fromkeys(stage for stages in program.stages_of_workers for stage in stages))
        self._is_first = True
        #: The best fractional cut of all so far.
        self._best_s = math.inf
        self._best: np.ndarray | None = None

    def _add_path(self, path: np.ndarray) -> None:
        if not self.program.knows(path):
            self.program.add(self.bounds.of_path(path, self.mean))

    def _step(self, counts: np.ndarray) -> float:
        """Return the step of a fractional cut, and add its longest path."""
        step, path = self.bounds.graph.step(times_of_counts(self.cut_graph, counts, self.vectors))
        self._add_path(path)
        if step < self._best_s:
            self._best_s, self._best = step, counts
        return step

    def explore(self, region: Region) -> Branched:
        """Bound a region; if bounds do not exclude all of it, split it, or return its only cut.

        Raises:
            TimeoutError, UnsettledError: The deadline was over, or a program was not solved.
        """
        threshold, is_first = self.incumbent.threshold, self._is_first
        if is_first:
            self.program.narrow_totals(self.bounds.whole_region, threshold)
        slow_rounds = _SLOW_ROUNDS_OF_FIRST if is_first else _SLOW_ROUNDS
        least_s, gaps_s = list[float](), list[float]()
        center_s, center = math.inf, None
        while True:
            self.bounds.explorer.stop.check()
            if self.bounds.deadline.is_over:
                raise UnsettledError
            solved = self.program.relaxed(region, threshold)
            if solved is None:
                return Branched(math.inf)
            value_s, counts = solved
            if region.only_cut is not None:
                value_s = self.program.largest_value(region.only_cut)
                is_excluded = value_s >= threshold * (1 + TOLERANCE)
                return Branched(math.inf) if is_excluded else Branched(value_s, cut=region.only_cut)
            least_s.append(value_s)
            if center is None:
                center = self._nearest(region, counts)
                center_s = self._step(center)
            if center_s < threshold and not is_first:
                break
            middle = center + _STEP * (counts - center)
            middle_s = self._step(middle)
            if middle_s < center_s:
                center_s, center = middle_s, middle
            if not self._excludes(counts, value_s):
                break
            gaps_s.append(min(center_s, threshold) - value_s)
            if len(gaps_s) > slow_rounds and gaps_s[-1] > (1 - _SLOW) * gaps_s[-1 - slow_rounds]:
                break
        self._is_first = False
        return self._split(region, counts, max(least_s))

    def _nearest(self, region: Region, counts: np.ndarray) -> np.ndarray:
        """Return the best fractional cut so far, moved towards one of a region, with given numbers of units, as far as is needed to
        get into the region."""
        if self._best is None:
            return counts
        part = 0.0
        for of_point, limits in (
            (_sizes, region.limits_of_sizes),
            (_boundaries, np.array(region.ranges).reshape(-1, 2).T),
        ):
            begin, way = of_point(self._best), of_point(counts) - of_point(self._best)
            beyond = np.maximum(limits[0] - begin, begin - limits[1])
            is_beyond = (beyond > 0) & (np.abs(way) > _WHOLE)
            part = max(part, float((beyond[is_beyond] / np.abs(way[is_beyond])).max(initial=0.0)))
        return np.asarray(self._best + min(part, 1.0) * (counts - self._best))

    def _excludes(self, counts: np.ndarray, value_s: float) -> bool:
        """Return whether the latest path, the longest path at a fractional cut, or the best mean of paths there excludes it.

        Args:
            counts: The fractional cut.
            value_s: The largest of the bounds that were known before at the cut [s].
        """

        def is_excluded() -> bool:
            return self.program.value_at(-1, counts) > value_s * (1 + 2 * TOLERANCE)

        if is_excluded():
            return True
        self._step(counts)
        if is_excluded():
            return True
        bound = self.bounds.at(_boundaries(counts).tolist())
        if bound is not None:
            self.program.add(bound)
        return is_excluded()

    def _split(self, region: Region, counts: np.ndarray, least_s: float) -> Branched:
        """Split a region in two at the number of units of a stage of a fractional cut; parts without a cut are left out."""
        least, most = region.limits_of_sizes
        sizes = _sizes(counts)
        is_whole = np.abs(sizes - np.round(sizes)) <= _WHOLE
        open_stages = [stage for stage in self._order if least[stage] < most[stage]]
        candidates = [stage for stage in open_stages if not is_whole[stage]] or open_stages[:1]
        best, best_score = tuple[Region, ...](), -math.inf
        threshold = self.incumbent.threshold
        tiny_s = _TINY * (threshold - least_s)
        for stage in candidates[:_MAX_CANDIDATES]:
            size = int(np.clip(math.floor(sizes[stage] + _WHOLE), least[stage], most[stage] - 1))
            parts, score = [], 1.0
            for part in region.split(stage, size):
                solved = self.program.relaxed(part, threshold)
                score *= max(tiny_s, (threshold if solved is None else solved[0]) - least_s)
                if solved is not None:
                    parts.append(part)
            if len(parts) < 2:
                return Branched(least_s, parts=tuple(parts))  # the region has become smaller at no cost
            if score > best_score:
                best, best_score = tuple(parts), score
        return Branched(least_s, parts=best)


def _sizes(counts: np.ndarray) -> np.ndarray:
    """The number of units of every stage, for those of each run, shape (stages, runs)."""
    return np.asarray(counts.sum(axis=1))


def _boundaries(counts: np.ndarray) -> np.ndarray:
    """The number of units before every boundary; argument as :func:`_sizes`."""
    return np.asarray(np.cumsum(counts.sum(axis=1))[:-1])
