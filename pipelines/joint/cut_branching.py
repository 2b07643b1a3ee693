"""Branch and cut: a region of cuts is bounded by bounds that are made for it, or else split.

**Bounds.**  The program of :mod:`.cut_program` without integrality has the least value that the known bounds leave to a region, and
the fractional cut that has it.  As long as the value is below the threshold, new bounds follow:

1.  *Paths.*  The longest path of the schedule at the fractional cut is a bound that excludes the cut, if the schedule takes longer
    there than the known bounds say (Kelley's cutting planes).  Solutions alone swing from one extreme to another.  So the path at a
    point between the best fractional cut so far and the solution comes first (the in-out separation of Ben-Ameur and Neto, 2007).
2.  *Means.*  A path knows no memory limit: the units of each path are run as is fastest for it alone.  The linear program of
    :mod:`.relaxation`, with the region's numbers of units, yields the best mean of paths with prices of memory.  It takes longer.

All of them hold for all cuts.  So most regions are excluded by bounds that others needed, in a single small program.  A region is
split when its bound rises slowly, or when a fractional cut of it is below the threshold, so that no bound can exclude it.

**Totals.**  Most workers must work for most of a good step, so that the totals of workers with several stages have few values
(:meth:`.cut_program.CutProgram.narrow_totals`).  The relaxation of all cuts does not know that.  With totals it is much tighter.

**Branching.**  A region is split at one worker: into one region for each of its totals; or if its total is known, into one for each
way to share the total among its stages, if these ways are few.  While the stages of a worker share its units in fractions, a pass
through each of them takes the mean time.  In whole units some passes are long and some are short, and neighbours wait for each
other: the bound rises as soon as all stages of a worker are whole, and hardly before.  If the ways are many, or if the worker has
one stage, the region is split in the cuts in which one stage has fewer, and more, units.

All workers are tried (strong branching), else the first few stages with a fractional number of units.  These are taken by their
workers, from both ends of the model inwards: a worker that is whole raises the bound more if its neighbour is whole, too.  The
split is chosen whose parts count the least, where a part counts less the closer its bound is to the threshold.

A solver of integer programs branches, too.  But it knows no bounds except those of whole cuts that it has found, and needs
thousands of them where the stages of a worker can share its units in many ways.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from time import process_time

import numpy as np

from .bounds import Bound, worker_paths
from .cut_program import TOLERANCE, CutProgram
from .cut_regions import Cut, Region
from .cut_times import times_of_counts
from .setting_bounds import FractionalCut, SettingBounds, UnsettledError

__all__ = ["Branched", "CutBranching", "shares_of_total"]

#: Largest number of rounds of either method for a region.
_MAX_ROUNDS = 60
#: A method ends when in some rounds less than this part of the gap has been closed: from the bound to the threshold, or to the best
#: fractional cut.
_SLOW = 0.15
#: Paths are left out if they exclude fewer regions per second than this part of what means do.
_LEAST_RATE = 0.5
#: How far from the best fractional cut of a region to the program's solution the point is whose longest path is added first.
_STEP = 0.3
#: Largest number of paths in the linear program.
_MAX_PATHS = 300
#: Largest number of parts in which a region is split at a worker.
_MAX_WAYS = 40
#: Largest number of stages that are tried for a split in two.
_MAX_CANDIDATES = 4
#: How much a part of a region counts less if its bound rises: exp(-x) for x times the rise to the threshold.
_DECAY = 6.0
#: Numbers of units count as whole within this.
_WHOLE = 1e-3


@dataclass(frozen=True)
class Branched:
    """What is known of a region.

    Attributes:
        least_s: No cut of the region is below it [s]; infinite if bounds exclude all of them.
        cut: A cut of the region that no known bound excludes; None if there is none, or if the region is split.
        parts: The parts of a region that is split, each with a bound of its own [s]; empty for others.
    """

    least_s: float
    cut: Cut | None = None
    parts: tuple[tuple[float, Region], ...] = ()


class _NoCutError(Exception):
    """No cut of a region fits the memory limit."""


class _Method:
    """A way to bound regions by new bounds, round by round.

    Args:
        bounds: The bounds of the setting.
        program: The known bounds on its cuts.

    Attributes:
        best_s: The least step of a fractional cut of the present region that was met [s].
    """

    #: Number of rounds after which the bound of a region must have risen.
    slow_rounds = 0

    def __init__(self, bounds: SettingBounds, program: CutProgram):
        self.bounds, self.program = bounds, program
        self.best_s = math.inf
        self._num_excluded, self._seconds = 0, 0.0

    @property
    def rate(self) -> float:
        """About how many regions it excludes per second of processor time."""
        return (self._num_excluded + 1) / (self._seconds + 1)

    def raised(self, region: Region, solved: tuple[float, np.ndarray]) -> tuple[float, np.ndarray] | None:
        """Add bounds until they exclude a region, or its bound rises slowly.

        Args:
            region: The region.
            solved: Its bound so far [s], and the fractional cut that has it (:meth:`.cut_program.CutProgram.relaxed`).

        Returns:
            The same for all bounds; None if they exclude the region.

        Raises:
            TimeoutError, UnsettledError: The deadline was over, or a program was not solved.
        """
        began = process_time()
        self._begin()
        values_s = [solved[0]]
        try:
            while self._has_next_round(values_s) and self._add(region, *solved):
                self.bounds.explorer.stop.check()
                if self.bounds.deadline.is_over:
                    raise UnsettledError
                relaxed = self.program.relaxed(region, self.bounds.incumbent.threshold)
                if relaxed is None:
                    raise _NoCutError
                solved = relaxed
                values_s.append(solved[0])
            return max(values_s), solved[1]
        except _NoCutError:
            self._num_excluded += 1
            return None
        finally:
            self._seconds += process_time() - began

    def _has_next_round(self, values_s: Sequence[float]) -> bool:
        """Return whether there is another round after the bounds so far [s]."""
        if len(values_s) <= self.slow_rounds:
            return True
        threshold, before_s = self.bounds.incumbent.threshold, values_s[-1 - self.slow_rounds]
        is_slow = values_s[-1] - before_s < _SLOW * (min(self.best_s, threshold) - before_s)
        return len(values_s) <= _MAX_ROUNDS and self.best_s >= threshold and not is_slow

    def _begin(self) -> None:
        """Begin with a region."""
        raise NotImplementedError

    def _add(self, region: Region, value_s: float, counts: np.ndarray) -> bool:
        """Add bounds; return whether they may exclude a fractional cut: numbers of units, shape (stages, runs), whose bound so far
        is ``value_s``.

        Raises:
            _NoCutError: The region has no cut that fits.
            UnsettledError: A program was not solved.
        """
        raise NotImplementedError


class _Paths(_Method):
    """Longest paths at fractional cuts.

    Args:
        mean: The best bound of all cuts, in whose ratio paths count the exchange of gradients.
        vectors: How each unit is run at that bound; shape (stages, units, 6).
    """

    slow_rounds = 30

    def __init__(self, bounds: SettingBounds, program: CutProgram, mean: Bound, vectors: np.ndarray):
        super().__init__(bounds, program)
        self._mean, self._vectors = mean, vectors
        for path in (*worker_paths(bounds.setting.schedule), *bounds.relaxation.paths, *bounds.schedule_graph.paths):
            self._add_path(path)

    def _add_path(self, path: np.ndarray) -> bool:
        is_new = not self.program.knows(path)
        if is_new:
            self.program.add(self.bounds.of_path(path, self._mean))
        return is_new

    def _begin(self) -> None:
        self.best_s, self._best = math.inf, np.zeros(0)

    def _add(self, region: Region, value_s: float, counts: np.ndarray) -> bool:
        between = counts if math.isinf(self.best_s) else self._best + _STEP * (counts - self._best)
        for point in (between, counts):
            step_s, path = self.bounds.graph.step(times_of_counts(self.bounds.cut_graph, point, self._vectors))
            if step_s < self.best_s:
                self.best_s, self._best = step_s, point
            if self._add_path(path) and self.program.value_at(-1, counts) > value_s * (1 + 2 * TOLERANCE):
                return True
        return False


class _Means(_Method):
    """Best means of paths for a region."""

    slow_rounds = 4

    def _begin(self) -> None:
        self.best_s, self._center = math.inf, FractionalCut()

    def _add(self, region: Region, value_s: float, counts: np.ndarray) -> bool:
        mean = self.bounds.mean_over(region, self.program.limits_of_totals(region), self._center)
        if mean is None:
            raise _NoCutError
        self.best_s = self._center.step_s
        self.program.add(*mean)
        return True


class CutBranching:
    """Branch and cut for one setting, whose schedule is synchronous.

    Args:
        bounds: The bounds of the setting, with the graph of its schedule.
        program: The known bounds on its cuts; new ones are added.
        mean: The best bound of all cuts together.
        vectors: How each unit is run at that bound; shape (stages, units, 6).
    """

    def __init__(self, bounds: SettingBounds, program: CutProgram, mean: Bound, vectors: np.ndarray):
        self.bounds, self.program, self.incumbent = bounds, program, bounds.incumbent
        bounds.max_paths = max(bounds.max_paths, _MAX_PATHS)
        self._paths, self._means = _Paths(bounds, program, mean, vectors), _Means(bounds, program)
        self._is_first = True
        last = program.stages - 1
        workers = sorted(program.stages_of_workers, key=lambda stages: min(min(s, last - s) for s in stages))
        #: All stages, by their workers from both ends of the model inwards.
        self._inwards = list(dict.fromkeys(chain.from_iterable(workers)))

    def explore(self, region: Region) -> Branched:
        """Bound a region; if bounds do not exclude all of it, split it, or return its only cut.

        Raises:
            TimeoutError, UnsettledError: The deadline was over, or a program was not solved.
        """
        program, threshold, is_first = self.program, self.incumbent.threshold, self._is_first
        if is_first:
            program.narrow_totals(self.bounds.whole_region, threshold)
        solved = program.relaxed(region, threshold)
        if solved is None:
            return Branched(math.inf)
        if region.only_cut is not None:
            value_s = program.largest_value(region.only_cut)
            return Branched(math.inf) if value_s >= threshold else Branched(value_s, cut=region.only_cut)
        paths, means = self._paths, self._means
        for method in (paths, means) if paths.rate >= _LEAST_RATE * means.rate else (means,):
            solved = method.raised(region, solved)
            if solved is None:
                return Branched(math.inf)
        if is_first:
            self._is_first = False
            program.narrow_totals(self.bounds.whole_region, threshold)  # better bounds leave fewer totals
        least_s, counts = solved
        return self._split(region, counts, least_s)

    def _split(self, region: Region, counts: np.ndarray, least_s: float) -> Branched:
        """Split a region; parts that bounds exclude are left out.

        Args:
            region: The region.
            counts: The best fractional cut for the known bounds: numbers of units, shape (stages, runs).
            least_s: No cut of the region is below it [s].
        """
        stages_of_workers, gap_s = self.program.stages_of_workers, self.incumbent.threshold - least_s
        of_workers = (self._ways_of_worker(region, stages) for stages in stages_of_workers)
        candidates = [ways for ways in of_workers if ways] or self._ways_of_stages(region, counts)
        best, best_score = tuple[tuple[float, Region], ...](), math.inf
        for ways in candidates:
            parts = tuple(
                (max(least_s, solved[0]), part)
                for part in ways
                if (solved := self.program.relaxed(part, self.incumbent.threshold)) is not None
            )
            if len(parts) < 2:
                return Branched(least_s, parts=parts)  # the region becomes smaller at no cost
            score = sum(math.exp(-_DECAY * (bound_s - least_s) / gap_s) for bound_s, _ in parts)
            if score < best_score:
                best, best_score = parts, score
        return Branched(least_s, parts=best)

    def _ways_of_worker(self, region: Region, stages: tuple[int, ...]) -> list[Region]:
        """The parts of a region in which a worker with several stages has each possible total, or in which it shares its total in
        each possible way; none if they are many, or if its stages are whole."""
        limits = region.limits_of_sizes[:, list(stages)]
        totals = self.program.limits_of_totals(region).get(stages)
        if totals is None or (limits[0] == limits[1]).all():
            return []
        ways: Iterator[Region]
        if totals[0] < totals[1]:
            possible = range(totals[0], totals[1] + 1)
            ways = (replace(region, totals={**region.totals, stages: total}) for total in possible)
        else:
            few, many = limits.tolist()
            sizes = (
                {s: (size, size) for s, size in zip(stages, share)} for share in shares_of_total(few, many, totals)
            )
            ways = (replace(region, sizes={**region.sizes, **own}) for own in sizes)
        first = list(islice(ways, _MAX_WAYS + 1))
        return first if len(first) <= _MAX_WAYS else []

    def _ways_of_stages(self, region: Region, counts: np.ndarray) -> list[list[Region]]:
        """For the first few stages that have a fractional number of units: the cuts of a region in which the stage has fewer units,
        and those in which it has more; arguments as of :meth:`_split`."""
        least, most = region.limits_of_sizes
        sizes = counts.sum(axis=1)
        is_whole = np.abs(sizes - np.round(sizes)) <= _WHOLE
        open_stages = [stage for stage in self._inwards if least[stage] < most[stage]]
        candidates = [stage for stage in open_stages if not is_whole[stage]] or open_stages
        floors = np.clip(np.floor(sizes + _WHOLE).astype(int), least, most - 1)
        return [[*region.split(stage, int(floors[stage]))] for stage in candidates[:_MAX_CANDIDATES]]


def shares_of_total(least: Sequence[int], most: Sequence[int], total: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """Iterate over the ways to share a number of units among stages.

    Args:
        least, most: Least and largest number of units of every stage.
        total: Least and largest sum.

    >>> list(shares_of_total([1, 1], [3, 2], (4, 5)))
    [(2, 2), (3, 1), (3, 2)]
    """
    if not least:
        if total[0] <= 0 <= total[1]:
            yield ()
        return
    first = max(least[0], total[0] - sum(most[1:]))
    last = min(most[0], total[1] - sum(least[1:]))
    for size in range(first, last + 1):
        for share in shares_of_total(least[1:], most[1:], (total[0] - size, total[1] - size)):
            yield (size, *share)
