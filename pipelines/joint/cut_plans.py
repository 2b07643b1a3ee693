"""The plans of one cut: phase 3 of the search of a setting (:mod:`.setting_search`).

The rows of the stages are loaded one stage after the other, first of the stage whose seconds count most, until no selection of rows
is below the threshold on all bounds.  What is loaded becomes more precise where a selection needs it:

1.  At first a stage takes what its units take at least.
2.  Its rows do not distinguish the layouts at its sides, so that there are fewer of them, and transfers count as the least.
3.  Many rows are coarse (:mod:`.arc_rows`) until a selection is below the threshold only because of that.
4.  Where the transfers of a selection take longer than the least, the rows beside the boundary are loaded with their layouts.

A selection of known rows and transfers is a plan.  If it is better than the incumbent, the search goes on below it.  If it is much
better, the rows are loaded again: many of them are of no use any more.
"""

from __future__ import annotations

import math

import numpy as np

from autoddl.costmodel.stopping import Deadline
from autoddl.search.dominance import TooManyError

from .arc_rows import coarse, load_rows
from .bounds import Bound
from .cut_regions import Cut, Region
from .cut_times import times_of_cuts
from .cut_trials import CutTrials
from .evaluation import Evaluation
from .explorer import RELATIVE_TOLERANCE
from .row_search import RowSearch, Selection
from .setting_bounds import RegionBound, SettingBounds, UnsettledError
from .stage_search import RowFilter

__all__ = ["CutPlans"]

#: Least seconds of the integer program of rows, if the time is nearly over.
_LEAST_PROGRAM_S = 1.0
#: Largest number of selections of rows that are found below the threshold because transfers count as the least.
_MAX_INEXACT_SELECTIONS = 20
#: Largest number of known paths that restrict the rows of a stage.
_MAX_ROW_PATHS = 5
#: If the threshold is above the bound of the cut by more than this part, plans below these parts of the distance come first.
_FAR, _PARTS = 3e-4, (0.2, 0.45)
#: Rows are loaded again when the threshold is above the bound of the cut by less than this part of what it was.
_MUCH_LESS = 0.7
#: Least price of a byte by which rows are compared, in steps per memory limit.
_LEAST_PRICE = 0.01
#: Factors of the seconds of a stage at which the longest paths restrict its rows.
_SLOWER = (1.25, 2.0)


