"""The least memory per device that any plan of the space needs; the error message says so if no plan fits.

A cut of a setting needs the largest, over its workers, of the resident bytes of the worker's stages plus its largest buffer.  The
bytes of a stage are at least the sum of what its units keep at least (:mod:`.unit_bounds`).  The search goes through the settings
in the order of their bounds.  In each setting it repeats

1.  take the cut whose neediest stage needs the least (a bottleneck path of the cut graph),
2.  search the stages of this cut, and replace their bounds by what they need,

until the stages of the cut it takes are known: no other cut needs less.

If workers have several stages, the neediest stage and the mean of all workers are only bounds on the fullest worker.  Then the
result may not be the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from autoddl.costmodel.recomputation import word_of
from autoddl.costmodel.stopping import Deadline

from .configuration import recomputed_inside
from .cut_regions import Cut, bottleneck_cut, cheapest_cut, impossible_arcs
from .explorer import Explorer, Setting
from .memory_demand import MemoryDemand
from .space import SOME_BLOCKS, recomputations_of_stage
from .stage_search import StageDemand

__all__ = ["least_memory"]


def least_memory(explorer: Explorer, settings: Iterable[Setting], deadline: Deadline) -> tuple[float, bool]:
    """Return the least memory per device that any plan of these settings needs.

    Args:
        explorer: Searches of the model's stages.
        settings: The settings.
        deadline: After it the least known so far is returned.

    Returns:
        The bytes, infinite if every cut has a layer without a strategy; and whether it is proven that no plan needs less.

    Raises:
        StopRequestedError: A stop was requested before the result was known.
    """
    bounds: list[tuple[float, int, _SettingMemory]] = []
    is_proven = True
    for number, setting in enumerate(settings):
        deadline.stop.check()
        if deadline.is_over:
            is_proven = False
            break
        demand = explorer.memory_demand(setting.schedule)
        search = None if demand is None else _SettingMemory(explorer, setting, demand)
        bound = math.inf if search is None else search.bound_by_units()
        if search is not None and math.isfinite(bound):
            bounds.append((bound, number, search))
    best = math.inf
    for bound, _, search in sorted(bounds, key=lambda row: row[:2]):
        if bound >= best:
            break
        deadline.stop.check()
        if deadline.is_over and math.isfinite(best):
            return best, False
        setting_bound, found = search.least(best)
        best = min(best, found)
        is_proven &= setting_bound >= best or found <= setting_bound
    return best, is_proven


class _SettingMemory:
    """What the stages of one setting need, by arc: bounds by units at first, later what the searched stages need."""

    def __init__(self, explorer: Explorer, setting: Setting, demand: MemoryDemand):
        self.explorer, self.setting, self.demand = explorer, setting, demand
        self.passes = explorer.passes(setting)
        spec = setting.schedule
        #: Per stage, the ways of recomputation.  No number of blocks needs less than all of them.
        ways = [way for way in explorer.recomputations if way != SOME_BLOCKS]
        self.recomputations = [
            recomputations_of_stage(ways, stage, spec.num_stages) for stage in range(spec.num_stages)
        ]
        #: Per stage the bytes that each arc counts with in the bounds.
        self._costs: list[np.ndarray] = []
        #: The bytes of searched stages (stage, first unit, unit behind the last one).
        self._known: dict[tuple[int, int, int], float] = {}

    def bound_by_units(self) -> float:
        """Return a lower bound on what any cut needs, by its units; infinite if some layer has no strategy."""
        explorer, num_units, num_stages = self.explorer, self.explorer.chain.num_units, self.setting.schedule.num_stages
        for stage, (mesh, passes) in enumerate(zip(self.setting.meshes, self.passes)):
            search, demand = explorer.stage_search(mesh), self._stage_demand(stage)
            best = np.full((num_units + 1, num_units + 1), np.inf)
            for recompute in self.recomputations[stage]:
                counts, _ = search.memory_of(0, 1, recompute, passes, demand)
                weights = np.array([[0.0, 0.0, 0.0, *counts]])
                inside = word_of(recomputed_inside(recompute))  # of a unit that is one of the first blocks
                least = search.unit_bounds.least(
                    inside, passes.replicas, passes.micro_batch, passes.smallest_pass, weights
                )
                if least is None:
                    return math.inf
                sums = np.concatenate([[0.0], np.cumsum(least[0])])
                constants = [search.memory_of(u, u + 1, recompute, passes, demand)[1] for u in range(num_units)]
                best = np.minimum(best, sums[None, :] - sums[:, None] + np.append(constants, 0.0)[:, None])
            self._costs.append(np.where(impossible_arcs(stage, num_stages, num_units), np.inf, best))
        return self._bound()[0]

    def _bound(self) -> tuple[float, Cut]:
        """Return the larger of the least neediest stage and the least mean of all workers, and the cut of the neediest stage."""
        neediest, cut = bottleneck_cut(self._costs)
        held = [
            sum(stage == one for homes in self.demand.homes for _, one in homes) for stage in range(len(self._costs))
        ]
        mean = cheapest_cut([cost * count for cost, count in zip(self._costs, held)])[0] / len(self.demand.homes)
        return max(neediest, mean), cut

    def least(self, most: float) -> tuple[float, float]:
        """Search the least that the fullest worker of a cut needs.

        Args:
            most: The search ends when the bound reaches this many bytes.

        Returns:
            A lower bound, and the least that was found.
        """
        best = math.inf
        while True:
            bound, cut = self._bound()
            if bound >= most or not cut:
                return bound, best
            new = [(s, *ends) for s, ends in enumerate(cut) if (s, *ends) not in self._known]
            for stage, first, stop in new:
                self.explorer.stop.check()
                self._known[stage, first, stop] = self._bytes_of(stage, first, stop)
                # Stages that share a worker share its buffer, so in a sum over stages only their resident bytes count.
                in_bound = (
                    self._known[stage, first, stop] if self._is_alone else self._bytes_of(stage, first, stop, False)
                )
                self._costs[stage][first, stop] = in_bound
            needed = [self._known[s, first, stop] for s, (first, stop) in enumerate(cut)]
            best = min(best, max(sum(needed[stage] for _, stage in held) for held in self.demand.homes))
            if not new:
                return bound, best

    def _stage_demand(self, stage: int) -> StageDemand:
        demand = self.demand
        return StageDemand(demand.in_flight[stage], demand.versions[stage], demand.running[stage])

    @property
    def _is_alone(self) -> bool:
        """Whether each worker has a single stage."""
        return all(len(held) == 1 for held in self.demand.homes)

    def _bytes_of(self, stage: int, first: int, stop: int, has_buffer: bool = True) -> float:
        """Return the least bytes of a stage, with or without its largest buffer."""
        search, passes, demand = (
            self.explorer.stage_search(self.setting.meshes[stage]),
            self.passes[stage],
            self._stage_demand(stage),
        )
        return min(
            search.least_memory(first, stop, recompute, passes, demand, has_buffer)
            for recompute in self.recomputations[stage]
        )
