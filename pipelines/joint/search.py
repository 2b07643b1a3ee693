"""The joint search: best first over settings, by ever sharper bounds, until no open one can be better.

1.  Every *setting* (devices of the workers, schedule, micro-batch) is bounded over all its cuts by the balance of its work
    (:mod:`.bounds`).
2.  Those that promise most are looked at first, for a good plan early.
3.  The one of the least bound gets a sharper one, as far as that is cheap (:mod:`.levels`).  Then it is taken up and *settled*
    (:mod:`.setting_search`): its best plan is found, if it is better than what is known, or shown not to exist; first by a quick
    look at every one, then, with more and more time, at those that are left.

What is left open when the bounds reach the best plan is worse, so the plan is optimal over the space of :mod:`.space`.  If the time
limit, or a stop, comes first, the least open bound says how far it can be from that.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from autoddl.costmodel.stopping import Deadline, StopRequestedError

from ..stepgraph import Terms
from .bounds import balance, bound_class, least_of_cuts, promise
from .cut_graph import PRICES, Bound, CutGraph
from .evaluation import Evaluation
from .explorer import SAME, Explorer, Setting
from .levels import least_level
from .meshes import StageMesh
from .setting_search import SettingSearch, UnsettledError
from .stage_cost import Replicas

__all__ = ["Explored", "Search", "explore"]

#: Seconds that one setting may take, the first time and when others have had theirs.
_SLICES_S = (0.5, 1.0, 4.0, 16.0, 1e9)
#: What may be promised, beside the best plan, to be looked at early, and how many may in a row bring nothing.
_PROMISING, _MAX_IN_VAIN = 1.05, 20
#: Cuts that are searched through at the first look, since a bound of all of them together seldom rules them out.
_FEW_CUTS = 1_000_000
#: Settings that are simulated before the best of them is looked at.
_FEW = 6
#: What a float's rounding may take away from a bound.
_ROUNDING = 1 - 1e-9


@dataclass(order=True)
class _Open:
    """A setting that may have the best plan.

    Attributes:
        bound_s: none of its plans is below.
        number: in the order of the space.
        is_sharp: memory is in the bound.
        is_level: so is the cut whose most loaded worker has the least to do.
        looks: how often it was looked at.
    """

    bound_s: float
    number: int
    setting: Setting = field(compare=False)
    is_sharp: bool = field(default=False, compare=False)
    is_level: bool = field(default=False, compare=False)
    looks: int = field(default=0, compare=False)


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
    search = Search(explorer, settings, known_s, report, until_found)
    return search.go_on(known_s, deadline or Deadline())


class Search:
    """One search, which may go on later; the arguments are those of :func:`explore`."""

    def __init__(
        self,
        explorer: Explorer,
        settings: Iterable[Setting],
        known_s: float = math.inf,
        report: Callable[[float, float, int], None] = lambda best, bound, simulated: None,
        until_found: bool = False,
    ):
        self.explorer, self.best_s = explorer, known_s
        self.report, self.until_found = report, until_found
        self.deadline = Deadline()
        self.found = Explored()
        self.open: list[_Open] = []
        self._settings = iter(settings)
        #: What is to be bounded next.
        self._next: Setting | None = None
        self._first_bounds: dict[object, float] = {}
        #: Settings that have had their time, and get more when the others have.
        self._later: list[_Open] = []
        self.is_bounded = False
        #: Where the best plan was found.
        self._best: _Open | None = None

    def begin(self, deadline: Deadline) -> Evaluation | None:
        """Look at what promises most, until the time is over; the best plan, if one is better than what was known."""
        self.deadline = deadline
        try:
            self.bound()
            self.look_at_promising()
        except StopRequestedError:
            pass
        return self.found.best

    def go_on(self, known_s: float, deadline: Deadline) -> Explored:
        """Search on from where it was left, with a plan that is known by now, to the end or until the time is over."""
        self.best_s, self.deadline = min(self.best_s, known_s), deadline
        try:
            self.bound()
            self.look_at_promising()
            self.prove()
        except StopRequestedError:
            self.found.finished = False
        self.found.lower_bound_s = self.lower_bound_s
        return self.found

    @property
    def limit_s(self) -> float:
        """What is not below it is not better."""
        return self.best_s * (1 - SAME)

    @property
    def lower_bound_s(self) -> float:
        """No plan is below it.  Of settings that were not come to not even a bound is known."""
        if not self.is_bounded:
            return 0.0
        return min([self.best_s, *(one.bound_s for one in (*self.open, *self._later))])

    @property
    def is_over(self) -> bool:
        """Whether the time is, and there is a plan or none is wanted at any cost."""
        return self.deadline.is_over and not self._goes_on

    @property
    def _goes_on(self) -> bool:
        return self.until_found and self.found.best is None and not self.deadline.stop.is_requested

    def bound(self) -> None:
        """Of all settings that have a plan what they take at least, by balance and without memory; from where it was left.

        Raises:
            StopRequestedError: the time was over before all have one.
        """
        while not self.is_bounded:
            if self._next is None:
                self._next = next(self._settings, None)
            self.explorer.stop.check()
            if self._next is None:
                heapq.heapify(self.open)
                self.is_bounded = True
                return
            bound_s = self._first_bound(self._next)
            self.found.settings += 1
            self.found.configurations += self._num_cuts(self._next)
            if bound_s == math.inf:
                self.found.impossible += 1
            else:
                self.open.append(_Open(bound_s, self.found.settings, self._next))
            self._next = None
            if self.is_over:
                raise StopRequestedError

    def _num_cuts(self, setting: Setting) -> int:
        return math.comb(self.explorer.chain.num_units - 1, setting.schedule.num_stages - 1)

    def _first_bound(self, setting: Setting) -> float:
        """By balance; of schedules of one class it is the same."""
        key = (setting.mesh, setting.micro_batch, setting.part, bound_class(setting.schedule))
        if key not in self._first_bounds:
            self._first_bounds[key] = _balanced(self.explorer, setting) * _ROUNDING
        return self._first_bounds[key]

    def look_at_promising(self) -> None:
        """Look at the settings whose level plans would take the least, until what they promise is no better than the best plan.

        What the promises tell at first is little; so the best of a few that were simulated is looked at, before more of them are.
        """
        equal = [one for one in self.open if isinstance(one.setting.mesh, StageMesh) and not one.looks]
        queue = [(_promise(one), one.number, False, one) for one in equal]
        heapq.heapify(queue)
        simulated: list[tuple[float, int, _Open]] = []
        in_vain = 0
        while not self.is_over and in_vain < _MAX_IN_VAIN:
            fresh = 0
            while queue and queue[0][0] < _PROMISING * self.best_s and fresh < _FEW and not self.is_over:
                promised_s, number, has_memory, one = heapq.heappop(queue)
                if one.bound_s >= self.limit_s:
                    continue
                if has_memory:
                    promised_s = max(promised_s, _promise_simulated(self.explorer, one.setting, promised_s))
                    heapq.heappush(simulated, (promised_s, number, one))
                    fresh += 1
                else:
                    promised_s = max(promised_s, _promise_with_memory(self.explorer, one.setting, promised_s))
                    heapq.heappush(queue, (promised_s, number, True, one))
            if not simulated or simulated[0][0] >= _PROMISING * self.best_s:
                if fresh:
                    continue
                break
            before = self.best_s
            self._look(heapq.heappop(simulated)[2])
            in_vain = 0 if self.best_s < before else in_vain + 1
            self.report(self.best_s, self.lower_bound_s, self.found.simulated)
        self._improve()
        self.open = [one for one in self.open if one.bound_s < self.limit_s]
        heapq.heapify(self.open)

    def _improve(self) -> None:
        """Look again, and longer, at the setting of the best plan, as long as that finds a better one."""
        before = math.inf
        while (
            self._best is not None and self.best_s < before and self._best.bound_s < self.limit_s and not self.is_over
        ):
            before = self.best_s
            self._look(self._best)
            self.report(self.best_s, self.lower_bound_s, self.found.simulated)

    def prove(self) -> None:
        """Look at the open setting of the least bound, until none is below the best plan."""
        for looks in range(1, len(_SLICES_S) + 1):
            while self.open and self.open[0].bound_s < self.limit_s:
                if self.is_over:
                    self.found.finished = False
                    return
                one = self.open[0]
                least_s = min([one.bound_s, *(other.bound_s for other in self._later)])
                self.report(self.best_s, least_s, self.found.simulated)
                if self._sharpen(one, looks):
                    heapq.heapreplace(self.open, one)
                    continue
                if one.looks < looks:
                    self._look(one)
                heapq.heappop(self.open)
                if one.bound_s < self.limit_s:
                    self._later.append(one)
            self.open, self._later = self._later, []
            heapq.heapify(self.open)
        self.found.finished = not self.open

    def _sharpen(self, one: _Open, looks: int) -> bool:
        """Raise the bound of a setting by what is cheaper than the next look at it; whether there was something."""
        if one.looks >= looks:
            return False
        if not one.is_sharp:
            one.bound_s = max(one.bound_s, _sharper(self.explorer, one.setting, self.best_s))
            one.is_sharp = True
            return True
        # Where workers have several stages this takes longer than a first look, which mostly settles a setting.
        if one.looks and not one.is_level:
            one.bound_s = max(one.bound_s, _level(self.explorer, one.setting, self.best_s))
            one.is_level = True
            return True
        return False

    def _look(self, one: _Open) -> None:
        """Settle a setting, or find out more of its bound, in its slice of time."""
        self.found.opened.add(one.setting)
        time_s = _SLICES_S[min(one.looks, len(_SLICES_S) - 1)]
        until = (
            Deadline(time_s, self.deadline.stop, time.process_time) if self._goes_on else _slice(self.deadline, time_s)
        )
        is_quick = not one.looks and self._num_cuts(one.setting) > _FEW_CUTS
        settling = SettingSearch(self.explorer, one.setting, self.best_s, until, is_quick)
        one.looks += 1
        try:
            settling.run()
        except UnsettledError:
            pass
        finally:
            self.found.simulated += settling.simulated
            if settling.best is not None:
                self.found.best, self.best_s, self._best = settling.best, settling.best_s, one
            one.bound_s = max(one.bound_s, settling.bound_s * _ROUNDING)


def _least_on_links(explorer: Explorer, setting: Setting) -> float:
    """All micro-batches that cross the boundary where the most crosses, wherever boundaries are; in schemes of one pipeline."""
    spec = setting.schedule
    transfers = explorer.least_transfers(setting)
    if spec.num_pipelines > 1 or not spec.synchronous or not len(transfers):
        return 0.0
    rest = explorer.chain.num_units - spec.num_stages
    least = [float(line[b + 1 : b + rest + 2].min()) for b, line in enumerate(transfers)]
    return spec.num_micro_batches * max(least)


def _balanced(explorer: Explorer, setting: Setting) -> float:
    """The bound of a setting by balance, without memory, transfers and all-reduces; inf where some layer has no strategy."""
    terms = Terms(setting.schedule.num_stages)
    weights = balance(setting.schedule, setting.widths)
    forward, backward, again = (weights[part] for part in (terms.forward, terms.backward, terms.recompute))
    none = np.zeros_like(forward)
    best = np.full((terms.num_stages, explorer.chain.num_units), np.inf)
    # Nothing is gained by recomputation where memory is for nothing.
    for way in ("none",) if "none" in explorer.recomputations else explorer.recomputations:
        vectors = np.column_stack([forward + (again if way == "stage" else 0.0), backward, none, none, none])
        for mesh in dict.fromkeys(setting.meshes):
            own = np.flatnonzero([one == mesh for one in setting.meshes])
            units = explorer.stages(mesh).units
            least = units.least(way == "layers", Replicas(), setting.micro_batch, setting.part, vectors[own])
            if least is None:
                return math.inf
            best[own] = np.minimum(best[own], least)
    return float(least_of_cuts(best, np.zeros((terms.num_stages - 1, best.shape[1] + 1))))


def _promise(one: _Open) -> float:
    """What a level plan of a setting would take, about, as far as its first bound tells."""
    spec, widths = one.setting.schedule, one.setting.widths
    forward = Terms(spec.num_stages).forward
    return one.bound_s * float(promise(spec, widths)[forward].sum() / balance(spec, widths)[forward].sum())


def _promise_with_memory(explorer: Explorer, setting: Setting, about_s: float) -> float:
    """The same with memory and all-reduces; ``about_s``: what a step takes, about."""
    demand = explorer.demand(setting.schedule)
    if demand is None:
        return math.inf
    # Layer by layer takes about as long as whole stages, and has tables of its own.
    ways = [way for way in explorer.recomputations if way != "layers"] or explorer.recomputations
    cut_graph = CutGraph(explorer, setting, ways, demand)
    return cut_graph.quick(Bound(promise(setting.schedule, setting.widths)), about_s, (0.0, *PRICES))


def _promise_simulated(explorer: Explorer, setting: Setting, about_s: float) -> float:
    """What a level plan takes by the schedule itself, without redistributions."""
    if not setting.schedule.synchronous:
        return about_s
    try:
        return SettingSearch(explorer, setting, math.inf, Deadline(stop=explorer.stop)).level_s()
    except UnsettledError:
        return about_s


def _slice(deadline: Deadline, seconds: float) -> Deadline:
    """A deadline in so many seconds, or the other one if that is before."""
    return Deadline(min(seconds, deadline.left_s), deadline.stop, time.process_time)


def _sharper(explorer: Explorer, setting: Setting, best_s: float) -> float:
    """The bound of a setting with memory at a price, as far as that is known to be of use; inf where it has no schedule."""
    demand = explorer.demand(setting.schedule)
    if demand is None:
        return math.inf
    if not math.isfinite(best_s):
        return 0.0
    cut_graph = CutGraph(explorer, setting, explorer.recomputations, demand)
    bound_s = max(
        cut_graph.quick(Bound(balance(setting.schedule, setting.widths)), best_s, PRICES),
        _least_on_links(explorer, setting),
    )
    if bound_s < best_s and cut_graph.is_alone:
        bound_s = max(bound_s, least_level(cut_graph, best_s))
    return bound_s * _ROUNDING


def _level(explorer: Explorer, setting: Setting, best_s: float) -> float:
    """The bound of a setting whose workers have several stages by their loads."""
    demand = explorer.demand(setting.schedule)
    cut_graph = None if demand is None else CutGraph(explorer, setting, explorer.recomputations, demand)
    if cut_graph is None or cut_graph.is_alone:
        return 0.0
    return least_level(cut_graph, best_s) * _ROUNDING