class CutPlans:
    """The plans of one cut that are below the incumbent.

    Args:
        bounds: The bounds of the setting; the longest paths that are met are added.
        trials: Evaluates plans.
        cut: The cut.
        cut_bound: The linear bound of this cut alone.
        limit: When the solver's time for the rows is over; None for when that of the setting is.

    Attributes:
        least_s: No plan of the cut is below it; infinite if none is below the incumbent.
    """

    def __init__(
        self,
        bounds: SettingBounds,
        trials: CutTrials,
        cut: Cut,
        cut_bound: RegionBound,
        limit: Deadline | None = None,
    ):
        self.bounds, self.trials, self.cut, self.mean = bounds, trials, cut, cut_bound.bound
        self.incumbent, self.stop = bounds.incumbent, bounds.explorer.stop
        self.limit = limit or Deadline()
        self.cut_graph = bounds.cut_graph.without_rows()
        self.least_s = cut_bound.least_s
        known = (bounds.of_path(path, self.mean) for path in bounds.relaxation.latest_paths(_MAX_ROW_PATHS))
        self._first_bounds = [self.mean, *known]
        #: The search for selections below the current threshold.
        self.search: RowSearch
        #: The least seconds of every term by units.
        self._unit_times = times_of_cuts(self.cut_graph, [cut], cut_bound.vectors)[:, 0]
        work = self.cut_graph.stage_work(self.mean.weights, self._unit_times)
        #: The stages, the one whose seconds count most first.
        self._by_work: list[int] = np.argsort(-work, kind="stable").tolist()
        #: The stages whose rows have layouts, or would have too many rows with them.
        self._with_layouts: set[int] = set()

    def _search_below(self, threshold: float) -> RowSearch:
        """Return a search for selections below a threshold, with no rows loaded."""
        search = RowSearch(
            self.cut_graph,
            Region.of_cut(self.cut),
            threshold,
            self.stop.check,
            lambda: max(min(self.limit.left_s, self.bounds.deadline.left_s), _LEAST_PROGRAM_S),
        )
        self.cut_graph.arcs.clear()
        for bound in self._first_bounds:
            search.add(bound)
        return search

    def settle(self) -> None:
        """Search the plans of the cut; those below the incumbent become the incumbent.

        Where the incumbent is far above the bound of the cut, plans near the bound are searched first: they have few rows.  What is
        known of rows is lost when the search is resumed, so that a deadline does not end this.

        Afterwards no plan of the cut is below :attr:`least_s`, also if there is an exception.

        Raises:
            StopRequestedError: A stop was requested.
            UnsettledError: The best selection is no better than the incumbent, or the solver found none in its time.
            TooManyError: A stage has too many rows.
            TooManyStatesError: There are too many selections of rows.
        """
        most_s = self.incumbent.exact_threshold
        room_s = most_s - self.least_s
        for part in _PARTS if room_s > _FAR * most_s else ():
            threshold = most_s - (1 - part) * room_s
            if threshold < self.incumbent.exact_threshold:
                self._settle_below(threshold)
        if not self.incumbent.is_reached_by(self.least_s):
            self._settle_below(self.incumbent.exact_threshold)

    def _settle_below(self, threshold: float) -> None:
        """Search the plans of the cut that are below a threshold; raises as :meth:`settle`."""
        self.search = search = self._search_below(threshold)
        self._with_layouts.clear()
        stages_to_load, loaded_s, num_inexact = list(self._by_work), threshold, 0
        while search.prune():
            self.stop.check()
            selection = search.find()
            if selection is None:
                break
            # The selection is below the threshold on all bounds.  Refine what is known, in the order of the effort.
            times, is_exact = search.times(selection, self._unit_times)
            step, path = self.bounds.graph.step(times)
            previous_best_s = self.incumbent.best_s
            if step >= search.threshold and not search.knows(path):
                self.bounds.add_path(path)
                search.add(self.bounds.of_path(path, self.mean))
            elif stages_to_load:
                self._load_rows(stages_to_load.pop(0), times, has_sides=False)
                search.update_arcs()
            elif not is_exact:
                search.price_crossings(selection)
            else:
                evaluation = self._evaluate(selection)
                if self.incumbent.best_s < previous_best_s:
                    search.lower(self.incumbent.exact_threshold)
                    if search.threshold - self.least_s < _MUCH_LESS * (loaded_s - self.least_s):
                        loaded_s, stages_to_load = search.threshold, list(self._by_work)
                        self.cut_graph.arcs.clear()
                        self._with_layouts.clear()
                        search.update_arcs()
                    continue
                fits = evaluation.memory_bytes <= self.cut_graph.limit_bytes
                beside = self._stages_beside_slow_boundaries(evaluation)
                of_plan = self._with_stages_of(evaluation, times)
                is_coarse = not fits or not beside or self.bounds.graph.step(of_plan)[0] >= search.threshold
                if is_coarse and self._refine(of_plan, times):
                    search.update_arcs()
                    continue
                if not fits:
                    raise TooManyError  # some rows were too many, so that their memory counts as the least
                if not beside:
                    raise UnsettledError  # the times were exact, so that nothing more can be learnt here
                if self._load_layouts(beside - self._with_layouts, times):
                    search.update_arcs()
                elif num_inexact < _MAX_INEXACT_SELECTIONS:
                    num_inexact += 1
                    search.lower(step * (1 - RELATIVE_TOLERANCE))
                else:
                    return
                self._with_layouts |= beside
        is_settled = not num_inexact and self.incumbent.is_reached_by(threshold)
        self.least_s = max(self.least_s, math.inf if is_settled else search.threshold)

    def _evaluate(self, selection: Selection) -> Evaluation:
        """Evaluate the plan of a selection of rows."""
        arcs = self.cut_graph.arcs
        stages = [arcs[stage, first, stop].rows.strategies(row) for stage, first, stop, row in selection]
        return self.trials.evaluate([stop - first for _, first, stop, _ in selection], stages)

    # ------------------------------------------------------------------------------------------------------ rows of stages

    def _with_stages_of(self, evaluation: Evaluation, times: np.ndarray) -> np.ndarray:
        """Return the seconds of every term in a plan, but for the transfers, which take as long as in ``times``."""
        own = evaluation.times
        passes = [self.bounds.setting.schedule.backward_passes(stage) for stage in range(len(self.cut))]
        backward, once = np.divide(own.backward, passes), np.add(own.all_reduce, own.update)
        of_plan = times.copy()
        for part, seconds in zip(self.cut_graph.terms.of_stages, (own.forward, backward, own.recompute, once)):
            of_plan[part] = seconds
        return of_plan

    def _refine(self, of_plan: np.ndarray, times: np.ndarray) -> bool:
        """Use more rows of coarse stages that are too slow in a plan of a selection: of those that alone make it reach the
        threshold, or of the one with the greatest effect.

        Args:
            of_plan: Seconds of every term with the stages of the plan.
            times: Seconds of every term in the selection.

        Returns:
            Whether some stage was coarse.
        """
        arcs = self.cut_graph.arcs
        finer = {stage: arcs[stage, first, stop].finer() for stage, (first, stop) in enumerate(self.cut)}
        coarse_stages = [stage for stage in self._by_work if finer[stage] is not None]
        if not coarse_stages:
            return False
        slower = np.repeat(times[:, None], len(coarse_stages), axis=1)
        for column, stage in enumerate(coarse_stages):
            for part in self.cut_graph.terms.of_stages:
                slower[part.start + stage, column] = of_plan[part.start + stage]
        steps = self.bounds.graph.steps(slower)
        for stage, step in zip(coarse_stages, steps.tolist()):
            (first, stop), arc = self.cut[stage], finer[stage]
            if step >= min(self.search.threshold, steps.max()) and arc is not None:
                arcs[stage, first, stop] = arc
        return True

    def _stages_beside_slow_boundaries(self, evaluation: Evaluation) -> set[int]:
        """The stages beside boundaries whose transfers take longer than the least in a plan."""
        slow = [
            b
            for b, ((_, stop), boundary) in enumerate(zip(self.cut, evaluation.boundaries))
            if max(boundary.forward_s, boundary.backward_s)
            > self.cut_graph.least_transfer(b, stop) * (1 + RELATIVE_TOLERANCE)
        ]
        return {stage for b in slow for stage in (b, b + 1)}

    def _load_layouts(self, stages: set[int], times: np.ndarray) -> bool:
        """Load the rows of stages with the layouts at their sides; return whether there were not too many for one of them.

        Args:
            stages: The stages.
            times: As of :meth:`_load_rows`.
        """
        is_new = False
        for stage in sorted(stages):
            try:
                self._load_rows(stage, times, has_sides=True)
                is_new = True
            except TooManyError:
                pass
        return is_new

    def _load_rows(self, stage: int, times: np.ndarray, has_sides: bool) -> None:
        """Load the rows of one stage that can be in a plan below the threshold on all bounds.

        Args:
            stage: The stage.
            times: Seconds of every term in a selection.  Paths that are the longest if the stage takes longer restrict its rows,
                too.
            has_sides: As of :func:`.arc_rows.load_rows`.

        Raises:
            TooManyError: The stage has too many rows.
            StopRequestedError: A stop was requested.
        """
        self.stop.check()
        first, stop = self.cut[stage]
        through = (self.bounds.of_path(path, self.mean) for path in self._paths_through(stage, times))
        wanted = [self._row_filter(bound, stage) for bound in (*self.search.bounds, *through)]
        arc = load_rows(self.cut_graph, stage, first, stop, wanted, has_sides)
        weights = np.max([row_filter.weights for row_filter in wanted], axis=0)
        weights[-1] = max(weights[-1], _LEAST_PRICE * self.bounds.approximate_step_s() / self.cut_graph.limit_bytes)
        self.cut_graph.arcs[stage, first, stop] = coarse(arc, weights)

    def _paths_through(self, stage: int, times: np.ndarray) -> list[np.ndarray]:
        """Return paths that are the longest if a stage takes longer."""
        factors = np.ones((len(_SLOWER), len(times)))
        for part in self.cut_graph.terms.of_stages:
            factors[:, part.start + stage] = _SLOWER
        return [path for _, path in self.bounds.graph.longest_paths(times * factors)]

    def _row_filter(self, bound: Bound, stage: int) -> RowFilter:
        """Return the filter for the rows of a stage that a bound allows."""
        cut_graph, (_, stop) = self.cut_graph, self.cut[stage]
        terms, weights = cut_graph.terms, bound.weights
        costs = [float(cost[ends]) for cost, ends in zip(cut_graph.arc_costs(bound), self.cut)]
        others_s = sum(costs) - costs[stage] + cut_graph.fixed_seconds(weights)
        room_s = self.search.threshold - others_s
        if stage < cut_graph.num_stages - 1:
            crossing = weights[terms.transfer_forward][stage] + weights[terms.transfer_backward][stage]
            room_s -= float(crossing) * cut_graph.least_transfer(stage, stop)
        price = float(bound.prices[0][stage]) if bound.prices else 0.0
        forward, backward, recompute, all_reduce = (float(weights[part][stage]) for part in terms.of_stages)
        threshold = room_s + price * cut_graph.memory_share(stage)
        exchange = cut_graph.exchange_weight(bound, stage)
        return RowFilter((forward, backward, recompute, all_reduce, price), threshold, exchange)
