"""The joint search: best first over settings, by ever sharper bounds, until no open one can be better.

1.  Every *setting* (devices of the workers, schedule, micro-batch) is bounded over all its cuts by the balance of its work
    (:mod:`.bounds`).
2.  The one of the least bound is taken up and *settled* (:mod:`.settle`): its best plan is found, if it is better than what is
    known, or shown not to exist.

What is left open when the bounds reach the best plan is worse, so the plan is optimal over the space of :mod:`.space`.  If the time
limit, or a stop, comes first, the least open bound says how far it can be from that.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from autoddl.costmodel.stopping import Deadline, StopRequestedError

from .bounds import balance, bound_class, loads
from .evaluation import Evaluation
from .explorer import SAME, Explorer, Setting
from .needs import asking_nothing
from .regions import level_cut
from .settle import Settling, UnsettledError
from .terrain import PRICES, Bound, Terrain

__all__ = ["Explored", "explore"]

#: Seconds that one setting may take, the first time and when others have had theirs.
_SLICES_S = (0.3, 1.0, 4.0, 1e9)
#: What waits: its bound, its number, whether memory is in the bound, and the setting.
_Open = tuple[float, int, bool, Setting]
#: What a float's rounding may take away from a bound.
_ROUNDING = 1 - 1e-9


@dataclass
class Explored:
    """What a search found and counted."""

    best: Evaluation | None = None
    lower_bound_s: float = math.inf
    configurations: int = 0
    settings: int = 0
    impossible: int = 0
    simulated: int = 0
    finished: bool = True
    opened: set[Setting] = field(default_factory=set)


def explore(
    explorer: Explorer,
    settings: Iterable[Setting],
    known_s: float = math.inf,
    deadline: Deadline | None = None,
    report: Callable[[float, float, int], None] = lambda best, bound, simulated: None,
    until_found: bool = False,
) -> Explored:
    """The best configuration of these settings, if one is better than ``known_s``.

    Args:
        deadline: when to end with the best so far.  Its stop should be the explorer's, so that what is under way can end, too.
        report: told the best step, the least open bound and the number of plans that were worked out.
        until_found: go on beyond the deadline until there is a plan, if there is one.
    """
    found, best_s = Explored(), known_s
    deadline = deadline or Deadline()
    queue: list[_Open] = []
    hard: list[_Open] = []
    rounds, is_bounded = 0, False
    try:
        for one in _bounded(explorer, settings, found):
            queue.append(one)
            if deadline.is_over and not until_found:
                raise StopRequestedError
        heapq.heapify(queue)
        is_bounded = True
        while True:
            limit_s = best_s * (1 - SAME)
            if not queue or queue[0][0] >= limit_s:
                # What took too long has another try, with more time.
                queue, hard, rounds = [one for one in hard if one[0] < limit_s], [], rounds + 1
                heapq.heapify(queue)
                if not queue:
                    break
            goes_on = until_found and found.best is None and not deadline.stop.is_requested
            if rounds == len(_SLICES_S) or (deadline.is_over and not goes_on):
                found.finished = False
                break
            bound, number, is_sharp, setting = queue[0]
            report(best_s, min([bound, *(one[0] for one in hard)]), found.simulated)
            if not is_sharp:
                heapq.heapreplace(queue, (max(bound, _sharper(explorer, setting, best_s)), number, True, setting))
                continue
            found.opened.add(setting)
            time_s = _SLICES_S[rounds]
            until = Deadline(time_s, deadline.stop, time.process_time) if goes_on else _slice(deadline, time_s)
            result, best_s, own = _settle(explorer, setting, best_s, until, found, not rounds)
            heapq.heappop(queue)
            found.best = result or found.best
            if own < best_s * (1 - SAME):
                hard.append((max(bound, own * _ROUNDING), number, True, setting))
    except StopRequestedError:
        found.finished = False
    # Of settings that were not come to not even a bound is known.
    found.lower_bound_s = min([best_s, *(one[0] for one in (*hard, *queue))]) if is_bounded else 0.0
    return found


def _slice(deadline: Deadline, seconds: float) -> Deadline:
    """A deadline in so many seconds, or the other one if that is before."""
    return Deadline(min(seconds, deadline.left_s), deadline.stop, time.process_time)


def _bounded(explorer: Explorer, settings: Iterable[Setting], found: Explored) -> Iterator[_Open]:
    """(bound, number, False, setting) of all settings that have a plan, by balance and without memory.

    Raises:
        StopRequestedError: before all have one.
    """
    known: dict[object, float] = {}
    for number, setting in enumerate(settings):
        explorer.stop.check()
        found.settings += 1
        found.configurations += math.comb(explorer.chain.num_units - 1, setting.schedule.num_stages - 1)
        spec = setting.schedule
        key = (setting.mesh, setting.micro_batch, setting.part, bound_class(spec), spec.num_pipelines)
        if key not in known:
            # What a schedule asks of memory has no part in this, and may take long to find out.
            terrain = Terrain(explorer, setting, explorer.recomputations, asking_nothing(spec))
            known[key] = terrain.quick(Bound(balance(spec, setting.widths)), 0.0, (0.0,)) * _ROUNDING
        if known[key] == math.inf:
            found.impossible += 1
        else:
            yield known[key], number, False, setting


def _sharper(explorer: Explorer, setting: Setting, best_s: float) -> float:
    """The bound of a setting with memory at a price, as far as that is known to be of use; inf where it has no schedule."""
    needs = explorer.needs(setting.schedule)
    if needs is None:
        return math.inf
    if not math.isfinite(best_s):
        return 0.0
    terrain = Terrain(explorer, setting, explorer.recomputations, needs)
    bound_s = terrain.quick(Bound(balance(setting.schedule, setting.widths)), best_s, PRICES)
    if terrain.is_alone and bound_s < best_s:
        # The worker of the most loaded stage of the cut where it has the least to do.
        weights = np.maximum.reduce(loads(setting.schedule))
        bound_s = max(bound_s, level_cut(terrain.costs(Bound(weights, terrain.grid(weights, best_s))))[0])
    return bound_s * _ROUNDING


def _settle(
    explorer: Explorer, setting: Setting, best_s: float, deadline: Deadline, found: Explored, is_quick: bool
) -> tuple[Evaluation | None, float, float]:
    """The best plan that is better, the best step, and what no plan of the setting is below: that step, where it is settled."""
    settling = Settling(explorer, setting, best_s, deadline, is_quick)
    bound_s = math.inf
    try:
        settling.run()
    except UnsettledError:
        bound_s = settling.bound_s
    found.simulated += settling.simulated
    return settling.best, settling.best_s, min(settling.best_s, bound_s)
