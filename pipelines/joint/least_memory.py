"""The least memory per device that any plan of the space would do with, for the error that nothing fits.

A cut of a setting would do with M = the most, over its workers, of what their stages need at least: what stays, and the largest
buffer. What the units of a stage keep at least (:mod:`.unit_bounds`) is a bound on that. So settings are gone through by their
least bounds; in each the cut is taken whose neediest stage needs the least, its stages are worked out, and so on until the same
cut is taken again: no other one does with less. Where workers have several stages, which need together what a cut needs, the
neediest stage and the mean worker are bounds alone, and what was found may not be the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from autoddl.costmodel.stopping import Deadline

from .cut_regions import Cut, closed_arcs, least_cut, level_cut
from .explorer import Explorer, Setting
from .memory_demand import MemoryDemand
from .stage_search import StageDemand

__all__ = ["least_memory"]


def least_memory(explorer: Explorer, settings: Iterable[Setting], deadline: Deadline) -> tuple[float, bool]:
    """The bytes, infinite where no cut has a strategy for each of its layers; and whether nothing would do with less.

    Args:
        deadline: after which the least so far is given.

    Raises:
        StopRequestedError: a stop was requested before the least was known.
    """
    bounds: list[tuple[float, int, _Bytes]] = []
    is_whole = True
    for number, setting in enumerate(settings):
        deadline.stop.check()
        if deadline.is_over:
            is_whole = False
            break
        demand = explorer.demand(setting.schedule)
        own = None if demand is None else _Bytes(explorer, setting, demand)
        bound = math.inf if own is None else own.bound()
        if own is not None and math.isfinite(bound):
            bounds.append((bound, number, own))
    best = math.inf
    for bound, _, own in sorted(bounds, key=lambda row: row[:2]):
        if bound >= best:
            break
        deadline.stop.check()
        if deadline.is_over and math.isfinite(best):
            return best, False
        least, found = own.least(best)
        best = min(best, found)
        is_whole &= least >= best or found <= least
    return best, is_whole


class _Bytes:
    """What the stages of one setting need."""

    def __init__(self, explorer: Explorer, setting: Setting, demand: MemoryDemand):
        self.explorer, self.setting, self.demand = explorer, setting, demand
        self.passes = explorer.passes(setting)
        spec = setting.schedule
        # Plans without a pipeline recompute layer by layer.
        self.ways = [way for way in explorer.recomputations if spec.num_workers > 1 or way != "stage"]
        self._costs: list[np.ndarray] = []
        self._known: dict[tuple[int, int, int], float] = {}

    def bound(self) -> float:
        """The least that the neediest stage of any cut needs, by its units; inf where some layer has no strategy."""
        explorer, num_units, num_stages = self.explorer, self.explorer.chain.num_units, self.setting.schedule.num_stages
        for stage, (mesh, passes) in enumerate(zip(self.setting.meshes, self.passes)):
            stages = explorer.stages(mesh)
            best = np.full((num_units + 1, num_units + 1), np.inf)
            for way in self.ways:
                counts, _ = stages.memory_of(0, 1, way, passes, self._need(stage))
                weights = np.array([[0.0, 0.0, 0.0, *counts]])
                found = stages.units.least(way == "layers", passes.replicas, passes.micro_batch, passes.part, weights)
                if found is None:
                    return math.inf
                sums = np.concatenate([[0.0], np.cumsum(found[0])])
                constants = [stages.memory_of(u, u + 1, way, passes, self._need(stage))[1] for u in range(num_units)]
                best = np.minimum(best, sums[None, :] - sums[:, None] + np.append(constants, 0.0)[:, None])
            self._costs.append(np.where(closed_arcs(stage, num_stages, num_units), np.inf, best))
        return self._bound()[0]

    def _bound(self) -> tuple[float, Cut]:
        """The most of what the neediest stage and the mean worker of a cut need at least; and the cut of the neediest stage."""
        neediest, cut = level_cut(self._costs)
        held = [
            sum(stage == one for homes in self.demand.homes for _, one in homes) for stage in range(len(self._costs))
        ]
        mean = least_cut([cost * count for cost, count in zip(self._costs, held)])[0] / len(self.demand.homes)
        return max(neediest, mean), cut

    def least(self, most: float) -> tuple[float, float]:
        """(a bound on, the least found of) what the fullest worker of a cut needs; no more work where that is ``most`` or more."""
        found = math.inf
        while True:
            bound, cut = self._bound()
            if bound >= most or not cut:
                return bound, found
            fresh = [(s, *ends) for s, ends in enumerate(cut) if (s, *ends) not in self._known]
            for stage, first, stop in fresh:
                self.explorer.stop.check()
                self._known[stage, first, stop] = self._of_stage(stage, first, stop)
                # Stages that share a worker share a buffer: of all of them together what stays is a bound, and no buffer.
                own = self._known[stage, first, stop] if self._is_alone else self._of_stage(stage, first, stop, False)
                self._costs[stage][first, stop] = own
            needed = [self._known[s, first, stop] for s, (first, stop) in enumerate(cut)]
            found = min(found, max(sum(needed[stage] for _, stage in held) for held in self.demand.homes))
            if not fresh:
                return bound, found

    def _need(self, stage: int) -> StageDemand:
        return StageDemand(self.demand.in_flight[stage], self.demand.versions[stage])

    @property
    def _is_alone(self) -> bool:
        return all(len(held) == 1 for held in self.demand.homes)

    def _of_stage(self, stage: int, first: int, stop: int, has_buffer: bool = True) -> float:
        stages, need = self.explorer.stages(self.setting.meshes[stage]), self._need(stage)
        return min(stages.least_memory(first, stop, way, self.passes[stage], need, has_buffer) for way in self.ways)
