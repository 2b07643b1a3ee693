"""The search of one setting: finds a plan that is better than the incumbent, or proves that the setting has none.

**The problem.**  A *setting* is a division of the devices into workers, a schedule and a micro-batch size.  A *plan* of the setting
is a cut of the model into stages, and a *row* for each stage: a way to run it, with its seconds and bytes (:mod:`.stage_search`).
The rows and the boundaries between them give the seconds t(k) of every *term* k: forward pass, backward pass, recomputation and
all-reduce of each stage, forward and backward transfer over each boundary.  Let n(P, k) count how often path P of the schedule's
graph passes term k (:mod:`autoddl.pipelines.stepgraph`).  Then

    step(t)  =  max over paths P of  sum over k of n(P, k) t(k)

A plan must also fit: the bytes of each worker w are at most the memory limit.  The *threshold* is the step of the incumbent (the
best plan so far of any setting), reduced by a relative 1e-9.  A setting is *settled* when no plan of it is below the threshold; by
up to :data:`.row_search.MARGIN` one may be, where very many are nearly as good.

**Three phases**, each for what the one before leaves open:

1.  *All cuts together.*  The best linear bound over all cuts (:mod:`.setting_bounds`) settles most settings.
2.  *Cut by cut.*  The integer program of :mod:`.cut_program` finds a cut that is below the threshold on all known bounds: the
    best one, or any one if that takes long.  If there is none, the setting is settled.  Otherwise the cut is excluded by a new
    bound: the best one at the point halfway between the best fractional cut and this cut, which excludes many similar cuts too;
    else the best one at the cut itself (Benders' cutting planes; Ben-Ameur and Neto, "Acceleration of cutting-plane and column
    generation algorithms", 2007, choose such points).  Regions of cuts are also bounded and split (:mod:`.cut_branching`), until
    each that is left is a single cut.  The two methods take turns (:mod:`.cut_covers`).
3.  *Row by row.*  A cut that no bound excludes is searched with all rows of its stages that can be of use (:mod:`.cut_plans`).
    This finds its best plan, if that is below the threshold.  Afterwards the cut is excluded.  A cut that takes long is set aside
    until all others are settled.

The graph of a schedule is replaced by a simpler one, if there is one, until there is a cut that this one does not exclude.  In the
first attempt at a setting redistributions inside units are free; in later ones they count (:mod:`.unit_bounds`).

Heuristics provide incumbents (:mod:`.cut_trials`).  A search that ends undecided can be resumed; it goes on where it was.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from autoddl.costmodel.stopping import Deadline
from autoddl.search.dominance import TooManyError

from .bounds import Bound, balance_weights
from .cut_branching import CutBranching
from .cut_covers import CutCovers
from .cut_plans import CutPlans
from .cut_program import TOLERANCE, CutProgram
from .cut_regions import Cut, Region, cut_at
from .cut_trials import CutTrials
from .evaluation import Evaluation
from .explorer import Explorer, Setting
from .incumbent import Incumbent
from .row_search import TooManyStatesError
from .setting_bounds import MAX_CUT_ROUNDS, MAX_ROUNDS, RegionBound, SettingBounds, UnsettledError

__all__ = ["SettingSearch", "UnsettledError"]

#: Largest number of linear programs that are solved for an estimate of the step.
_MAX_ESTIMATE_ROUNDS = 8
#: Largest number of runs of equal units for which the even cut is a good estimate of the best one.
_MAX_RUNS_OF_EVEN_CUT = 4
#: Cuts are tried before they are searched only if the step of the best fractional cut is below this part of the threshold: whole
#: units, and rows that fit, take longer.  The second number is for searches whose aim is a plan rather than a proof, and for steps
#: in which redistributions inside units count.
_PROMISING, _PROMISING_IF_SHARP = 0.94, 0.98
#: A cut is tried before its rows are searched only if its bound is below this part of the threshold: rows settle others sooner.
_WORTH_A_TRIAL = 0.99
#: Largest number of paths that the integer program starts with.
_MAX_CUT_PATHS = 20
#: How far from the best fractional cut to a whole cut the point is at which a bound is made that excludes the cut.
_STEP_TO_CUT = 0.5
#: Largest number of cuts that are explored before there is an incumbent.  Without one a bound excludes no other cut, so that the
#: search of a setting without a plan might go through all cuts.
_MAX_CUTS_WITHOUT_PLAN = 10
#: Seconds of processor time, at least, and part of the time that is left, after which the rows of a cut are set aside until all
#: other cuts are settled: few cuts have very many rows that are nearly as good.
_LEAST_ROWS_S, _ROWS_PART = 2.0, 0.3
#: Seconds, and their part of the time that the search had, for a bound of what is left when the time is over.
_LAST_BOUND_S, _LAST_BOUND_PART = 1.0, 0.2


class SettingSearch:
    """The search of one setting.

    Args:
        explorer: Searches of stages, and schedules, that all settings share.
        setting: The setting.
        known_s: Step of the incumbent; only plans below it are searched.
        deadline: When the search is given up.
        is_quick: Stop after phase 1.
        is_early: The aim is a plan: cuts are tried before it is known whether bounds exclude them.

    Attributes:
        bound_s: No plan of the setting is below it.
    """

    def __init__(
        self,
        explorer: Explorer,
        setting: Setting,
        known_s: float,
        deadline: Deadline,
        is_quick: bool = False,
        is_early: bool = False,
    ):
        self.explorer, self.setting, self.is_quick, self.is_early = explorer, setting, is_quick, is_early
        self.incumbent = Incumbent(known_s)
        self.bounds = SettingBounds(explorer, setting, self.incumbent)
        self.cut_graph, self.relaxation = self.bounds.cut_graph, self.bounds.relaxation
        self.trials = CutTrials(self.bounds)
        self.bound_s = 0.0
        self._set_deadline(deadline)
        #: Whether every unit can be run; None before the search has begun.
        self._is_possible: bool | None = None
        #: The best bound over all cuts; None as long as phase 1 is not complete.
        self._all_cuts: RegionBound | None = None
        #: Phase 2: the cuts that are left; None before it begins.
        self._covers: CutCovers | None = None
        #: The cuts that no bound excludes, but that were searched or set aside, by their boundaries.
        self._searched: set[tuple[int, ...]] = set()
        #: Least bound of the cuts that were given up because they have too many rows.
        self._given_up_s = math.inf
        #: The cuts whose rows are settled last, the one of the least bound first.
        self._set_aside: list[tuple[float, Cut, RegionBound]] = []

    @property
    def best(self) -> Evaluation | None:
        """The best plan of the setting below ``known_s``; None if none was found."""
        return self.incumbent.best

    @property
    def best_s(self) -> float:
        """Step of :attr:`best`, or the least ``known_s``."""
        return self.incumbent.best_s

    @property
    def simulated(self) -> int:
        """Number of plans that were evaluated."""
        return self.trials.simulated

    def _set_deadline(self, deadline: Deadline) -> None:
        self.deadline = self.bounds.deadline = deadline
        self.bounds.is_quick = self.is_quick

    # --------------------------------------------------------------------------------------------------------- the search

    def resume(self, known_s: float, deadline: Deadline) -> None:
        """Continue the search after an :class:`UnsettledError`, neither quick nor early; raises as :meth:`run`.

        Args:
            known_s: Step of the incumbent by now.
            deadline: When the search is given up.
        """
        if known_s < self.best_s:
            self.incumbent.best, self.incumbent.best_s = None, known_s
        self.is_quick = self.is_early = False
        self._set_deadline(deadline)
        if self._is_possible and not self.cut_graph.is_tight:
            # It is worth the effort now.  What is known of cuts is found again, better.
            self._all_cuts = self._covers = None
            self._searched, self._set_aside, self._given_up_s = set(), [], math.inf
            self.bounds.tighten()
        self.run()

    def run(self) -> None:
        """Settle the setting: afterwards none of its plans is below :attr:`best_s`.

        Raises:
            UnsettledError: The deadline was over, or the setting is too large.
            StopRequestedError: A stop was requested.
        """
        if self._is_possible is None:
            is_settled = self.setting.schedule.synchronous and self.bounds.is_settled_by_known_bounds()
            self._is_possible = not is_settled and self.bounds.initialise()
        if self._is_possible:
            self._settle()
        self.bound_s = self.best_s

    def _settle(self) -> None:
        if not self.setting.schedule.synchronous:
            self._settle_asynchronous()
            return
        if self.is_early and self._all_cuts is None:
            self.trials.try_even_cut()
        # Phase 1: all cuts together.
        if self._all_cuts is None or self._all_cuts.is_cut_short:
            self._bound_all_cuts()
        if self.bounds.is_rough and not self.is_quick and not self._is_settled(self.bound_s):
            self.bounds.use_whole_schedule()
            self._bound_all_cuts()
        if not self._is_settled(self.bound_s):
            if self.is_quick:
                raise UnsettledError
            # Phases 2 and 3.
            self._search_cuts()

    def _settle_asynchronous(self) -> None:
        """Settle a setting with an asynchronous schedule by the loads of its workers, and try two cuts.

        Raises:
            UnsettledError: The bound is below the threshold.
        """
        whole = self.bounds.whole_region
        region_bound = self.bounds.of_region(whole, MAX_CUT_ROUNDS)
        self.bound_s = min(region_bound.least_s, self.best_s)
        if not self._is_settled(self.bound_s):
            nearest = whole.nearest_boundaries(region_bound.boundaries)
            self.trials.try_cut(cut_at(nearest, self.cut_graph.num_units), region_bound.bound.weights)
            self.trials.try_bottleneck_cut()
            if not self._is_settled(self.bound_s):
                raise UnsettledError

    def _is_settled(self, bound_s: float) -> bool:
        return self.incumbent.is_reached_by(bound_s)

    def estimated_step_s(self) -> float:
        """Return an estimate of the step of a good plan of the setting; infinite if no fractional cut was found that fits, or if
        bounds exclude the setting.

        It is the step of a fractional cut with free redistributions: of the even cut if most units are equal, else of the best one
        after a few rounds of phase 1.
        """
        self.bounds.initialise()
        if len(self.cut_graph.runs.sizes) > _MAX_RUNS_OF_EVEN_CUT:
            return self.bounds.of_region(self.bounds.whole_region, _MAX_ESTIMATE_ROUNDS).fractional_s
        times = self.bounds.even_times
        return math.inf if times is None else self.bounds.graph.step(times)[0]

    def _check_time(self) -> None:
        """Raise if the search should end.

        Raises:
            StopRequestedError: A stop was requested.
            UnsettledError: The deadline is over.
        """
        self.explorer.stop.check()
        if self.deadline.is_over:
            raise UnsettledError

    # ---------------------------------------------------------------------------------------- phase 1: all cuts together

    def _bound_all_cuts(self, always_tries: bool = False) -> RegionBound:
        """Bound all cuts together; if that does not settle the setting, try the most promising cuts.

        Args:
            always_tries: Whether to try cuts even if whole units are likely to take too long.

        Raises:
            UnsettledError: The deadline is over, and the setting is not settled.
        """
        bounds, whole = self.bounds, self.bounds.whole_region
        bounds.add_known_paths()
        region_bound = bounds.sharpened(whole, bounds.of_region(whole, MAX_ROUNDS))
        self.bound_s = max(self.bound_s, min(region_bound.least_s, self.best_s))
        self._all_cuts = region_bound
        bounds.remember(region_bound)
        if not self._is_settled(region_bound.least_s):
            if always_tries or self._is_promising(region_bound):
                self.trials.try_promising_cuts(region_bound)
            self._check_time()
        return region_bound

    def _is_promising(self, region_bound: RegionBound) -> bool:
        """Return whether cuts are worth trying before they are searched."""
        if self.bounds.is_simpler and not (self.is_quick or self.is_early):
            return False  # they are tried with the whole schedule, if it comes to that
        part = _PROMISING_IF_SHARP if self.is_early or self.cut_graph.is_tight else _PROMISING
        return region_bound.fractional_s < part * self.incumbent.threshold

    # ----------------------------------------------------------------------------------------------- phase 2: cut by cut

    def _search_cuts(self) -> None:
        """Search all cuts: branch and bound over regions.

        Raises:
            UnsettledError: The deadline was over, some cut has too many rows and was not settled, or no plan was found that fits.
        """
        assert self._all_cuts is not None
        if self._covers is None:
            program = CutProgram(self.cut_graph)
            for bound in self._first_cut_bounds(self._all_cuts):
                program.add(bound)
            self._covers = CutCovers(self.bounds, program, self.bound_s, self._branching)
        covers, num_without_plan = self._covers, 0
        while not self._is_settled(covers.least_s):
            self._raise_bound(covers.least_s)
            try:
                self._check_time()
                self._search_region(covers)
            except (TimeoutError, UnsettledError):
                self._bound_by_program(covers.program)
                raise UnsettledError from None
            num_without_plan += math.isinf(self.best_s)
            if num_without_plan > _MAX_CUTS_WITHOUT_PLAN:
                raise UnsettledError
        while self._set_aside:
            self._raise_bound(math.inf)
            self._check_time()
            least_s, cut, cut_bound = self._set_aside[0]
            if not self._is_settled(least_s):
                self._settle_rows(CutPlans(self.bounds, self.trials, cut, cut_bound))
            heapq.heappop(self._set_aside)
        if not self._is_settled(self._given_up_s):
            self._raise_bound(math.inf)
            raise UnsettledError

    def _raise_bound(self, others_s: float) -> None:
        """Raise the bound of the setting to the least of the cuts that were given up or set aside, and of all others."""
        set_aside_s = self._set_aside[0][0] if self._set_aside else math.inf
        self.bound_s = max(self.bound_s, min(others_s, self._given_up_s, set_aside_s, self.best_s))

    def _search_region(self, covers: CutCovers) -> None:
        """Explore a region of the cover whose turn it is: a cut that no known bound excludes is excluded or searched.

        Raises:
            TimeoutError, UnsettledError: The deadline was over; the region is left.
        """
        cover = covers.next_cover()
        region, found = cover.first, cover.explore_first()
        left = found.parts
        if found.cut is not None:
            left = tuple((found.least_s, part) for part in self._explore_cut(covers, region, found.cut))
        cover.replace_first(left)

    def _branching(self) -> CutBranching:
        """Branch and cut with the graph of the schedule itself."""
        assert self._covers is not None
        if self.bounds.is_simpler:
            self._use_whole_schedule(self._covers)
        assert self._all_cuts is not None
        return CutBranching(self.bounds, self._covers.program.copy(), self._all_cuts.bound, self._all_cuts.vectors)

    def _use_whole_schedule(self, covers: CutCovers) -> None:
        """Use the graph of the schedule itself from now on; its best bound over all cuts is a new one."""
        self.bounds.use_whole_schedule()
        covers.add(self._bound_all_cuts().bound)

    def _bound_by_program(self, program: CutProgram) -> None:
        """Raise the bound of the setting by the least that a cut has on all bounds of the program."""
        if math.isinf(self.best_s):
            return
        seconds = min(_LAST_BOUND_S, _LAST_BOUND_PART * self.deadline.limit_s)
        least_s = program.least(self.bounds.whole_region, self.incumbent.threshold, seconds)
        self._raise_bound(least_s)

    def _explore_cut(self, covers: CutCovers, region: Region, cut: Cut) -> list[Region]:
        """Exclude a cut that is below the threshold on all bounds of a cover: by a new bound, or by searching it.

        Returns:
            Regions that contain all remaining cuts: the same region if a new bound excludes the cut, else regions without the cut.
        """
        stops = tuple(stop for _, stop in cut[:-1])
        if stops in self._searched:  # from the other cover
            return region.without(cut)
        assert self._all_cuts is not None
        excluded_s = self.incumbent.threshold * (1 + 2 * TOLERANCE)
        center, target = self._all_cuts.boundaries, np.array(stops, dtype=float)
        if math.isfinite(excluded_s) and len(center):
            bound = self.bounds.at((center + _STEP_TO_CUT * (target - center)).tolist())
            if bound is not None and self._is_excluded(covers, bound, cut, excluded_s):
                return [region]
        # The linear program for this cut alone.
        cut_bound = self.bounds.of_cut(cut)
        if not self._is_settled(cut_bound.least_s):
            if self.bounds.is_simpler:
                # Perhaps the schedule itself takes longer.
                self._use_whole_schedule(covers)
                return [region]
            self._settle_cut(cut, cut_bound)
        elif math.isfinite(cut_bound.least_s) and self._is_excluded(covers, cut_bound.bound, cut, excluded_s):
            return [region]
        self._searched.add(stops)
        return region.without(cut)

    def _is_excluded(self, covers: CutCovers, bound: Bound, cut: Cut, excluded_s: float) -> bool:
        """Add a bound, and return whether a cut is at least ``excluded_s`` on it."""
        covers.add(bound)
        return covers.program.value(-1, cut) >= excluded_s

    def _first_cut_bounds(self, region_bound: RegionBound) -> list[Bound]:
        """Return the bounds that the integer program starts with: the best bound at several prices of memory, and its paths."""
        best = region_bound.bound
        (price,) = best.prices
        grid = self.cut_graph.price_grid(best.weights, self.bounds.approximate_step_s())
        bounds = [best, *(replace(best, prices=(one,)) for one in (*grid, price / 2, 2 * price))]
        return bounds + [self.bounds.of_path(path, best) for path in self.relaxation.latest_paths(_MAX_CUT_PATHS)]

    def _settle_cut(self, cut: Cut, cut_bound: RegionBound) -> None:
        """Find the best plan of one cut, if that is below the threshold; set the cut aside if that takes long.

        Raises:
            UnsettledError: The deadline was over.
        """
        if cut_bound.least_s < _WORTH_A_TRIAL * self.incumbent.threshold:
            self.trials.try_cut(cut, cut_bound.bound.weights)
        limit = Deadline(max(_LEAST_ROWS_S, _ROWS_PART * self.deadline.left_s), timer=time.process_time)
        plans = CutPlans(self.bounds, self.trials, cut, cut_bound, limit)
        try:
            self._settle_rows(plans)
        except UnsettledError:
            if self.deadline.is_over:
                raise
            heapq.heappush(self._set_aside, (plans.least_s, cut, replace(cut_bound, least_s=plans.least_s)))

    def _settle_rows(self, plans: CutPlans) -> None:
        """Find the best plan of one cut, if that is below the threshold; give the cut up if it has too many rows.

        Raises:
            UnsettledError: The deadline was over.
        """
        try:
            with suppress(TooManyError, TooManyStatesError):
                plans.settle()
        except TimeoutError:
            raise UnsettledError from None
        if not self._is_settled(plans.least_s):
            self._given_up_s = min(self._given_up_s, plans.least_s)

    # --------------------------------------------------------------------------------------------------------- incumbents

    def improve(self, sizes: Sequence[int]) -> None:
        """Look for plans that are better than a known one of the setting, without settling it.

        Its cut and the most promising cuts are tried, and then again, the best first, with the rows of all stages selected together
        (:mod:`.row_program`).  The longest paths that are met make other cuts promising, which are tried in turn.

        Args:
            sizes: Number of units of each stage of the known plan, which may have fewer or more stages; its cut is of no use then.

        Raises:
            UnsettledError: The deadline was over.
            StopRequestedError: A stop was requested.
        """
        num_units, weights = self.cut_graph.num_units, balance_weights(self.setting.schedule, self.setting.widths)
        if not self.setting.schedule.synchronous or not self.bounds.initialise():
            return
        if len(sizes) == self.cut_graph.num_stages:
            self.trials.try_cut(cut_at(np.cumsum(sizes).tolist()[:-1], num_units), weights)
        self.bounds.use_whole_schedule()
        finished = set[tuple[int, ...]]()
        while True:
            region_bound = self._bound_all_cuts(always_tries=True)
            tried = sorted(self.trials.tried.keys() - finished, key=self.trials.tried.__getitem__)
            if not tried or self._is_settled(region_bound.least_s):
                return
            for stops in tried:
                self._check_time()
                self.trials.try_cut(cut_at(stops[:-1], num_units), region_bound.bound.weights, is_thorough=True)
            finished.update(tried)
