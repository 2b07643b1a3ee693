"""The search of one setting: finds a plan that is better than the incumbent, or proves that the setting has none.

**The problem.**  A *setting* is a division of the devices into workers, a schedule and a micro-batch size.  A *plan* of the setting
is a cut of the model into stages, and a *row* for each stage: a way to run it, with its seconds and bytes (:mod:`.stage_search`).
The rows and the boundaries between them give the seconds t(k) of every *term* k: forward pass, backward pass, recomputation and
all-reduce of each stage, forward and backward transfer over each boundary.  Let n(P, k) count how often path P of the schedule's
graph passes term k (:mod:`autoddl.pipelines.stepgraph`).  Then

    step(t)  =  max over paths P of  sum over k of n(P, k) t(k)

A plan must also fit: the bytes of each worker w are at most the memory limit.  The *threshold* is the step of the incumbent (the
best plan so far of any setting), reduced by a relative 1e-9.  A setting is *settled* when no plan of it is below the threshold.

**Linear bounds.**  Every path is a lower bound on the step that is linear in t.  So is every mean of paths, with shares lambda(P)
that are not negative and sum to 1, also if bytes beyond the limit have prices mu(w) >= 0:

    bound(t)  =  sum over P, k of lambda(P) n(P, k) t(k)  +  sum over w of mu(w) (bytes(w) - limit)

is at most step(t) for every plan that fits.  A linear bound is a sum over stages.  With free redistributions it is a sum over
units, so that dynamic programming finds its least value over all cuts and all ways to run units.  There are many paths, but only
few matter.  They are found as they are needed: the longest path at some times t is the bound that is exact at t.

**Three phases**, each for what the one before leaves open:

1.  *All cuts together.*  The linear program of :mod:`.relaxation` finds the shares and prices whose bound is best over all cuts.
    It generates paths (cutting planes) and ways to run units (columns) until the bound reaches the threshold or rises no more.
    This settles most settings.
2.  *Cut by cut.*  The integer program of :mod:`.cut_program` finds a cut that is below the threshold on all known bounds.  If there
    is none, the setting is settled.  Otherwise let the units of the cut be run as in phase 1.  If the longest path is at least the
    threshold, it becomes a bound.  If not, the linear program bounds this cut alone.  Either excludes the cut, and often many
    similar ones.
3.  *Row by row.*  A cut that remains is searched with all rows of its stages that can be of use (:mod:`.row_search`).  This finds
    its best plan, if that is below the threshold.  Afterwards the cut is excluded.

Heuristics provide incumbents: the even cut and the cut nearest to the best fractional one are improved by moving units between
stages, and get rows that fit (:mod:`.fitting`).  Every incumbent is priced by the full evaluation (:mod:`.evaluation`), not by the
bounds.

Long schedules that repeat themselves are replaced by short ones in phase 1, whose steps are lower bounds (*condensed* graphs,
:mod:`autoddl.pipelines.periods`).  The period of an asynchronous schedule is not a longest path.  It is bounded by the loads of the
workers only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoddl.costmodel.stopping import Deadline
from autoddl.costmodel.strategy import Strategy

from ..stepgraph import StepGraph
from .bounds import balance_weights, worker_loads, worker_paths
from .cut_graph import Bound, CutGraph, TooManyError
from .cut_program import TOLERANCE, CutProgram
from .cut_regions import Cut, Region, bottleneck_cut, cheapest_cut, cut_at
from .cut_times import MAX_NODES, locally_improved, times_of_cuts, times_of_even_cut
from .evaluation import Evaluation
from .explorer import RELATIVE_TOLERANCE, Explorer, Setting
from .fewer_blocks import with_fewer_blocks
from .fitting import fitting_rows
from .relaxation import Relaxation, UnsolvedError
from .row_search import RowSearch, Selection, TooManyStatesError
from .stage_search import RowFilter

__all__ = ["SettingSearch", "UnsettledError"]

#: Largest number of linear programs that are solved for the bound of all cuts, of one cut, and for an estimate of the step.
_MAX_ROUNDS, _MAX_CUT_ROUNDS, _MAX_ESTIMATE_ROUNDS = 40, 8, 4
#: Largest number of runs of equal units for which the even cut is a good estimate of the best one.
_MAX_RUNS_OF_EVEN_CUT = 4
#: The bound of a region is not raised further if its distance from the step of the best fractional cut is less than this part of
#: the distance from there to the threshold: it would stay below the threshold.
_CLOSE = 0.1
#: The same part in a quick search, which leaves the rest to a later one.
_CLOSE_IF_QUICK = 0.4
#: A quick search tries cuts only if the step of the best fractional cut is below this part of the threshold.
_PROMISING = 0.97
#: Largest number of paths in the linear program.
_MAX_PATHS = 80
#: Largest number of known paths when the rows of all stages are selected together.
_MAX_SELECTION_PATHS = 20
#: Largest number of paths that restrict the rows of a stage.
_MAX_ROW_PATHS = 5
#: Largest number of paths that the integer program starts with.
_MAX_CUT_PATHS = 60
#: Largest number of cuts that are explored before there is an incumbent.  Without one a bound excludes no other cut, so that the
#: search of a setting without a plan might go through all cuts.
_MAX_CUTS_WITHOUT_PLAN = 10
#: Factor that lowers the threshold by more than a sum of floats changes with the order of its terms.
_ROUNDING = 1 - 1e-12


class UnsettledError(Exception):
    """The search ended before the setting was settled."""


@dataclass(frozen=True, eq=False)
class _RegionBound:
    """The best known linear bound over the cuts of a region.

    Attributes:
        least_s: No plan with a cut of the region is below it; infinite if the region has no plan.
        bound: The mean of paths, with prices of memory.
        boundaries: Boundaries of the best fractional cut, in units; shape (stages - 1,).
        vectors: The cheapest way to run each unit at the bound: seconds forward, backward, of recomputation and of all-reduce, and
            bytes; shape (stages, units, 5).
        fractional_s: The least step of a fractional cut that was met.
    """

    least_s: float
    bound: Bound
    boundaries: np.ndarray
    vectors: np.ndarray
    fractional_s: float


class SettingSearch:
    """The search of one setting.

    Args:
        explorer: Searches of stages, and schedules, that all settings share.
        setting: The setting.
        known_s: Step of the incumbent; only plans below it are searched.
        deadline: When the search is given up.
        is_quick: Stop after phase 1, and try cuts only if the best fractional cut is well below ``known_s``.

    Attributes:
        best: The best plan of the setting below ``known_s``; None if none was found.
        best_s: Step of ``best``, or ``known_s``.
        bound_s: No plan of the setting is below it.
        simulated: Number of plans that were evaluated.
    """

    def __init__(
        self, explorer: Explorer, setting: Setting, known_s: float, deadline: Deadline, is_quick: bool = False
    ):
        demand = explorer.memory_demand(setting.schedule)
        assert demand is not None
        self.explorer, self.setting, self.deadline, self.is_quick = explorer, setting, deadline, is_quick
        condensed = explorer.condensed_graph(setting)
        self.is_condensed = condensed is not None
        self.schedule_graph = condensed or explorer.schedule_graph(setting)
        self.cut_graph = CutGraph(explorer, setting, explorer.recomputations, demand)
        stages_of_workers = [[stage for _, stage in held] for held in demand.homes]
        self.relaxation = Relaxation(self.cut_graph.runs, stages_of_workers, self.cut_graph.limit_bytes)
        self.simulated = 0
        self.best: Evaluation | None = None
        self.best_s = known_s
        self.bound_s = 0.0
        #: The cuts that were tried, by the ends of their stages, with the step of the rows that were found; inf if none fit.
        self._tried_cuts: dict[tuple[int, ...], float] = {}
        #: Times of the even fractional cut with its units run so that they fit; None if it does not fit.
        self._even_times: np.ndarray | None = None
        #: Least bound of the cuts that were given up because they have too many rows.
        self._given_up_s = math.inf

    @property
    def graph(self) -> StepGraph:
        """The graph of the schedule, which must be synchronous."""
        assert self.schedule_graph.graph is not None
        return self.schedule_graph.graph

    @property
    def threshold(self) -> float:
        """Steps that are not below it are not better than the incumbent."""
        return self.best_s * (1 - RELATIVE_TOLERANCE)

    def _is_settled(self, bound_s: float) -> bool:
        """Return whether plans with this lower bound are not better than the incumbent."""
        return bound_s >= self.threshold * _ROUNDING

    # --------------------------------------------------------------------------------------------------------- the search

    def run(self) -> None:
        """Settle the setting: afterwards none of its plans is below :attr:`best_s`.

        Raises:
            UnsettledError: The deadline was over, or the setting is too large.
            StopRequestedError: A stop was requested.
        """
        if self._initialise():
            self._settle(Region.whole(self.cut_graph.num_stages, self.cut_graph.num_units))
        self.bound_s = self.best_s

    def _settle(self, whole: Region) -> None:
        if not self.setting.schedule.synchronous:
            self._settle_asynchronous(whole)
            return
        # Phase 1: all cuts together, first with the condensed schedule.
        region_bound = self._bound_all_cuts(whole)
        if self.is_condensed and not self.is_quick and not self._is_settled(region_bound.least_s):
            self.schedule_graph, self.is_condensed = self.explorer.schedule_graph(self.setting), False
            region_bound = self._bound_all_cuts(whole)
        if not self._is_settled(region_bound.least_s):
            if self.is_quick:
                raise UnsettledError
            # Phases 2 and 3.
            self._search_cuts(whole, region_bound)

    def _settle_asynchronous(self, whole: Region) -> None:
        """Settle a setting with an asynchronous schedule by the loads of its workers, and try two cuts.

        Raises:
            UnsettledError: The bound is below the threshold.
        """
        region_bound = self._raise_bound(whole, _MAX_CUT_ROUNDS)
        self.bound_s = min(region_bound.least_s, self.best_s)
        if self.bound_s < self.threshold:
            nearest = whole.nearest_boundaries(region_bound.boundaries)
            self._try_cut(cut_at(nearest, self.cut_graph.num_units), region_bound.bound.weights)
            self._try_bottleneck_cut()
            if self.bound_s < self.threshold:
                raise UnsettledError

    def estimated_step_s(self) -> float:
        """Return an estimate of the step of a good plan of the setting; infinite if no fractional cut was found that fits.

        It is the step of a fractional cut with free redistributions: of the even cut if most units are equal, else of the best one
        after a few rounds of phase 1.
        """
        self._initialise()
        if len(self.cut_graph.runs.sizes) > _MAX_RUNS_OF_EVEN_CUT:
            whole = Region.whole(self.cut_graph.num_stages, self.cut_graph.num_units)
            return self._raise_bound(whole, _MAX_ESTIMATE_ROUNDS).fractional_s
        return math.inf if self._even_times is None else self.graph.step(self._even_times)[0]

    def _initialise(self) -> bool:
        """Add the first paths and columns; return whether every unit can be run.

        The paths are the balance bound and the workers' loads, with fill and drain if the schedule is synchronous.  The columns
        are the cheapest ways to run units at several prices of memory, the last of which counts memory alone.
        """
        balanced = balance_weights(self.setting.schedule, self.setting.widths)
        spec = self.setting.schedule
        for path in (balanced, *(worker_paths(spec) if spec.synchronous else worker_loads(spec))):
            self._add_path(path, is_from_schedule=True)
        weights = np.maximum(balanced, 1e-3)
        prices = self.cut_graph.price_grid(weights, self._approximate_step_s())
        for price in (*prices, 1e6 * prices[-1]):
            cheapest = self.cut_graph.cheapest_units(weights, price)
            if cheapest is None:
                return False
            _, vectors = cheapest
            self.relaxation.add_columns(vectors[:, self.relaxation.first])
            times, fits = times_of_even_cut(self.cut_graph, vectors)
            if self._even_times is None and fits:
                self._even_times = times
        return True

    def _approximate_step_s(self) -> float:
        """Return about how many seconds a step takes, to scale prices of memory."""
        if math.isfinite(self.best_s):
            return self.best_s
        loads = Bound(np.maximum.reduce(worker_loads(self.setting.schedule)))
        return float(self.cut_graph.least_over_all_cuts(loads, 0.0, (0.0,)))

    def _check_time(self) -> None:
        """Raise if the search should end.

        Raises:
            StopRequestedError: A stop was requested.
            UnsettledError: The deadline is over.
        """
        self.explorer.stop.check()
        if self.deadline.is_over:
            raise UnsettledError

    def _add_path(self, path: np.ndarray, is_from_schedule: bool = False) -> bool:
        """Add a path to the linear program; return whether it is new.

        Args:
            path: How often the path passes each term.
            is_from_schedule: Whether other settings of the schedule know the path already.
        """
        if (self.relaxation.paths == path).all(axis=1).any():
            return False
        self.relaxation.add_path(path)
        if not is_from_schedule:
            self.schedule_graph.remember(path)
        if len(self.relaxation.paths) > _MAX_PATHS:
            self.relaxation.drop_paths(_MAX_PATHS // 2)
        return True

    # ---------------------------------------------------------------------------------------- phase 1: all cuts together

    def _bound_all_cuts(self, whole: Region) -> _RegionBound:
        """Bound all cuts together; if that does not settle the setting, try the most promising cuts.

        Raises:
            UnsettledError: The deadline is over, and the setting is not settled.
        """
        for path in self.schedule_graph.paths:
            self._add_path(path, is_from_schedule=True)
        if self._even_times is not None:
            self._add_path(self.graph.step(self._even_times)[1])
        region_bound = self._sharpened(whole, self._raise_bound(whole, _MAX_ROUNDS))
        self.bound_s = max(self.bound_s, min(region_bound.least_s, self.best_s))
        if not self._is_settled(region_bound.least_s):
            if not self.is_quick or region_bound.fractional_s < _PROMISING * self.threshold:
                self._try_promising_cuts(whole, region_bound)
            self._check_time()
        return region_bound

    def _raise_bound(self, region: Region, max_rounds: int) -> _RegionBound:
        """Raise the linear bound of a region by paths and columns, until it settles the region, rises no more, or the time is over.

        Raises:
            UnsettledError: A linear program was not solved.
        """
        cut_graph, relaxation = self.cut_graph, self.relaxation
        infeasible = _RegionBound(math.inf, Bound(relaxation.paths[0]), np.zeros(0), np.zeros(0), math.inf)
        best: _RegionBound | None = None
        # The best fractional cut so far: its step, and its times.
        center_s, center = math.inf, self._even_times
        for _ in range(max_rounds):
            if best is not None and self.deadline.is_over:
                break  # the bound so far holds
            self.explorer.stop.check()
            # Solve the linear program.  Its dual values give a bound over the cuts of the region.
            try:
                relaxed = relaxation.solve(region.ranges)
            except UnsolvedError as error:
                raise UnsettledError from error
            if relaxed is None:
                return infeasible
            bound = Bound(relaxed.shares @ relaxation.paths, (relaxed.price,))
            cheapest = cut_graph.cheapest_units(bound.weights, relaxed.price)
            assert cheapest is not None
            costs, vectors = cheapest
            least_s = cut_graph.least_in_region(bound, costs, region.ranges)
            if best is None or least_s > best.least_s:
                best = _RegionBound(least_s, bound, relaxed.boundaries, vectors, center_s)
            if self._is_settled(least_s):
                return best
            # Add columns of negative reduced cost.
            reduced_costs = relaxation.reduced_costs(costs[:, relaxation.first]) + 1e-9 * relaxed.step_s
            is_new = relaxation.add_columns(vectors[:, relaxation.first], reduced_costs)
            if not self.setting.schedule.synchronous:
                if not is_new:
                    break
                continue
            # Add the longest path at the program's solution, and at the point halfway to the best fractional cut so far: the
            # solutions alone swing from one extreme to another.
            center = relaxed.times if center is None else center
            for times in ((relaxed.times + center) / 2, relaxed.times):
                step, path = self.graph.step(times)
                is_new |= self._add_path(path)
                if step < center_s:
                    center_s, center = step, times
            close = _CLOSE_IF_QUICK if self.is_quick else _CLOSE
            if not is_new or center_s - best.least_s < close * (self.threshold - center_s):
                break
        assert best is not None
        return replace(best, fractional_s=center_s)

    def _sharpened(self, region: Region, region_bound: _RegionBound) -> _RegionBound:
        """Raise the bound of a region by the costs of arcs, if each worker has one stage.

        An arc has one way of recomputation for all its units, and counts with the price of memory at which it costs the most.
        """
        if not self.cut_graph.has_one_stage_per_worker or self._is_settled(region_bound.least_s):
            return region_bound
        weights, (price,) = region_bound.bound.weights, region_bound.bound.prices
        prices = (*self.cut_graph.price_grid(weights, self._approximate_step_s()), price / 2, price, 2 * price)
        least_s, _ = cheapest_cut(region.restrict(self.cut_graph.arc_costs(Bound(weights, prices))))
        return replace(region_bound, least_s=max(region_bound.least_s, least_s))

    # ----------------------------------------------------------------------------------------------- phase 2: cut by cut

    def _search_cuts(self, whole: Region, region_bound: _RegionBound) -> None:
        """Search all cuts, best first: branch and bound over regions, each bounded by the integer program.

        Raises:
            UnsettledError: The deadline was over, some cut has too many rows and was not settled, or no plan was found that fits.
        """
        program = CutProgram(self.cut_graph)
        for bound in self._first_cut_bounds(region_bound):
            program.add(bound)
        queue = [(self.bound_s, 0, whole)]
        number = num_without_plan = 0
        while queue and not self._is_settled(queue[0][0]):
            self._check_time()
            self.bound_s = max(self.bound_s, min(queue[0][0], self._given_up_s, self.best_s))
            _, _, region = heapq.heappop(queue)
            try:
                solved = program.solve(region, self.threshold, self.deadline.left_s)
            except TimeoutError:
                raise UnsettledError from None
            if solved is None:
                continue  # no cut of the region is below the threshold
            least_s, cut = solved
            for part in self._explore_cut(program, region, cut, region_bound):
                number += 1
                heapq.heappush(queue, (least_s, number, part))
            num_without_plan += math.isinf(self.best_s)
            if num_without_plan > _MAX_CUTS_WITHOUT_PLAN:
                raise UnsettledError
        if not self._is_settled(self._given_up_s):
            self.bound_s = max(self.bound_s, self._given_up_s)
            raise UnsettledError

    def _explore_cut(self, program: CutProgram, region: Region, cut: Cut, region_bound: _RegionBound) -> list[Region]:
        """Exclude a cut that is below the threshold on all bounds of the program: by a new bound, or by searching it.

        Returns:
            Regions that contain all remaining cuts: the same region if a new bound excludes the cut, else regions without the cut.
        """
        # The longest path, if units are run as at the bound of all cuts.
        step, path = self.graph.step(times_of_cuts(self.cut_graph, [cut], region_bound.vectors)[:, 0])
        if step >= self.threshold and not program.knows(path):
            self._add_path(path)
            program.add(Bound(path))
            return [region]
        # The linear program for this cut alone.
        only = Region.of_cut(cut)
        cut_bound = self._sharpened(only, self._raise_bound(only, _MAX_CUT_ROUNDS))
        if not self._is_settled(cut_bound.least_s):
            try:
                self._settle_cut(cut, cut_bound)
            except (TooManyError, TooManyStatesError):
                self._given_up_s = min(self._given_up_s, cut_bound.least_s)
        elif math.isfinite(cut_bound.least_s):
            program.add(cut_bound.bound)
            if program.value(-1, cut) >= self.threshold * (1 + 2 * TOLERANCE):
                return [region]
        return region.without(cut)

    def _first_cut_bounds(self, region_bound: _RegionBound) -> list[Bound]:
        """Return the bounds that the integer program starts with: the best bound at several prices of memory, and its paths."""
        (price,), mean = region_bound.bound.prices, region_bound.bound.weights
        grid = self.cut_graph.price_grid(mean, self._approximate_step_s())
        bounds = [region_bound.bound, *(Bound(mean, (one,)) for one in (*grid, price / 2, 2 * price))]
        return bounds + [Bound(path) for path in self.relaxation.latest_paths(_MAX_CUT_PATHS)]

    # ----------------------------------------------------------------------------------------------- phase 3: row by row

    def _settle_cut(self, cut: Cut, cut_bound: _RegionBound) -> None:
        """Find the best plan of one cut, if that is below the threshold.

        Raises:
            UnsettledError: The deadline was over.
            TooManyError: A stage has too many rows.
            TooManyStatesError: There are too many selections of rows.
        """
        self._try_cut(cut, cut_bound.bound.weights)
        # Without the layouts at the sides of stages there are fewer rows; this settles most cuts.
        if not self._is_settled_by_rows(cut, cut_bound, has_sides=False):
            self._is_settled_by_rows(cut, cut_bound, has_sides=True)

    def _is_settled_by_rows(self, cut: Cut, cut_bound: _RegionBound, has_sides: bool) -> bool:
        """Search the rows of a cut's stages.

        Rows are loaded stage by stage, first the stage whose seconds count most, until the bounds by rows exclude the cut.

        Args:
            cut: The cut.
            cut_bound: The linear bound of this cut alone.
            has_sides: Whether the rows distinguish the layouts at both sides of a stage.

        Returns:
            Whether the cut is settled.  False if the layouts are needed: the transfers of a selection may take longer than the
            least.

        Raises:
            UnsettledError: The deadline was over.
            TooManyError: A stage has too many rows.
            TooManyStatesError: There are too many selections of rows.
        """
        cut_graph = self.cut_graph.without_rows()
        bounds = [cut_bound.bound, *(Bound(path) for path in self.relaxation.latest_paths(_MAX_ROW_PATHS))]
        search = RowSearch(cut_graph, Region.of_cut(cut), self.threshold * _ROUNDING, self._check_time)
        for bound in bounds:
            search.add(bound)
        unit_times = times_of_cuts(cut_graph, [cut], cut_bound.vectors)[:, 0]
        work = cut_graph.stage_work(cut_bound.bound.weights, unit_times)
        stages_to_load = np.argsort(-work, kind="stable").tolist()
        while search.prune():
            self._check_time()
            selection = search.find()
            if selection is None:
                return True
            # The selection is below the threshold on all bounds.  Refine what is known, in the order of the effort.
            times, is_exact = search.times(selection, unit_times)
            step, path = self.graph.step(times)
            previous_best_s = self.best_s
            if step >= self.threshold and not search.knows(path):
                self._add_path(path)
                search.add(Bound(path))
            elif stages_to_load:
                self._load_rows(cut_graph, bounds, cut, stages_to_load.pop(0), has_sides)
                search.update_arcs()
            elif not is_exact:
                search.price_crossings(selection)
            else:
                self._evaluate_selection(cut_graph, selection)
                if not self.best_s < previous_best_s:
                    # Without the layouts the transfers may take longer than the least.  With them the times were exact, so that
                    # nothing more can be learnt here.
                    if has_sides:
                        raise UnsettledError
                    return False
                search.threshold = self.threshold * _ROUNDING
        return True

    def _load_rows(self, cut_graph: CutGraph, bounds: Sequence[Bound], cut: Cut, stage: int, has_sides: bool) -> None:
        """Load the rows of one stage of a cut that can be in a plan below the threshold on all of ``bounds``.

        Raises:
            TooManyError: The stage has too many rows.
            UnsettledError: The deadline was over.
        """
        first, stop = cut[stage]
        wanted = []
        for bound in bounds:
            costs = [float(cost[ends]) for cost, ends in zip(cut_graph.arc_costs(bound), cut)]
            wanted.append(self._row_filter(cut_graph, bound, stage, stop, self.threshold - (sum(costs) - costs[stage])))
        self._check_time()
        cut_graph.load_rows(stage, first, stop, wanted, has_sides)

    def _row_filter(self, cut_graph: CutGraph, bound: Bound, stage: int, stop: int, room_s: float) -> RowFilter:
        """Return the filter for the rows of a stage that a bound allows.

        Args:
            cut_graph: The cut graph.
            bound: The bound.
            stage: The stage.
            stop: The unit behind the last one of the stage.
            room_s: The threshold minus the least value of all other stages.
        """
        terms, weights = cut_graph.terms, bound.weights
        if stage < cut_graph.num_stages - 1:
            crossing = weights[terms.transfer_forward][stage] + weights[terms.transfer_backward][stage]
            room_s -= float(crossing) * cut_graph.least_transfer(stage, stop)
        price = float(bound.prices[0][stage]) if bound.prices else 0.0
        forward, backward, recompute, all_reduce = (float(weights[part][stage]) for part in terms.of_stages)
        threshold = room_s + price * cut_graph.memory_share(stage)
        return RowFilter((forward, backward, recompute, all_reduce, price), threshold)

    # --------------------------------------------------------------------------------------------------------- incumbents

    def improve(self, sizes: Sequence[int]) -> None:
        """Look for plans that are better than a known one of the setting, without settling it.

        Its cut and the most promising cuts are tried, and then again, the best first, with the rows of all stages selected together
        (:mod:`.row_program`).  The longest paths that are met make other cuts promising, which are tried in turn.

        Args:
            sizes: Number of units of each stage of the known plan.

        Raises:
            UnsettledError: The deadline was over.
            StopRequestedError: A stop was requested.
        """
        num_units, weights = self.cut_graph.num_units, balance_weights(self.setting.schedule, self.setting.widths)
        if not self.setting.schedule.synchronous or not self._initialise():
            return
        self._try_cut(cut_at(np.cumsum(sizes).tolist()[:-1], num_units), weights)
        self.schedule_graph, self.is_condensed = self.explorer.schedule_graph(self.setting), False
        whole, finished = Region.whole(self.cut_graph.num_stages, num_units), set[tuple[int, ...]]()
        while True:
            region_bound = self._bound_all_cuts(whole)
            tried = sorted(self._tried_cuts.keys() - finished, key=self._tried_cuts.__getitem__)
            if not tried or self._is_settled(region_bound.least_s):
                return
            for stops in tried:
                self._check_time()
                self._try_cut(cut_at(stops[:-1], num_units), region_bound.bound.weights, is_thorough=True)
            finished.update(tried)

    def _try_promising_cuts(self, region: Region, region_bound: _RegionBound) -> None:
        """Try the even cut and the cut nearest to the best fractional one, after a local search, the one of the shorter step
        first."""
        widths, num_units = self.setting.widths, self.cut_graph.num_units
        even = np.cumsum(widths)[:-1] / sum(widths) * num_units
        starts = [cut_at(region.nearest_boundaries(ends), num_units) for ends in (even, region_bound.boundaries)]
        steps = self.graph.steps(times_of_cuts(self.cut_graph, starts, region_bound.vectors))
        for number in np.argsort(steps, kind="stable").tolist():
            improved = locally_improved(self.cut_graph, self.graph, starts[number], region_bound.vectors)
            self._try_cut(improved, region_bound.bound.weights)

    def _try_bottleneck_cut(self) -> None:
        """Try the cut whose most loaded stage has the least load, with a price of memory."""
        terms = self.cut_graph.terms
        weights = np.maximum.reduce(worker_loads(self.setting.schedule))
        prices = self.cut_graph.price_grid(weights, self._approximate_step_s())
        bound = Bound(weights, prices if self.cut_graph.has_one_stage_per_worker else prices[:1])
        _, cut = bottleneck_cut(self.cut_graph.arc_costs(bound))
        weights[terms.all_reduce] = 1.0
        if cut:
            self._try_cut(cut, weights)

    def _try_cut(self, cut: Cut, path: np.ndarray, is_thorough: bool = False) -> None:
        """Evaluate a plan with a cut, and with rows that fit and are good for a path, if such rows are found.

        A cut is tried once, and once more if the rows of all stages are to be selected together (``is_thorough``).
        """
        key = tuple(stop for _, stop in cut)
        if key in self._tried_cuts and not is_thorough:
            return
        self._tried_cuts.setdefault(key, math.inf)
        self.explorer.stop.check()
        terms, cut_graph = self.cut_graph.terms, self.cut_graph
        weights = np.maximum(np.column_stack([path[part] for part in terms.of_stages]), 1e-3)
        steps = None
        if self.setting.schedule.synchronous and self.graph.num_nodes * len(cut) < MAX_NODES // 10:
            steps = self.graph.steps
        together = (self.graph.step, self.relaxation.latest_paths(_MAX_SELECTION_PATHS)) if is_thorough else None
        fitting = fitting_rows(cut_graph, cut, weights, self._approximate_step_s(), steps, together)
        if fitting is None:
            return
        rows, times = fitting
        if self.setting.schedule.synchronous:
            # If the graph is condensed, this step is only a lower bound on that of the plan.
            step, longest = self.graph.step(times)
            self._add_path(longest)
            self._tried_cuts[key] = min(step, self._tried_cuts[key])
            if step >= self.threshold:
                return
        self._evaluate([stop - first for first, stop in cut], [row.strategies(0) for row in rows])

    def _evaluate_selection(self, cut_graph: CutGraph, selection: Selection) -> None:
        """Evaluate the plan of a selection of rows."""
        stages = [cut_graph.arcs[stage, first, stop].rows.strategies(row) for stage, first, stop, row in selection]
        self._evaluate([stop - first for _, first, stop, _ in selection], stages)

    def _evaluate(self, sizes: Sequence[int], stages: Sequence[tuple[str, Mapping[str, Strategy]]]) -> None:
        """Evaluate a plan from the layer graph; it becomes the incumbent if it fits and is better.

        Args:
            sizes: Number of units of each stage.
            stages: Per stage its way of recomputation and the strategies of its layers.
        """
        explorer = self.explorer
        evaluation = explorer.evaluation(explorer.configuration(self.setting, sizes, stages))
        self.simulated += 1
        if evaluation.memory_bytes > explorer.limit_bytes:
            return
        evaluation = with_fewer_blocks(explorer.chain, evaluation, explorer.limit_bytes, explorer.recomputations)
        cost = evaluation.cost(explorer.pricing.objective)
        if cost < self.best_s:
            self.best, self.best_s = evaluation, cost
