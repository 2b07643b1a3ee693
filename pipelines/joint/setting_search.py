"""The best plan of one setting, or that none is better than what is known: all its cuts, all ways to run their stages.

A plan is a way through a graph of cuts (:mod:`.cut_graph`) with a row for every arc on it.  Its step is the longest path of the
schedule's graph, so that *every* path is a lower bound, linear in what the stages take.  Of the paths that matter there are few,
and they are found as they are needed:

1. **All cuts together.**  A linear program over divided units (:mod:`.relaxation`) has the mean of paths, and the prices of
   memory, that bound all cuts best.  Most settings are settled by this bound.
2. **Cut by cut.**  Look for a cut that is below the threshold on all bounds known so far (:mod:`.row_search`), with what its units
   take.  There is none: the setting is settled.  Else work out its step: if that is at or above the threshold, its longest path
   joins the bounds, and this cut, with all that are like it, is out of the question.  If not, the program for this cut alone may
   bound it.
3. **Row by row.**  A cut that is left is tried, and searched through with all rows of its stages that can be of use; with that, it
   is out of the question, too.
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
from .bounds import balance, loads
from .cut_graph import Bound, CutGraph, TooManyError
from .cut_program import TOLERANCE, CutProgram
from .cut_regions import Cut, Region, least_cut, level_cut
from .evaluation import Evaluation
from .explorer import SAME, Explorer, Setting
from .fitting import fitting_rows
from .relaxation import Relaxation, UnsolvedError
from .row_search import RowSearch, Selection, TooManyStatesError
from .stage_search import RowFilter

__all__ = ["SettingSearch", "UnsettledError"]

#: Rounds of an ascent over all cuts, and over those of a region.
_ROUNDS, _FEW_ROUNDS = 40, 8
#: Runs of equal units up to which an even cut is a good one; rounds of an ascent that tell about what a plan takes.
_FEW_RUNS, _GLANCES = 4, 4
#: How near the bound has to come to what a divided cut takes, of what is missing: more would not settle anything.
_NEAR = 0.1
#: The part of the best step within which a divided cut has to be for a quick search to make a plan of it.
_WORTH = 0.97
#: Units that a cut is improved by, and the nodes of graphs that are worth it.
_MAX_MOVES, _MAX_NODES = 12, 2_000_000
#: Long paths that are held at a time.
_MAX_PATHS = 80
#: Paths that rows are wanted by.
_MAX_GUIDES = 5
#: Paths that a search for cuts is guided by.
_MAX_BOUNDS = 60
#: Sums of the same terms in another order differ by less: what is at the threshold is not below it.
ROUNDING = 1 - 1e-12


class UnsettledError(Exception):
    """The work on a setting was given up."""


@dataclass(frozen=True, eq=False)
class _RegionBound:
    """The best linear bound that was found over some cuts.

    Attributes:
        least_s: no cut is below it; infinite where none has a plan.
        bound: the mean of paths, with prices of memory.
        places: where the boundaries of the best divided cut are.
        vectors: how units are run at the bound; shape (stages, units, 5).
        divided_s: what the best divided cut takes that was met.
    """

    least_s: float
    bound: Bound
    places: np.ndarray
    vectors: np.ndarray
    divided_s: float


class SettingSearch:
    """One setting.

    Args:
        known_s: the step to be below.
        is_quick: all cuts together alone; the cut that looks best is tried where divided units take much less than ``known_s``.
    """

    def __init__(
        self, explorer: Explorer, setting: Setting, known_s: float, deadline: Deadline, is_quick: bool = False
    ):
        demand = explorer.demand(setting.schedule)
        assert demand is not None
        self.explorer, self.setting, self.deadline, self.is_quick = explorer, setting, deadline, is_quick
        condensed = explorer.condensed_graph(setting)
        self.is_condensed = condensed is not None
        self.schedule_graph = condensed or explorer.schedule_graph(setting)
        self.cut_graph = CutGraph(explorer, setting, explorer.recomputations, demand)
        homes = [[stage for _, stage in held] for held in demand.homes]
        self.relaxation = Relaxation(self.cut_graph.runs, homes, self.cut_graph.limit)
        self.simulated = 0
        self.best: Evaluation | None = None
        self.best_s = known_s
        #: No plan of the setting is below it.
        self.bound_s = 0.0
        self._tried: set[tuple[int, ...]] = set()
        self._level: np.ndarray | None = None
        #: What cuts whose rows are too many take at least.
        self._left_open_s = math.inf

    @property
    def graph(self) -> StepGraph:
        """Of the schedule, which is a synchronous one."""
        assert self.schedule_graph.graph is not None
        return self.schedule_graph.graph

    @property
    def threshold(self) -> float:
        return self.best_s * (1 - SAME)

    # -------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> None:
        """Settle it: then no plan is below :attr:`best_s`.

        Raises:
            UnsettledError: the deadline came first, or it is too large.
        """
        if self._begin():
            self._settle(Region.whole(self.cut_graph.num_stages, self.cut_graph.num_units))
        self.bound_s = self.best_s

    def _settle(self, whole: Region) -> None:
        if not self.setting.schedule.synchronous:
            self._drifting(whole)
            return
        ascent = self._of_all_cuts(whole)
        if self.is_condensed and not self.is_quick and ascent.least_s < self.threshold * ROUNDING:
            # What the short schedule leaves open is looked at as it is.
            self.schedule_graph, self.is_condensed = self.explorer.schedule_graph(self.setting), False
            ascent = self._of_all_cuts(whole)
        if ascent.least_s < self.threshold * ROUNDING:
            if self.is_quick:
                raise UnsettledError
            self._search(whole, ascent)

    def _of_all_cuts(self, whole: Region) -> _RegionBound:
        """The bound of all cuts, and a plan of the one that looks best, whatever the time is.

        Raises:
            UnsettledError: the time was over.
        """
        for path in self.schedule_graph.paths:
            self._learn(path, is_from_schedule=True)
        if self._level is not None:
            self._learn(self.graph.step(self._level)[1])
        ascent = self._sharpened(whole, self._ascend(whole, _ROUNDS))
        self.bound_s = max(self.bound_s, min(ascent.least_s, self.best_s))
        if ascent.least_s < self.threshold * ROUNDING:
            if not self.is_quick or ascent.divided_s < _WORTH * self.threshold:
                self._propose(whole, ascent)
            self._check()
        return ascent

    def _sharpened(self, region: Region, ascent: _RegionBound) -> _RegionBound:
        """The bound of a region with one way of recomputation for each stage, at the price of memory that is best for its arc,
        where every worker has one stage; else as it is."""
        if not self.cut_graph.is_alone or not ascent.least_s < self.threshold * ROUNDING:
            return ascent
        weights, (price,) = ascent.bound.weights, ascent.bound.prices
        prices = (*self.cut_graph.grid(weights, self._about_s()), price / 2, price, 2 * price)
        least_s, _ = least_cut(region.among(self.cut_graph.costs(Bound(weights, prices))))
        return replace(ascent, least_s=max(ascent.least_s, least_s))

    def level_s(self) -> float:
        """About what a plan of the setting takes, of divided units that fit; infinite where nothing was found to fit.

        Where most units are alike every stage has as many as its devices want; else a few rounds of an ascent tell.
        """
        self._begin()
        if len(self.cut_graph.runs.sizes) > _FEW_RUNS:
            return self._ascend(Region.whole(self.cut_graph.num_stages, self.cut_graph.num_units), _GLANCES).divided_s
        return math.inf if self._level is None else self.graph.step(self._level)[0]

    def _begin(self) -> bool:
        """The first paths and columns; whether there is a way to run every unit."""
        balanced = balance(self.setting.schedule, self.setting.widths)
        for path in (balanced, *loads(self.setting.schedule)):
            self._learn(path, is_from_schedule=True)
        weights = np.maximum(balanced, 1e-3)
        prices = self.cut_graph.grid(weights, self._about_s())
        for price in (*prices, 1e6 * prices[-1]):
            found = self.cut_graph.cheapest(weights, price)
            if found is None:
                return False
            self.relaxation.add_columns(found[1][:, self.relaxation.first])
            times, fits = self._divided_evenly(found[1])
            if self._level is None and fits:
                self._level = times
        return True

    def _divided_evenly(self, vectors: np.ndarray) -> tuple[np.ndarray, bool]:
        """What terms take where every stage has as many units as its devices want, in parts, that are run so; whether that fits."""
        cut_graph, terms = self.cut_graph, self.cut_graph.terms
        ends = np.concatenate([[0.0], np.cumsum(self.setting.widths)]) / sum(self.setting.widths) * cut_graph.num_units
        units = np.arange(cut_graph.num_units)
        overlap = np.minimum(ends[1:, None], units + 1) - np.maximum(ends[:-1, None], units)
        of_stages = np.einsum("su,suc->sc", np.maximum(overlap, 0.0), vectors)
        times = np.zeros(terms.count)
        for number, part in enumerate(terms.of_stages):
            times[part] = of_stages[:, number]
        places = np.clip(np.round(ends[1:-1]).astype(int), 1, cut_graph.num_units - 1)
        crossing = [cut_graph.least_transfer(boundary, unit) for boundary, unit in enumerate(places.tolist())]
        times[terms.transfer_forward] = times[terms.transfer_backward] = crossing
        most = max(sum(float(of_stages[stage, 4]) for _, stage in held) for held in cut_graph.demand.homes)
        return times, most <= cut_graph.limit

    def _about_s(self) -> float:
        """Seconds that a step may take."""
        if math.isfinite(self.best_s):
            return self.best_s
        return float(self.cut_graph.quick(Bound(np.maximum.reduce(loads(self.setting.schedule))), 0.0, (0.0,)))

    def _drifting(self, whole: Region) -> None:
        """An asynchronous schedule's period is no longest path: bounded by what its workers put through, and tried.

        Raises:
            UnsettledError: its bound is below the threshold, whatever was tried.
        """
        ascent = self._ascend(whole, _FEW_ROUNDS)
        self.bound_s = min(ascent.least_s, self.best_s)
        if self.bound_s < self.threshold:
            self._try(ends_of(whole.nearest(ascent.places), self.cut_graph.num_units), ascent.bound.weights)
            self._try_level()
            if self.bound_s < self.threshold:
                raise UnsettledError

    def _check(self) -> None:
        """Whether to go on.

        Raises:
            StopRequestedError, UnsettledError
        """
        self.explorer.stop.check()
        if self.deadline.is_over:
            raise UnsettledError

    def _learn(self, path: np.ndarray, is_from_schedule: bool = False) -> bool:
        """Take a path in; whether it is a new one."""
        if (self.relaxation.paths == path).all(axis=1).any():
            return False
        self.relaxation.add_path(path)
        if not is_from_schedule:
            self.schedule_graph.remember(path)
        if len(self.relaxation.paths) > _MAX_PATHS:
            self.relaxation.forget(_MAX_PATHS // 2)
        return True

    # ------------------------------------------------------------------------------------------------ all cuts together

    def _ascend(self, region: Region, rounds: int) -> _RegionBound:
        """Take in longest paths, and ways to run units, until the bound of all cuts of a region is at the threshold or gets no
        higher, or the time is over.

        Raises:
            UnsettledError: the program was not solved.
        """
        cut_graph, relaxation = self.cut_graph, self.relaxation
        nothing = _RegionBound(math.inf, Bound(relaxation.paths[0]), np.zeros(0), np.zeros(0), math.inf)
        best: _RegionBound | None = None
        middle_s, middle = math.inf, self._level
        for _ in range(rounds):
            self.explorer.stop.check()
            if best is not None and self.deadline.is_over:
                break
            try:
                relaxed = relaxation.solve(region.ranges)
            except UnsolvedError as error:
                raise UnsettledError from error
            if relaxed is None:
                return nothing
            bound = Bound(relaxed.shares @ relaxation.paths, (relaxed.price,))
            found = cut_graph.cheapest(bound.weights, relaxed.price)
            assert found is not None
            values, vectors = found
            least_s = cut_graph.least_of_region(bound, values, region.ranges)
            if best is None or least_s > best.least_s:
                best = _RegionBound(least_s, bound, relaxed.places, vectors, middle_s)
            if least_s >= self.threshold * ROUNDING:
                return best
            reduced = relaxation.reduced(values[:, relaxation.first]) + 1e-9 * relaxed.step_s
            is_new = relaxation.add_columns(vectors[:, relaxation.first], reduced)
            if not self.setting.schedule.synchronous:
                if not is_new:
                    break
                continue
            # Halfway to the best divided cut so far, too: the best one of the program alone swings from one extreme to another.
            middle = relaxed.times if middle is None else middle
            for times in ((relaxed.times + middle) / 2, relaxed.times):
                step, path = self.graph.step(times)
                is_new |= self._learn(path)
                if step < middle_s:
                    middle_s, middle = step, times
            if not is_new or middle_s - best.least_s < _NEAR * (self.threshold - middle_s):
                break
        assert best is not None
        return replace(best, divided_s=middle_s)

    def _unit_times(self, cuts: Sequence[Cut], vectors: np.ndarray) -> np.ndarray:
        """What every term takes at least on cuts where units are run so (shape (stages, units, 5)); shape (terms, cuts)."""
        cut_graph, terms = self.cut_graph, self.cut_graph.terms
        sums = np.concatenate([np.zeros((cut_graph.num_stages, 1, 5)), np.cumsum(vectors, axis=1)], axis=1)
        ends, stages = np.array(cuts), np.arange(cut_graph.num_stages)
        of_stages = sums[stages, ends[:, :, 1]] - sums[stages, ends[:, :, 0]]
        times = np.zeros((terms.count, len(cuts)))
        for number, part in enumerate(terms.of_stages):
            times[part] = of_stages[:, :, number].T
        for boundary in stages[1:] - 1:
            transfer = cut_graph.least_transfers_at(boundary)[ends[:, boundary, 1]]
            times[terms.transfer_forward.start + boundary] = transfer
            times[terms.transfer_backward.start + boundary] = transfer
        return times

    # ------------------------------------------------------------------------------------------------------ cut by cut

    def _search(self, whole: Region, ascent: _RegionBound) -> None:
        """Search all cuts through, those that the bounds let take the least first.

        Raises:
            UnsettledError
        """
        cuts = CutProgram(self.cut_graph)
        for bound in self._bounds(ascent):
            cuts.add(bound)
        queue = [(self.bound_s, 0, whole)]
        number = 0
        while queue and queue[0][0] < self.threshold * ROUNDING:
            self._check()
            self.bound_s = max(self.bound_s, min(queue[0][0], self._left_open_s, self.best_s))
            _, _, region = heapq.heappop(queue)
            try:
                solved = cuts.solve(region, self.threshold, self.deadline.left_s)
            except TimeoutError:
                raise UnsettledError from None
            if solved is None:
                continue
            least_s, cut = solved
            for part in self._narrowed(cuts, region, cut, ascent):
                number += 1
                heapq.heappush(queue, (least_s, number, part))
        if self._left_open_s < self.threshold * ROUNDING:
            self.bound_s = max(self.bound_s, self._left_open_s)
            raise UnsettledError

    def _narrowed(self, cuts: CutProgram, region: Region, cut: Cut, ascent: _RegionBound) -> list[Region]:
        """Learn of a cut that is below the threshold in all bounds; what of the region is left to be searched."""
        step, path = self.graph.step(self._unit_times([cut], ascent.vectors)[:, 0])
        if step >= self.threshold and not cuts.knows(path):
            self._learn(path)
            cuts.add(Bound(path))
            return [region]
        own = self._sharpened(Region.only(cut), self._ascend(Region.only(cut), _FEW_ROUNDS))
        if own.least_s < self.threshold * ROUNDING:
            try:
                self._settle_cut(cut, own)
            except (TooManyError, TooManyStatesError):
                self._left_open_s = min(self._left_open_s, own.least_s)
        elif math.isfinite(own.least_s):
            cuts.add(own.bound)
            if cuts.value(-1, cut) >= self.threshold * (1 + 2 * TOLERANCE):
                return [region]
        return region.without(cut)

    def _bounds(self, ascent: _RegionBound) -> list[Bound]:
        """What a search for cuts is guided by: the best bound, at more and less memory, and the paths that are in it."""
        (price,), mean = ascent.bound.prices, ascent.bound.weights
        grid = self.cut_graph.grid(mean, self._about_s())
        found = [ascent.bound, *(Bound(mean, (one,)) for one in (*grid, price / 2, 2 * price))]
        return found + [Bound(path) for path in self.relaxation.latest(_MAX_BOUNDS)]

    # ------------------------------------------------------------------------------------------------------ row by row

    def _settle_cut(self, cut: Cut, ascent: _RegionBound) -> None:
        """Find the best plan of one cut, if one is below the threshold.

        Raises:
            UnsettledError, TooManyError, TooManyStatesError
        """
        self._try(cut, ascent.bound.weights)
        # Of all layouts at the sides together there are fewer rows; that mostly does.
        if not self._is_settled_by_rows(cut, ascent, has_sides=False):
            self._is_settled_by_rows(cut, ascent, has_sides=True)

    def _is_settled_by_rows(self, cut: Cut, ascent: _RegionBound, has_sides: bool) -> bool:
        """Whether a search through rows of a cut's stages tells that no plan is below the threshold, or the best one was found; it
        may not without the layouts at the sides.

        The rows are those that can be of use, worked out stage by stage, where a second counts most first, until that is enough.
        """
        cut_graph = self.cut_graph.again()
        bounds = [ascent.bound, *(Bound(path) for path in self.relaxation.latest(_MAX_GUIDES))]
        ways = RowSearch(cut_graph, Region.only(cut), self.threshold * ROUNDING, self._check)
        for bound in bounds:
            ways.add(bound)
        busy = cut_graph.work(ascent.bound.weights, self._unit_times([cut], ascent.vectors)[:, 0])
        lacking = np.argsort(-busy, kind="stable").tolist()
        while ways.is_open():
            self._check()
            way = ways.find()
            if way is None:
                return True
            times, is_exact = ways.times(way, self._unit_times([cut], ascent.vectors)[:, 0])
            step, path = self.graph.step(times)
            before = self.best_s
            if step >= self.threshold and not ways.knows(path):
                self._learn(path)
                ways.add(Bound(path))
            elif lacking:
                self._load(cut_graph, bounds, cut, lacking.pop(0), has_sides)
                ways.renew()
            elif not is_exact:
                ways.work_out_crossings(way)
            else:
                self._found(cut_graph, way)
                if not self.best_s < before:
                    if has_sides:
                        raise UnsettledError
                    return False
                ways.threshold = self.threshold * ROUNDING
        return True

    def _load(self, cut_graph: CutGraph, bounds: Sequence[Bound], cut: Cut, stage: int, has_sides: bool) -> None:
        """Work out the rows of one stage of a cut.

        Raises:
            TooManyError, UnsettledError
        """
        costs = [[float(cost[ends]) for cost, ends in zip(cut_graph.costs(bound), cut)] for bound in bounds]
        first, stop = cut[stage]
        rooms = [self.threshold - (sum(of_stages) - of_stages[stage]) for of_stages in costs]
        wanted = [self._wanted(cut_graph, bound, stage, stop, room) for bound, room in zip(bounds, rooms)]
        self._check()
        cut_graph.load(stage, first, stop, wanted, cut_graph.limit, has_sides)

    def _wanted(self, cut_graph: CutGraph, bound: Bound, stage: int, stop: int, room: float) -> RowFilter:
        """What rows of a stage have to be within, where a bound leaves so much room for it."""
        terms, weights = cut_graph.terms, bound.weights
        if stage < cut_graph.num_stages - 1:
            crossing = weights[terms.transfer_forward][stage] + weights[terms.transfer_backward][stage]
            room -= float(crossing) * cut_graph.least_transfer(stage, stop)
        price = float(bound.prices[0][stage]) if bound.prices else 0.0
        parts = terms.of_stages
        own = tuple(float(weights[part][stage]) for part in parts)
        return RowFilter((*own, price), room + price * cut_graph.share(stage))  # type: ignore[arg-type]

    # ---------------------------------------------------------------------------------------------------------- plans

    def _propose(self, region: Region, ascent: _RegionBound) -> None:
        """Try what looks best: the even cut, and the one near the best divided cut; each moved to where it takes the least."""
        widths, num_units = self.setting.widths, self.cut_graph.num_units
        even = np.cumsum(widths)[:-1] / sum(widths) * num_units
        near = [ends_of(region.nearest(places), num_units) for places in (even, ascent.places)]
        steps = self.graph.steps(self._unit_times(near, ascent.vectors))
        for place in np.argsort(steps, kind="stable").tolist():
            self._try(self._improved(near[place], ascent.vectors), ascent.bound.weights)

    def _improved(self, cut: Cut, vectors: np.ndarray) -> Cut:
        """A cut from which no unit that goes from one stage to another makes the step shorter; of many stages to the next one."""
        stages = self.cut_graph.num_stages
        pairs = [(giver, taker) for giver in range(stages) for taker in range(stages) if giver != taker]
        if len(pairs) * self.graph.num_nodes > _MAX_NODES:
            pairs = [(giver, taker) for giver, taker in pairs if abs(giver - taker) == 1]
        best_s = float(self.graph.steps(self._unit_times([cut], vectors))[0])
        sizes = np.array([stop - first for first, stop in cut])
        for _ in range(max(1, min(_MAX_MOVES, 4 * _MAX_NODES // (len(pairs) * self.graph.num_nodes + 1)))):
            units = np.eye(stages, dtype=int)
            moved = [sizes - units[giver] + units[taker] for giver, taker in pairs if sizes[giver] > 1]
            if not moved:
                break
            stops = np.cumsum(moved, axis=1)
            cuts = np.stack([stops - moved, stops], axis=2)
            steps = self.graph.steps(self._unit_times(cuts.tolist(), vectors))
            least = int(steps.argmin())
            if steps[least] >= best_s * (1 - SAME):
                break
            best_s, sizes = float(steps[least]), np.array(moved[least])
        return ends_of(np.cumsum(sizes).tolist()[:-1], self.cut_graph.num_units)

    def _try_level(self) -> None:
        """Try the cut whose most loaded stage has the least to do, memory at a price."""
        terms = self.cut_graph.terms
        weights = np.maximum.reduce(loads(self.setting.schedule))
        prices = self.cut_graph.grid(weights, self._about_s())
        _, cut = level_cut(self.cut_graph.costs(Bound(weights, prices if self.cut_graph.is_alone else prices[:1])))
        weights[terms.all_reduce] = 1.0
        if cut:
            self._try(cut, weights)

    def _try(self, cut: Cut, path: np.ndarray) -> None:
        """A plan with a cut, rows that are good on a path for its stages, if they fit."""
        key = tuple(stop for _, stop in cut)
        if key in self._tried:
            return
        self._tried.add(key)
        self.explorer.stop.check()
        terms, cut_graph = self.cut_graph.terms, self.cut_graph
        parts = terms.of_stages
        weights = np.maximum(np.column_stack([path[part] for part in parts]), 1e-3)
        steps = None
        if self.setting.schedule.synchronous and self.graph.num_nodes * len(cut) < _MAX_NODES // 10:
            steps = self.graph.steps
        found = fitting_rows(cut_graph, cut, weights, self._about_s(), steps)
        if found is None:
            return
        rows, times = found
        if self.setting.schedule.synchronous:
            step, longest = self.graph.step(times)
            self._learn(longest)
            if step >= self.threshold:
                return
            # The graph of a long schedule may be that of a short one, whose step is a bound.
        self._consider([stop - first for first, stop in cut], [row.strategies(0) for row in rows])

    def _found(self, cut_graph: CutGraph, way: Selection) -> None:
        """A way of which everything is known is below the threshold: the best plan so far, if all its layouts are."""
        chosen = [cut_graph.arcs[stage, first, stop].rows.strategies(row) for stage, first, stop, row in way]
        self._consider([stop - first for _, first, stop, _ in way], chosen)

    def _consider(self, cut: Sequence[int], chosen: Sequence[tuple[str, Mapping[str, Strategy]]]) -> None:
        """A plan, with all its figures from the layer graph."""
        found = self.explorer.evaluation(self.explorer.configuration(self.setting, cut, chosen))
        self.simulated += 1
        cost = found.cost(self.explorer.pricing.objective)
        if found.memory_bytes <= self.explorer.limit_bytes and cost < self.best_s:
            self.best, self.best_s = found, cost


def ends_of(places: Sequence[int], num_units: int) -> Cut:
    """The cut whose boundaries are before these units."""
    return list(zip((0, *places), (*places, num_units)))
