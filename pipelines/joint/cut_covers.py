"""The cuts of a setting that are left, searched in two ways that take turns.

A *cover* is a set of regions that together hold all cuts that are left.  Two methods exclude cuts, each with its own cover:

-   *program*: the integer program of :mod:`.cut_program` finds a cut that is below the threshold on all known bounds, or says that
    a region has none;
-   *branching*: :mod:`.cut_branching` bounds a region, or splits it.

Each is fast where the other one takes hours, and which one that is shows only later.  So the program begins.  When it has had a
second, branching has its turn until it has had some times as much, and so on; each turn of the program doubles what it has had.  So
the time that is wasted is a multiple of what the faster method needs.  The cuts are settled when one of the covers is empty, and
the larger one of their bounds holds for all cuts that are left.

A program of very many stages hardly ever ends.  There branching begins, and does not stop.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import process_time

from .bounds import Bound
from .cut_branching import Branched, CutBranching
from .cut_program import CutProgram
from .cut_regions import Cut, Region
from .setting_bounds import SettingBounds

__all__ = ["CutCovers"]

#: Seconds of the integer program for the cut of the least bound; any cut below the threshold is found sooner.
_BEST_CUT_S = 0.1
#: Seconds of processor time of the program before branching has its first turn; and the largest number of stages with which the
#: program often ends.
_PROGRAM_S, _MAX_STAGES_OF_PROGRAM = 1.0, 48
#: What branching has had, as a multiple of what the program has had, when the program has its turn again.
_BRANCHING_PART = 4.0


class Cover:
    """The regions of one method.

    Args:
        explore: The method: it excludes a region, finds a cut of it that no known bound excludes, or splits it.
        least_s: No cut is below it [s].
        region: The region of all cuts.
        has_latest_first: Whether of regions with equal bounds the latest one comes first.  Of split regions that is the one nearest
            to a single cut.

    Attributes:
        seconds: Processor time of the method.
    """

    def __init__(self, explore: Callable[[Region], Branched], least_s: float, region: Region, has_latest_first: bool):
        self._explore, self._sign = explore, -1 if has_latest_first else 1
        self._regions = [(least_s, 0, region)]
        self._num_regions = 0
        self.seconds = 0.0

    @property
    def least_s(self) -> float:
        """No cut of the regions is below it [s]; infinite if there is no region."""
        return self._regions[0][0] if self._regions else math.inf

    @property
    def first(self) -> Region:
        """A region of the least bound."""
        return self._regions[0][2]

    def explore_first(self) -> Branched:
        """Explore the first region, which stays."""
        began = process_time()
        try:
            return self._explore(self.first)
        finally:
            self.seconds += process_time() - began

    def replace_first(self, parts: Iterable[tuple[float, Region]]) -> None:
        """Replace the first region by the parts that are left of it, each with a bound [s]; the bound of the region holds, too."""
        least_s = self.least_s
        heapq.heappop(self._regions)
        for bound_s, part in parts:
            self._num_regions += 1
            heapq.heappush(self._regions, (max(least_s, bound_s), self._sign * self._num_regions, part))


class CutCovers:
    """The covers of one setting.

    Args:
        bounds: The bounds of the setting.
        program: The known bounds on its cuts.
        least_s: No cut is below it [s].
        make_branching: Prepares branching, with a program of its own.
    """

    def __init__(
        self, bounds: SettingBounds, program: CutProgram, least_s: float, make_branching: Callable[[], CutBranching]
    ):
        self.bounds, self.program, self._make_branching = bounds, program, make_branching
        #: The covers and programs of the two methods; those of branching are missing before its first turn.
        self._covers = [Cover(self._found, least_s, bounds.whole_region, has_latest_first=False)]
        self._programs = [program]
        self._has_program = program.stages <= _MAX_STAGES_OF_PROGRAM
        #: Seconds after which the turn of the program ends.
        self._turn_s = _PROGRAM_S

    @property
    def least_s(self) -> float:
        """No cut that is left is below it [s]; infinite if no cut is left."""
        return max(cover.least_s for cover in self._covers)

    def add(self, bound: Bound) -> None:
        """Add a bound, for both methods."""
        for program in self._programs:
            program.add(bound)

    def next_cover(self) -> Cover:
        """The cover whose turn it is; without an incumbent that of the program."""
        program = self._covers[0]
        if math.isinf(self.bounds.incumbent.threshold) or (self._has_program and program.seconds < self._turn_s):
            return program
        if len(self._covers) == 1:
            branching = self._make_branching()
            self._programs.append(branching.program)
            self._covers.append(Cover(branching.explore, self.least_s, self.bounds.whole_region, has_latest_first=True))
        cover = self._covers[1]
        if not self._has_program or cover.seconds < _BRANCHING_PART * program.seconds:
            return cover
        self._turn_s = 2 * program.seconds
        return program

    def _found(self, region: Region) -> Branched:
        """Find a cut of a region by the program, or leave the region as it is if that takes longer than the turn.

        Raises:
            TimeoutError: There is no incumbent, and the deadline is over.
        """
        threshold, left_s = self.bounds.incumbent.threshold, self.bounds.deadline.left_s
        if math.isinf(threshold):
            return _of_solved(self.program.solve(region, threshold, left_s))
        with suppress(TimeoutError):
            # The cut of the least bound first: better plans are found earlier.
            return _of_solved(self.program.solve(region, threshold, min(_BEST_CUT_S, left_s)))
        with suppress(TimeoutError):
            turn_s = self._turn_s - self._covers[0].seconds
            cut = self.program.find(region, threshold, min(turn_s, self.bounds.deadline.left_s))
            return Branched(math.inf if cut is None else 0.0, cut)
        return Branched(0.0, parts=((0.0, region),))


def _of_solved(solved: tuple[float, Cut] | None) -> Branched:
    """The answer of :meth:`.cut_program.CutProgram.solve`."""
    return Branched(math.inf) if solved is None else Branched(*solved)
