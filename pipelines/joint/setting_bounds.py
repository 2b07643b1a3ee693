"""Linear lower bounds on the plans of one setting, over all cuts of a region or at one point.

Every path P of the schedule's graph is a lower bound on the step that is linear in the seconds t of all terms
(:mod:`autoddl.pipelines.stepgraph`).  So is every mean of paths, with shares lambda(P) that are not negative and sum to 1, also if
bytes beyond the limit have prices mu(w) >= 0:

    bound(t)  =  sum over P, k of lambda(P) n(P, k) t(k)  +  sum over w of mu(w) (bytes(w) - limit)

is at most step(t) for every plan that fits.  The exchange of gradients by the first and the last stage counts by the bytes of both,
with weights of the program.  A linear bound is a sum over stages.  With free redistributions it is a sum over units, so that
dynamic programming finds its least value over all cuts and all ways to run units.  There are many paths, but only few matter.
They are found as they are needed: the longest path at some times t is the bound that is exact at t.

The linear program of :mod:`.relaxation` finds the shares and prices whose bound is best.  It generates paths (cutting planes) and
ways to run units (columns) until the bound reaches the threshold or rises no more:

-   *over a region* of cuts, its solution is the best fractional cut (:meth:`SettingBounds.of_region`);
-   *at a point*, which has given boundaries that may be fractional, the program's optimum is a convex function of the boundaries,
    and the bound is a plane below it that touches it there (:meth:`SettingBounds.at`).

A simpler graph, whose steps are lower bounds, stands for that of a schedule until :meth:`SettingBounds.use_whole_schedule` is
called, if there is one (:meth:`.explorer.Explorer.simpler_graph`).  The period of an asynchronous schedule is not a longest path.
It is bounded by the loads of the workers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoddl.costmodel.stopping import Deadline

from ..pumping import PumpedGraph
from ..stepgraph import StepGraph
from .bounds import Bound, balance_weights, worker_loads, worker_paths
from .cut_graph import CutGraph
from .cut_regions import Cut, Region, cheapest_cut
from .cut_times import times_of_even_cut
from .explorer import Explorer, Setting
from .incumbent import Incumbent
from .linear_program import UnsolvedError
from .relaxation import NO_LIMITS, Relaxation, Relaxed

__all__ = ["MAX_CUT_ROUNDS", "MAX_ROUNDS", "FractionalCut", "RegionBound", "SettingBounds", "UnsettledError"]

#: Largest number of linear programs that are solved for the bound of all cuts, and of one cut.
MAX_ROUNDS, MAX_CUT_ROUNDS = 40, 8
#: The bound of a region is not raised further if its distance from the step of the best fractional cut is less than this part of
#: the distance from there to the threshold: it would stay below the threshold.
_CLOSE = 0.1
#: The same part in a quick search, which leaves the rest to a later one.
_CLOSE_IF_QUICK = 0.4
#: How far from the best fractional cut so far to the program's solution the points are whose longest paths are added.
_STEPS = (0.1, 0.3, 0.6, 1.0)
#: Largest number of paths in the linear program over all cuts.
_MAX_PATHS = 80


class UnsettledError(Exception):
    """The search ended before the setting was settled."""


@dataclass(frozen=True, eq=False)
class RegionBound:
    """The best known linear bound over the cuts of a region.

    Attributes:
        least_s: No plan with a cut of the region is below it; infinite if the region has no plan.
        bound: The mean of paths, with prices of memory.
        boundaries: Boundaries of the best fractional cut, in units; shape (stages - 1,).
        vectors: The cheapest way to run each unit at the bound (:meth:`.cut_graph.CutGraph.cheapest_units`); shape (stages, units,
            6).
        fractional_s: The least step of a fractional cut that was met.
        is_cut_short: Whether the deadline ended the search for a better bound.
    """

    least_s: float
    bound: Bound
    boundaries: np.ndarray
    vectors: np.ndarray
    fractional_s: float
    is_cut_short: bool = False


@dataclass
class FractionalCut:
    """The best fractional cut that was met.

    Attributes:
        step_s: Its step; infinite if it is not known.
        times: Seconds of each term, in the order of :class:`autoddl.pipelines.stepgraph.Terms`; None if no cut was met.
    """

    step_s: float = math.inf
    times: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class _Mean:
    """A mean of paths with prices of memory: the dual values of a solution of the linear program.

    Attributes:
        bound: The mean.
        relaxed: The solution.
        costs, vectors: What each unit costs in the mean at each stage, and how it is run then
            (:meth:`.cut_graph.CutGraph.cheapest_units`).
    """

    bound: Bound
    relaxed: Relaxed
    costs: np.ndarray
    vectors: np.ndarray


class SettingBounds:
    """Linear lower bounds of one setting.

    Args:
        explorer: Searches of stages, and schedules, that all settings share.
        setting: The setting; its schedule has a memory demand.
        incumbent: Bounds are raised until they reach it.

    Attributes:
        cut_graph: The arcs of the setting.
        relaxation: The linear program.
        is_simpler: Whether a simpler graph stands for that of the setting's schedule (:meth:`.explorer.Explorer.simpler_graph`).
        even_times: Times of the even fractional cut with its units run so that they fit; None if it does not fit.
        deadline: When the search is given up.
        is_quick: Whether bounds that are nearly as good as they get are not raised further.
        max_paths: Largest number of paths in the linear program.
    """

    def __init__(self, explorer: Explorer, setting: Setting, incumbent: Incumbent):
        demand = explorer.memory_demand(setting.schedule)
        assert demand is not None
        self.explorer, self.setting, self.incumbent = explorer, setting, incumbent
        simpler = explorer.simpler_graph(setting)
        self.is_simpler = simpler is not None
        self.schedule_graph = simpler or explorer.schedule_graph(setting)
        self.cut_graph = CutGraph(explorer, setting, explorer.recomputations, demand)
        stages_of_workers = [[stage for _, stage in held] for held in demand.homes]
        self.relaxation = Relaxation(
            self.cut_graph.runs,
            stages_of_workers,
            self.cut_graph.limit_bytes,
            self.cut_graph.fixed_times,
            self.cut_graph.exchange[1],
        )
        self.even_times: np.ndarray | None = None
        self.deadline, self.is_quick, self.max_paths = Deadline(), False, _MAX_PATHS

    @property
    def graph(self) -> StepGraph | PumpedGraph:
        """The graph of the schedule, which must be synchronous."""
        assert self.schedule_graph.graph is not None
        return self.schedule_graph.graph

    @property
    def is_rough(self) -> bool:
        """Whether the graph is a condensed one that misses the waiting of workers for each other while a schedule repeats."""
        return self.schedule_graph.is_rough

    @property
    def whole_region(self) -> Region:
        """The region of all cuts."""
        return Region.whole(self.cut_graph.num_stages, self.cut_graph.num_units)

    def use_whole_schedule(self) -> None:
        """Use the graph of the setting's own schedule from now on."""
        self.schedule_graph, self.is_simpler = self.explorer.schedule_graph(self.setting), False

    def tighten(self) -> None:
        """Let redistributions inside units count from now on."""
        self.cut_graph.is_tight = True
        self._set_first_columns()

    # ------------------------------------------------------------------------------------------------- paths and columns

    def initialise(self) -> bool:
        """Add the first paths and columns; return whether every unit can be run.

        The paths are the balance bound and the workers' loads, with fill and drain if the schedule is synchronous.  The columns
        are the cheapest ways to run units at several prices of memory, the last of which counts memory alone.
        """
        balanced = balance_weights(self.setting.schedule, self.setting.widths)
        spec = self.setting.schedule
        for path in (balanced, *(worker_paths(spec) if spec.synchronous else worker_loads(spec))):
            self.add_path(path, is_from_schedule=True)
        return self._set_first_columns()

    def _set_first_columns(self) -> bool:
        """Replace all columns by the first ones; return whether every unit can be run."""
        weights = np.maximum(balance_weights(self.setting.schedule, self.setting.widths), 1e-3)
        prices = self.cut_graph.price_grid(weights, self.approximate_step_s())
        cheapest = self.cut_graph.cheapest_units(weights, np.stack([*prices, 1e6 * prices[-1]]))
        if cheapest is None:
            return False
        self.relaxation.drop_columns()
        self.even_times = None
        first = self.relaxation.first
        self.relaxation.add_columns(cheapest[1][-1][:, first], stay=True)
        for vectors in cheapest[1]:
            self.relaxation.add_columns(vectors[:, first])
            times, fits = times_of_even_cut(self.cut_graph, vectors)
            if self.even_times is None and fits:
                self.even_times = times + self.cut_graph.fixed_times
        return True

    def approximate_step_s(self) -> float:
        """Return about how many seconds a step takes, to scale prices of memory."""
        if math.isfinite(self.incumbent.best_s):
            return self.incumbent.best_s
        loads = Bound(np.maximum.reduce(worker_loads(self.setting.schedule)))
        return float(self.cut_graph.least_over_all_cuts(loads, 0.0, (0.0,)))

    def add_path(self, path: np.ndarray, is_from_schedule: bool = False) -> bool:
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
        if len(self.relaxation.paths) > self.max_paths:
            self.relaxation.drop_paths(self.max_paths // 2)
        return True

    def add_known_paths(self) -> None:
        """Add the longest paths of other settings of the schedule, and of the even cut."""
        for path in self.schedule_graph.paths:
            self.add_path(path, is_from_schedule=True)
        if self.even_times is not None:
            self.add_path(self.graph.step(self.even_times)[1])

    # ------------------------------------------------------------------------------------------------------------ bounds

    def is_settled_by_known_bounds(self) -> bool:
        """Return whether the best bound of another setting of the schedule settles this one, which is cheap to find out."""
        whole = self.whole_region
        for bound in self.schedule_graph.bounds:
            costs = self.cut_graph.least_of_units(bound.weights, bound.prices[0], bound.exchange)
            if costs is None or self.incumbent.is_reached_by(
                self.cut_graph.least_in_region(bound, costs, whole.ranges)
            ):
                return True
        return False

    def remember(self, region_bound: RegionBound) -> None:
        """Keep a bound for other settings of the schedule."""
        if region_bound.bound.prices:
            self.schedule_graph.remember_bound(region_bound.bound)

    def of_path(self, path: np.ndarray, mean: Bound) -> Bound:
        """Return the bound of a path alone, whose exchange counts by the bytes of both stages in the same ratio as in a mean."""
        first, last = mean.exchange or (0.0, 0.0)
        if not first + last:
            return Bound(path)
        count = float(path[self.cut_graph.terms.all_reduce][[0, -1]].sum()) / (first + last)
        return Bound(path, exchange=(count * first, count * last))

    def of_region(self, region: Region, max_rounds: int) -> RegionBound:
        """Return the best linear bound over the cuts of a region: it settles the region, rises no more, or the time is over.

        Raises:
            UnsettledError: A linear program was not solved.
        """
        ranges = region.ranges
        return self._raised(
            ranges, max_rounds, lambda bound, costs: self.cut_graph.least_in_region(bound, costs, ranges)
        )

    def of_cut(self, cut: Cut) -> RegionBound:
        """Return the best linear bound of one cut, by the costs of its arcs too; raises as :meth:`of_region`."""
        only = Region.of_cut(cut)
        return self.sharpened(only, self.of_region(only, MAX_CUT_ROUNDS))

    def at(self, boundaries: Sequence[float]) -> Bound | None:
        """Return the best linear bound at a point, which holds for all cuts; None if there are no ways to run the units that fit.

        Args:
            boundaries: The number of units before each boundary, which may be fractional.

        Raises:
            UnsettledError: A linear program was not solved.
        """
        counts = self.cut_graph.runs.counts_at(boundaries)
        ranges = tuple((boundary, boundary) for boundary in boundaries)
        raised = self._raised(
            ranges, MAX_CUT_ROUNDS, lambda bound, costs: self.cut_graph.value_at(bound, costs, counts)
        )
        return raised.bound if math.isfinite(raised.least_s) else None

    def _raised(
        self,
        ranges: Sequence[tuple[float, float]],
        max_rounds: int,
        least_of: Callable[[Bound, np.ndarray], float],
    ) -> RegionBound:
        """Solve the linear program again and again, with new paths and columns each time; arguments as :meth:`of_region`.

        Args:
            ranges: Least and largest number of units before each boundary.
            max_rounds: Largest number of programs.
            least_of: The least value of a bound within the ranges, from the bound and from what units cost in it at least.
        """
        incumbent = self.incumbent
        infeasible = RegionBound(math.inf, Bound(self.relaxation.paths[0]), np.zeros(0), np.zeros(0), math.inf)
        best: RegionBound | None = None
        center = FractionalCut(times=self.even_times)
        is_cut_short = False
        for _ in range(max_rounds):
            if best is not None and self.deadline.is_over:
                is_cut_short = True
                break  # the bound so far holds
            mean = self._mean(ranges)
            if mean is None:
                return infeasible
            least_s = least_of(mean.bound, mean.costs)
            if best is None or least_s > best.least_s:
                best = RegionBound(least_s, mean.bound, mean.relaxed.boundaries, mean.vectors, center.step_s)
            if incumbent.is_reached_by(least_s):
                return best
            is_new = self._extend(mean, center)
            close = _CLOSE_IF_QUICK if self.is_quick else _CLOSE
            is_close = center.step_s - best.least_s < close * (incumbent.threshold - center.step_s)
            if not is_new or (self.setting.schedule.synchronous and is_close):
                break
        assert best is not None
        return replace(best, fractional_s=center.step_s, is_cut_short=is_cut_short)

    def mean_over(
        self, region: Region, totals: Mapping[tuple[int, ...], tuple[int, int]], center: FractionalCut
    ) -> tuple[Bound, np.ndarray] | None:
        """Return the best mean of the known paths for a region of cuts, and add paths and columns for a better one.

        Args:
            region: The region.
            totals: Least and largest number of units of some sets of stages.
            center: The best fractional cut of the region so far; it is replaced by a better one.

        Returns:
            The mean, which holds for all cuts, and what units cost in it, shape (stages, units); None if no fractional cut of the
            region fits the memory limit.

        Raises:
            UnsettledError: A linear program was not solved.
        """
        mean = self._mean(region.ranges, region.sizes, totals)
        if mean is None:
            return None
        self._extend(mean, center)
        return mean.bound, mean.costs

    def _mean(
        self,
        ranges: Sequence[tuple[float, float]],
        sizes: Mapping[int, tuple[int, int]] = NO_LIMITS,
        totals: Mapping[tuple[int, ...], tuple[int, int]] = NO_LIMITS,
    ) -> _Mean | None:
        """Solve the linear program; its dual values are the best mean of the known paths.  None if the program has no solution;
        arguments as those of :meth:`.relaxation.Relaxation.solve`.

        Raises:
            UnsettledError: The program was not solved.
        """
        self.explorer.stop.check()
        try:
            relaxed = self.relaxation.solve(ranges, sizes, totals)
        except UnsolvedError as error:
            raise UnsettledError from error
        if relaxed is None:
            return None
        bound = Bound(relaxed.shares @ self.relaxation.paths, (relaxed.price,), relaxed.exchange)
        cheapest = self.cut_graph.cheapest_units(bound.weights, relaxed.price, bound.exchange)
        assert cheapest is not None
        return _Mean(bound, relaxed, *cheapest)

    def _extend(self, mean: _Mean, center: FractionalCut) -> bool:
        """Add what the latest solution of the linear program lacks: columns of negative reduced cost, and longest paths.

        Args:
            mean: The solution.
            center: The best fractional cut so far; it is replaced by a better one.

        Returns:
            Whether a column or a path is new.
        """
        relaxation, relaxed = self.relaxation, mean.relaxed
        reduced_costs = relaxation.reduced_costs(mean.costs[:, relaxation.first]) + 1e-9 * relaxed.step_s
        is_new = relaxation.add_columns(mean.vectors[:, relaxation.first], reduced_costs)
        if not self.setting.schedule.synchronous:
            return is_new
        # The longest paths at the program's solution, and between it and the best fractional cut so far: the solutions alone swing
        # from one extreme to another.
        points = relaxed.times[None]
        if center.times is not None:
            points = center.times + np.multiply.outer(_STEPS, relaxed.times - center.times)
        for times, (step, path) in zip(points, self.graph.longest_paths(points)):
            is_new |= self.add_path(path)
            if step < center.step_s:
                center.step_s, center.times = step, times
        return is_new

    def sharpened(self, region: Region, region_bound: RegionBound) -> RegionBound:
        """Raise the bound of a region by the costs of arcs, if each worker has one stage.

        An arc has one way of recomputation for all its units, and counts with the price of memory at which it costs the most.
        """
        if not self.cut_graph.has_one_stage_per_worker or self.incumbent.is_reached_by(region_bound.least_s):
            return region_bound
        best = region_bound.bound
        weights, (price,) = best.weights, best.prices
        prices = (*self.cut_graph.price_grid(weights, self.approximate_step_s()), price / 2, price, 2 * price)
        least_s, _ = cheapest_cut(region.restrict(self.cut_graph.arc_costs(replace(best, prices=prices))))
        return replace(region_bound, least_s=max(region_bound.least_s, least_s + self.cut_graph.fixed_seconds(weights)))
