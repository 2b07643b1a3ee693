"""The least memory per device that any plan of the space would do with, for the error that nothing fits.

A cut of a setting would do with M = the most, over its workers, of what their stages need, where a worker of k stages gives each
the same share (as the search does that looks for stages that fit): k times what the largest needs at least.  What the layers keep
at least (:meth:`.explorer.Explorer.least_memory`) is a bound on that, for all cuts of a setting at once.  So settings are gone
through by their least bounds, and the cuts of each too, until no bound is below the least M found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.stopping import Deadline

from .explorer import Explorer, Setting
from .interiors import Need

__all__ = ["least_memory"]


def least_memory(explorer: Explorer, settings: Iterable[Setting], deadline: Deadline) -> tuple[float, bool]:
    """The bytes, infinite where no cut has a strategy for each of its layers; and whether nothing would do with less.

    Args:
        deadline: after which the least so far is given.

    Raises:
        StopRequestedError: a stop was requested before the least was known.
    """
    bounds: list[tuple[float, int, Setting]] = []
    is_whole = True
    for number, setting in enumerate(settings):
        deadline.stop.check()
        if deadline.is_over:
            is_whole = False
            break
        least = explorer.least_memory(setting)
        if least is not None and len(least):
            bounds.append((float(least.min()), number, setting))
    best, known = math.inf, _Stages(explorer)
    for bound, _, setting in sorted(bounds, key=lambda row: row[:2]):
        if bound >= best:
            break
        least = explorer.least_memory(setting)
        assert least is not None
        cuts = setting.cuts(explorer.chain.num_units)
        for index in np.argsort(least, kind="stable"):
            if least[index] >= best:
                break
            deadline.stop.check()
            if deadline.is_over and math.isfinite(best):
                return best, False
            best = min(best, known.of_cut(setting, cuts[index].tolist(), best))
    return best, is_whole


class _Stages:
    """What stages need at least, each worked out once."""

    def __init__(self, explorer: Explorer):
        self.explorer = explorer
        self._known: dict[object, float] = {}

    def of_cut(self, setting: Setting, cut: Sequence[int], most: float) -> float:
        """What the fullest worker needs; infinite where that is ``most`` or more."""
        needs = self.explorer.needs(setting)
        assert needs is not None
        stops = list(accumulate(cut))
        shares = [1] * len(cut)
        for homes in needs.homes:
            for _, stage in homes:
                shares[stage] = max(shares[stage], len(homes))
        fullest = 0.0
        for stage, (stop, units, share) in enumerate(zip(stops, cut, shares)):
            need = Need(needs.in_flight[stage], needs.versions[stage], math.inf)
            fullest = max(fullest, share * self._of_stage(setting, stage, stop - units, stop, need))
            if fullest >= most:
                return math.inf
        return fullest

    def _of_stage(self, setting: Setting, stage: int, first: int, stop: int, need: Need) -> float:
        interiors, size = self.explorer.interiors(setting.meshes[stage]), setting.micro_batch
        # Plans without a pipeline recompute layer by layer.
        ways = [way for way in self.explorer.recomputations if len(setting.meshes) > 1 or way != "stage"]
        key = (setting.meshes[stage], self.explorer.chain.shape(first, stop), size, need)
        if key not in self._known:
            try:
                self._known[key] = min(interiors.smallest_memory(first, stop, size, need, way) for way in ways)
            except UserError:
                self._known[key] = math.inf
        return self._known[key]
