"""Trials of single cuts: heuristics that find plans of a setting, which the full evaluation prices (:mod:`.evaluation`).

The even cut, the cut nearest to the best fractional one and the best stepped one (:mod:`.stepped_cuts`) are improved by moving
units between stages (:mod:`.cut_times`), and get rows that fit (:mod:`.fitting`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoddl.costmodel.strategy import Strategy

from .bounds import Bound, balance_weights, worker_loads
from .cut_regions import Cut, bottleneck_cut, cut_at
from .cut_times import MAX_NODES, locally_improved, times_of_cuts
from .evaluation import Evaluation
from .fewer_blocks import with_fewer_blocks
from .fitting import fitting_rows
from .setting_bounds import RegionBound, SettingBounds
from .stepped_cuts import best_stepped_cut

__all__ = ["CutTrials"]

#: Largest number of known paths when the rows of all stages are selected together.
_MAX_SELECTION_PATHS = 20


class CutTrials:
    """Tries cuts of one setting; plans below the incumbent become the incumbent.

    Args:
        bounds: The bounds of the setting; trials add the longest paths that they meet.

    Attributes:
        simulated: Number of plans that were evaluated.
        tried: The cuts that were tried, by the ends of their stages, with the step of the rows that were found; infinite if none
            fit.
    """

    def __init__(self, bounds: SettingBounds):
        self.bounds, self.explorer, self.setting = bounds, bounds.explorer, bounds.setting
        self.cut_graph, self.incumbent = bounds.cut_graph, bounds.incumbent
        self.simulated = 0
        self.tried: dict[tuple[int, ...], float] = {}

    def try_promising_cuts(self, region_bound: RegionBound) -> None:
        """Try the even cut, the cut nearest to the best fractional one and the best stepped one, after a local search, the one of
        the shortest step first."""
        num_units, graph = self.cut_graph.num_units, self.bounds.graph
        fractional = cut_at(self.bounds.whole_region.nearest_boundaries(region_bound.boundaries), num_units)
        starts = [self._even_cut(), fractional]
        stepped = best_stepped_cut(self.cut_graph, graph, region_bound.vectors)
        starts += [] if stepped is None else [stepped]
        steps = graph.steps(times_of_cuts(self.cut_graph, starts, region_bound.vectors))
        for number in np.argsort(steps, kind="stable").tolist():
            improved = locally_improved(self.cut_graph, graph, starts[number], region_bound.vectors)
            self.try_cut(improved, region_bound.bound.weights)

    def try_even_cut(self) -> None:
        """Try the even cut."""
        self.try_cut(self._even_cut(), balance_weights(self.setting.schedule, self.setting.widths))

    def _even_cut(self) -> Cut:
        """The cut whose stages have about as many units as is proportional to the devices of their workers."""
        widths, num_units = self.setting.widths, self.cut_graph.num_units
        ends = np.cumsum(widths)[:-1] / sum(widths) * num_units
        return cut_at(self.bounds.whole_region.nearest_boundaries(ends), num_units)

    def try_bottleneck_cut(self) -> None:
        """Try the cut whose most loaded stage has the least load, with a price of memory."""
        terms = self.cut_graph.terms
        weights = np.maximum.reduce(worker_loads(self.setting.schedule))
        prices = self.cut_graph.price_grid(weights, self.bounds.approximate_step_s())
        bound = Bound(weights, prices if self.cut_graph.has_one_stage_per_worker else prices[:1])
        _, cut = bottleneck_cut(self.cut_graph.arc_costs(bound))
        weights[terms.all_reduce] = 1.0
        if cut:
            self.try_cut(cut, weights)

    def try_cut(self, cut: Cut, path: np.ndarray, is_thorough: bool = False) -> None:
        """Evaluate a plan with a cut, and with rows that fit and are good for a path, if such rows are found.

        A cut is tried once, and once more if the rows of all stages are to be selected together (``is_thorough``).
        """
        key = tuple(stop for _, stop in cut)
        if key in self.tried and not is_thorough:
            return
        self.tried.setdefault(key, math.inf)
        self.explorer.stop.check()
        terms, cut_graph, bounds = self.cut_graph.terms, self.cut_graph, self.bounds
        is_synchronous = self.setting.schedule.synchronous
        weights = np.maximum(np.column_stack([path[part] for part in terms.of_stages]), 1e-3)
        steps = None
        if is_synchronous and bounds.graph.num_nodes * len(cut) < MAX_NODES // 10:
            steps = bounds.graph.steps
        together = None
        if is_thorough:
            together = (bounds.graph.step, bounds.relaxation.latest_paths(_MAX_SELECTION_PATHS))
        fitting = fitting_rows(cut_graph, cut, weights, bounds.approximate_step_s(), steps, together)
        if fitting is None:
            return
        rows, times = fitting
        if is_synchronous:
            # If the graph is condensed, this step is only a lower bound on that of the plan.
            step, longest = bounds.graph.step(times)
            bounds.add_path(longest)
            self.tried[key] = min(step, self.tried[key])
            if step >= self.incumbent.threshold:
                return
        self.evaluate([stop - first for first, stop in cut], [row.strategies(0) for row in rows])

    def evaluate(self, sizes: Sequence[int], stages: Sequence[tuple[str, Mapping[str, Strategy]]]) -> Evaluation:
        """Evaluate a plan from the layer graph; it becomes the incumbent if it fits and is better.

        Args:
            sizes: Number of units of each stage.
            stages: Per stage its way of recomputation and the strategies of its layers.
        """
        explorer = self.explorer
        evaluation = explorer.evaluation(explorer.configuration(self.setting, sizes, stages))
        self.simulated += 1
        if evaluation.memory_bytes <= explorer.limit_bytes:
            better = with_fewer_blocks(explorer.chain, evaluation, explorer.limit_bytes, explorer.recomputations)
            self.incumbent.replace(better, better.cost(explorer.pricing.objective))
        return evaluation
