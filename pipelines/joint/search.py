"""The joint search: best-first branch and bound over the settings of the joint space.

A *setting* is a division of the devices into workers, a schedule and a micro-batch.  The search repeatedly takes the open setting
with the least lower bound, until no open bound is below the incumbent:

1.  **First bounds.**  Every setting gets a lower bound over all its cuts by the balance of its work (:mod:`.first_bounds`).
2.  **Early incumbent.**  The settings with the smallest estimated steps are attempted first.
3.  **Proof.**  The open setting with the least bound first gets sharper bounds, which are cheaper than an attempt.  It is then
    *attempted* (:mod:`.setting_search`).  The attempt finds a plan better than the incumbent, proves that the setting has none, or
    ends undecided when its time slice is over.  Undecided settings get longer attempts, which take a share of the time until all
    others have had a short one.

When all open bounds are at or above the incumbent, the incumbent is optimal over the space of :mod:`.space`.  If the time limit or
a stop ends the search earlier, the least open bound is a lower bound on the optimum.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autoddl.costmodel.stopping import Deadline, StopRequestedError

from ..planners import Clock
from .bounds import bound_class
from .configuration import recomputed_inside
from .evaluation import Evaluation
from .explorer import RELATIVE_TOLERANCE, Explorer, Setting
from .first_bounds import (
    ROUNDING,
    bound_by_balance,
    bound_with_memory,
    estimate_by_simulation,
    estimate_with_memory,
    first_estimate,
    num_condensed_passes,
    ways_of_balance,
)
from .meshes import StageMesh
from .near_plans import improve_near
from .setting_search import SettingSearch, UnsettledError

__all__ = ["Explored", "Search", "explore"]

#: Seconds of processor time of the first, second, ... attempt at one setting.
_ATTEMPTS_S = (0.5, 1.0, 4.0, 16.0, 1e9)
#: An attempt looks at its time slice between its steps, so that what it knows by then is kept.  A step that takes longer is ended
#: this many seconds after the slice, or half of the slice if that is longer.
_LONGEST_STEP_S = 1.0
#: Number of attempts at every setting after which each of the settings that are left gets a share of the time that is left, and
#: that share as a multiple of an equal one: most settings do not need all of theirs.
_MIN_SHORT_ATTEMPTS, _EQUAL_SHARES = 2, 1.4
#: Number of attempts at the setting of the incumbent, those of the shortest slices, before other settings are bounded; and if its
#: bound is above the second part of the incumbent, so that it is nearly settled.
_MAX_EARLY_ATTEMPTS, _MAX_CLOSE_ATTEMPTS, _NEARLY_SETTLED = 2, 3, 0.995
#: Most and least seconds of processor time to look for better plans near an incumbent, and the share of the time that is left.
_LONGEST_NEAR_S, _LEAST_NEAR_S, _SHARE_OF_NEAR = 6.0, 1.5, 0.15
#: A setting is attempted early if its estimated step is below this multiple of the incumbent.
_PROMISING = 1.05
#: Number of consecutive early attempts without a better plan that ends the early attempts.
_MAX_FAILED_ATTEMPTS = 20
#: Largest number of passes of micro-batches through stages in a schedule, condensed if it is long, that is attempted early.  Graphs
#: of longer ones take seconds to make.
_MAX_PASSES_OF_EARLY_ATTEMPT = 5_000
#: Number of cuts up to which the first attempt searches single cuts, because one bound of all of them seldom excludes them.
_MAX_CUTS_OF_FULL_ATTEMPT = 1_000_000
#: Number of settings whose schedules are simulated between two early attempts.
_SIMULATIONS_PER_ATTEMPT = 6
#: Shares of the time for early attempts if a plan is known: as long as none has found a better plan, and afterwards.
_SHARE_OF_EARLY_ATTEMPTS, _SHARE_OF_FURTHER_ATTEMPTS = 0.6, 0.05
#: Number of bounds without memory for each family of schedules, after which no more follow if less than this part of them excluded
#: their settings.
_MIN_FREE_BOUNDS, _PART_OF_FREE_BOUNDS = 16, 0.25
#: Share of the proof's time for longer attempts at undecided settings, while others have had none.
_SHARE_OF_LONGER_ATTEMPTS = 0.4


@dataclass(order=True)
class _OpenSetting:
    """A setting that may contain the best plan.  Open settings are ordered by bound, then by number.

    Attributes:
        bound_s: Lower bound on the cost of all plans of the setting.
        number: Position of the setting in the enumeration of the space.
        setting: The setting.
        has_memory_bound: Whether the bound includes the memory limit (:func:`.first_bounds.bound_with_memory`).
        num_attempts: Number of attempts so far.
        search: The search of the setting, if it ended undecided; the next attempt goes on with it.
        estimate_s: Estimate of the step of a good plan; 0 if there is none.
        num_estimates: Precision of the estimate: from the first bound (0), with memory (1), by simulation (2).
    """

    bound_s: float
    number: int
    setting: Setting = field(compare=False)
    has_memory_bound: bool = field(default=False, compare=False)
    num_attempts: int = field(default=0, compare=False)
    search: SettingSearch | None = field(default=None, compare=False)
    estimate_s: float = field(default=0.0, compare=False)
    num_estimates: int = field(default=0, compare=False)


@dataclass
class Explored:
    """The result of a search.

    Attributes:
        best: The best plan found; None if no plan is better than the given one.
        lower_bound_s: Lower bound on the cost of all plans of the settings.
        num_configurations: Number of configurations (cuts of settings) in the space.
        num_settings: Number of settings in the space.
        num_impossible: Number of settings in which some layer has no strategy.
        num_simulated: Number of plans whose schedule was simulated.
        is_finished: Whether the search ended because no open setting can be better, rather than by the deadline.
        attempted: The settings that were attempted.
    """

    best: Evaluation | None = None
    lower_bound_s: float = math.inf
    num_configurations: int = 0
    num_settings: int = 0
    num_impossible: int = 0
    num_simulated: int = 0
    is_finished: bool = True
    attempted: set[Setting] = field(default_factory=set)


def explore(
    explorer: Explorer,
    settings: Iterable[Setting],
    known_s: float = math.inf,
    deadline: Deadline | None = None,
    report: Callable[[float, float, int], None] = lambda best, bound, simulated: None,
    patience: Deadline | None = None,
) -> Explored:
    """Search settings for the best configuration that costs less than ``known_s``.

    Args:
        explorer: The tables and prices of the model on the cluster.
        settings: The settings to search.
        known_s: Cost of the best plan known so far; infinite if none is known.
        deadline: When to end the search with the best plan so far.  Its stop should be the explorer's, so that a stop also ends
            the step that is being computed.
        report: Called with the incumbent's cost, the least open bound and the number of simulated plans.
        patience: When to end the search as long as it has found no plan; None for the deadline.
    """
    search = Search(explorer, settings, known_s, report, patience)
    return search.resume(known_s, deadline or Deadline())


class Search:
    """A search that can be interrupted and resumed.

    Args:
        explorer, settings, known_s, report, patience: As of :func:`explore`.
        known: The setting of the plan that costs ``known_s``; None if it is unknown.
    """

    def __init__(
        self,
        explorer: Explorer,
        settings: Iterable[Setting],
        known_s: float = math.inf,
        report: Callable[[float, float, int], None] = lambda best, bound, simulated: None,
        patience: Deadline | None = None,
        known: Setting | None = None,
    ):
        self.explorer, self.best_s, self.known = explorer, known_s, known
        self.report, self.patience = report, patience
        self.deadline = Deadline()
        self.result = Explored()
        self.open: list[_OpenSetting] = []
        self._settings = iter(settings)
        #: The setting that gets its first bound next; None before it is read from the iterator.
        self._next: Setting | None = None
        self._first_bounds: dict[object, float] = {}
        #: Settings that attempts left undecided, by the number of attempts; no attempt is left for the last ones.  They are heaps.
        self._undecided: tuple[list[_OpenSetting], ...] = tuple([] for _ in range(len(_ATTEMPTS_S) + 1))
        #: Seconds of processor time of the proof, and of longer attempts at undecided settings.
        self._proof_s = self._longer_s = 0.0
        #: Whether every setting has a first bound.
        self.is_bounded = False
        self._share_of_early_attempts = _SHARE_OF_EARLY_ATTEMPTS
        #: Per family of schedules, whether each bound without memory excluded its setting.
        self._free_bounds: dict[str, list[bool]] = {}
        #: The setting of the incumbent.
        self._best_setting: _OpenSetting | None = None
        #: Cost of the plan near which better ones were looked for the last time.
        self._improved_s = math.inf

    def find_incumbent(self, deadline: Deadline, share: float, is_good: bool = False) -> Evaluation | None:
        """Bound all settings, and attempt the most promising ones.

        Args:
            deadline: When to end.
            share: Share of the deadline's time limit for the attempts.
            is_good: Whether the plan that is known comes from a search, so that a better one is not worth as much time.

        Returns:
            The best plan; None if none is better than ``known_s``.
        """
        self.deadline = deadline
        try:
            with self.explorer.stop.until(self.patience or deadline):
                self.bound_all()
                self.attempt_promising(_time_slice(deadline, share * deadline.limit_s))
        except StopRequestedError:
            pass
        if is_good or self.result.best is not None:
            self._share_of_early_attempts = _SHARE_OF_FURTHER_ATTEMPTS
        return self.result.best

    def resume(self, known_s: float, deadline: Deadline) -> Explored:
        """Continue the search until it is finished or the deadline is over.

        Args:
            known_s: Cost of the best plan known by now.
            deadline: When to end the search.
        """
        self.best_s, self.deadline = min(self.best_s, known_s), deadline
        try:
            with self.explorer.stop.until(self.patience or deadline):
                self.bound_all()
                share = self._share_of_early_attempts if math.isfinite(self.best_s) else 1.0
                self.attempt_promising(_time_slice(self._end, share * self._end.left_s))
                self.prove()
        except StopRequestedError:
            self.result.is_finished = False
        self.result.lower_bound_s = self.lower_bound_s
        return self.result

    @property
    def limit_s(self) -> float:
        """A plan is better than the incumbent only if its cost is below this limit."""
        return self.best_s * (1 - RELATIVE_TOLERANCE)

    @property
    def lower_bound_s(self) -> float:
        """Lower bound on the cost of all plans; 0 as long as some setting has no bound."""
        if not self.is_bounded:
            return 0.0
        return min([self.best_s, *(entry.bound_s for queue in self._queues for entry in queue)])

    @property
    def _queues(self) -> tuple[list[_OpenSetting], ...]:
        return self.open, *self._undecided

    @property
    def is_over(self) -> bool:
        """Whether the search must end."""
        return self._end.is_over

    @property
    def _end(self) -> Deadline:
        """When the search ends, as far as is known by now."""
        return self.deadline if self.patience is None or self.result.best is not None else self.patience

    def bound_all(self) -> None:
        """Give every setting its first bound, continuing after the last setting that has one.

        Raises:
            StopRequestedError: the search must end before all settings have a bound.
        """
        if self.is_over:
            raise StopRequestedError
        for recomputation in ways_of_balance(self.explorer) if not self.is_bounded else ():
            self.explorer.price_units(recomputed_inside(recomputation))
        while not self.is_bounded:
            if self._next is None:
                self._next = next(self._settings, None)
            self.explorer.stop.check()
            if self._next is None:
                heapq.heapify(self.open)
                self.is_bounded = True
                return
            bound_s = self._first_bound(self._next)
            self.result.num_settings += 1
            self.result.num_configurations += self._num_cuts(self._next)
            if bound_s == math.inf:
                self.result.num_impossible += 1
            else:
                self.open.append(_OpenSetting(bound_s, self.result.num_settings, self._next))
            self._next = None
            if self.is_over:
                raise StopRequestedError

    def _num_cuts(self, setting: Setting) -> int:
        return math.comb(self.explorer.chain.num_units - 1, setting.schedule.num_stages - 1)

    def _first_bound(self, setting: Setting) -> float:
        """The bound by balance, which is the same for all schedules of one class."""
        key = (setting.mesh, setting.micro_batch, setting.smallest_pass, bound_class(setting.schedule))
        if key not in self._first_bounds:
            self._first_bounds[key] = bound_by_balance(self.explorer, setting) * ROUNDING
        return self._first_bounds[key]

    def attempt_promising(self, deadline: Deadline) -> None:
        """Attempt the settings with the smallest estimated steps, until no estimate is near the incumbent or better.

        Each setting of equal workers passes three estimates of increasing precision: from its first bound, with memory, and by
        simulating its schedule.  The first ones are rough.  So the best of a few simulated settings is attempted before more of
        them are simulated.

        Args:
            deadline: When to end; the search may go on.
        """
        # Estimates of an earlier call are kept.
        queue: list[tuple[float, int, _OpenSetting]] = []
        simulated: list[tuple[float, int, _OpenSetting]] = []
        for entry in self.open:
            is_small = num_condensed_passes(entry.setting.schedule) <= _MAX_PASSES_OF_EARLY_ATTEMPT
            if isinstance(entry.setting.mesh, StageMesh) and is_small and not entry.num_attempts:
                entry.estimate_s = entry.estimate_s or first_estimate(entry.setting, entry.bound_s)
                (simulated if entry.num_estimates == 2 else queue).append((entry.estimate_s, entry.number, entry))
        heapq.heapify(queue)
        heapq.heapify(simulated)
        num_failed = 0
        while not deadline.is_over and num_failed < _MAX_FAILED_ATTEMPTS:
            # Refine the smallest estimates until a few more settings are simulated.
            num_new = 0
            while (
                queue
                and queue[0][0] < _PROMISING * self.best_s
                and num_new < _SIMULATIONS_PER_ATTEMPT
                and not deadline.is_over
            ):
                _, number, entry = heapq.heappop(queue)
                if entry.bound_s >= self.limit_s:
                    continue
                known_s = entry.estimate_s
                if not entry.num_estimates:
                    refined_s = estimate_with_memory(self.explorer, entry.setting, known_s)
                else:
                    # The proof needs this bound, too, and simulating a schedule takes longer.
                    self._bound_with_memory(entry)
                    if entry.bound_s >= self.limit_s:
                        continue
                    refined_s = estimate_by_simulation(self.explorer, entry.setting, known_s, self.best_s)
                entry.estimate_s = max(known_s, refined_s)
                entry.num_estimates += 1
                is_simulated = entry.num_estimates == 2
                heapq.heappush(simulated if is_simulated else queue, (entry.estimate_s, number, entry))
                num_new += is_simulated
            if not simulated or simulated[0][0] >= _PROMISING * self.best_s:
                if num_new:
                    continue
                break
            # Attempt the best simulated setting.
            before = self.best_s
            self._attempt(heapq.heappop(simulated)[2], is_early=True)
            num_failed = 0 if self.best_s < before else num_failed + 1
            self.report(self.best_s, self.lower_bound_s, self.result.num_simulated)
        self._improve_incumbent()
        self.open = [entry for entry in self.open if entry.bound_s < self.limit_s]
        for one in self._queues:
            heapq.heapify(one)

    def _improve_incumbent(self) -> None:
        """Look for better plans near the incumbent, and then by longer attempts at its setting, as long as they find one."""
        self._improve_near_incumbent()
        entry = self._best_setting
        if entry is None and self.known is not None:
            entry = next((one for one in self.open if one.setting == self.known), None)
        before = math.inf
        while entry is not None and entry.bound_s < self.limit_s and not self.is_over:
            is_nearly_settled = entry.bound_s >= _NEARLY_SETTLED * self.best_s
            most = _MAX_CLOSE_ATTEMPTS if is_nearly_settled else _MAX_EARLY_ATTEMPTS
            is_worth_it = is_nearly_settled or self.best_s < before
            if entry.num_attempts >= most or not is_worth_it:
                break
            before = self.best_s
            self._attempt(entry)
            self.report(self.best_s, self.lower_bound_s, self.result.num_simulated)

    def _improve_near_incumbent(self) -> None:
        """Look for better plans near the incumbent, if it was found since the last time."""
        plan = self.result.best
        if plan is None or self.best_s >= self._improved_s or not plan.configuration.schedule.synchronous:
            return
        limit_s = min(_LONGEST_NEAR_S, _SHARE_OF_NEAR * self._end.left_s)

        def tell(better_s: float) -> None:
            self.report(better_s, self.lower_bound_s, self.result.num_simulated)

        near = improve_near(self.explorer, plan, Clock(limit_s, self._end.stop), _LEAST_NEAR_S, limit_s, tell)
        near_s = near.cost(self.explorer.pricing.objective)
        if near_s < self.best_s:
            self.result.best, self.best_s = near, near_s
        self._improved_s = self.best_s

    def prove(self) -> None:
        """Sharpen and attempt the setting with the least bound, until no bound is below the incumbent."""
        while (queue := self._queue_of_least()) is not None:
            if self.is_over:
                self.result.is_finished = False
                return
            # The setting stays in its queue until it has its new bound: a stop may come at any time.
            entry, began = queue[0], time.process_time()
            self.report(self.best_s, min(one[0].bound_s for one in self._queues if one), self.result.num_simulated)
            if not entry.has_memory_bound:
                self._bound_with_memory(entry)
                heapq.heapreplace(queue, entry)
            else:
                self._attempt(entry)
                self._improve_near_incumbent()
                heapq.heappop(queue)
                if entry.bound_s < self.limit_s:
                    self._put_back(entry)
            spent_s = time.process_time() - began
            self._proof_s += spent_s
            self._longer_s += 0.0 if queue is self.open else spent_s
        self.result.is_finished = not any(entry.bound_s < self.limit_s for entry in self._undecided[-1])

    def _put_back(self, entry: _OpenSetting) -> None:
        """Put a setting to the undecided ones."""
        heapq.heappush(self._undecided[min(entry.num_attempts, len(_ATTEMPTS_S))], entry)

    def _bound_with_memory(self, entry: _OpenSetting) -> None:
        """Raise the bound of a setting by memory and whole units.

        Bounds without memory come first unless they have excluded few settings of this family of schedules.
        """
        if entry.has_memory_bound:
            return
        tries = self._free_bounds.setdefault(entry.setting.schedule.name, [])
        tries_free = len(tries) < _MIN_FREE_BOUNDS or sum(tries) > _PART_OF_FREE_BOUNDS * len(tries)
        bound_s, is_free_enough = bound_with_memory(self.explorer, entry.setting, self.best_s, tries_free)
        if tries_free:
            tries.append(is_free_enough)
        entry.bound_s, entry.has_memory_bound = max(entry.bound_s, bound_s), True

    def _queue_of_least(self) -> list[_OpenSetting] | None:
        """The queue whose first setting is settled next: of those without an attempt, or of the undecided ones.

        Of the undecided ones those of the fewest attempts come first: many short attempts settle more settings than a long one.
        If the first of them has the least bound, it gets its next attempt at once if such attempts have taken less than their share
        of the time; else the settings without an attempt come first.  None if no setting is left.
        """
        while self.open and self.open[0].num_attempts:
            self._put_back(heapq.heappop(self.open))
        is_open = bool(self.open) and self.open[0].bound_s < self.limit_s
        undecided = next((one for one in self._undecided[:-1] if one and one[0].bound_s < self.limit_s), None)
        if not is_open or undecided is None:
            return self.open if is_open else undecided
        if undecided[0] < self.open[0]:
            slice_s = _ATTEMPTS_S[undecided[0].num_attempts]
            if self._longer_s + slice_s < _SHARE_OF_LONGER_ATTEMPTS * self._proof_s:
                return undecided
        return self.open

    def _slice_s(self, entry: _OpenSetting) -> float:
        """Seconds of the next attempt at a setting: if all settings that are left had several ones, at least a share of the time
        that is left, since an attempt that is interrupted loses the step that it was at."""
        time_s = _ATTEMPTS_S[min(entry.num_attempts, len(_ATTEMPTS_S) - 1)]
        limit_s, few = self.limit_s, (self.open, *self._undecided[:_MIN_SHORT_ATTEMPTS])
        if not math.isfinite(self._end.left_s) or any(queue and queue[0].bound_s < limit_s for queue in few):
            return time_s
        num_left = sum(one.bound_s < limit_s for queue in self._undecided for one in queue)
        return max(time_s, min(1.0, _EQUAL_SHARES / max(1, num_left)) * self._end.left_s)

    def _attempt(self, entry: _OpenSetting, is_early: bool = False) -> None:
        """Search one setting for a better plan within its time slice; raise its bound.

        Args:
            entry: The setting.
            is_early: Whether a good plan matters more than the bound.
        """
        self.result.attempted.add(entry.setting)
        time_s = self._slice_s(entry)
        deadline = _time_slice(self._end, time_s)
        is_quick = not entry.num_attempts and self._num_cuts(entry.setting) > _MAX_CUTS_OF_FULL_ATTEMPT
        resumed, entry.search = entry.search, None
        setting_search = resumed or SettingSearch(
            self.explorer, entry.setting, self.best_s, deadline, is_quick, is_early
        )
        num_simulated, best_s = setting_search.simulated, self.best_s
        setting_search.incumbent.tell = lambda better_s: self.report(
            better_s, self.lower_bound_s, self.result.num_simulated
        )
        entry.num_attempts += 1
        try:
            with self.explorer.stop.until(_time_slice(self._end, time_s + max(_LONGEST_STEP_S, time_s / 2))):
                if resumed is None:
                    setting_search.run()
                else:
                    setting_search.resume(self.best_s, deadline)
        except UnsettledError:
            entry.search = setting_search
        except StopRequestedError:
            entry.search = setting_search
            self.explorer.stop.check()  # raises if more than this attempt has to end
        finally:
            self.result.num_simulated += setting_search.simulated - num_simulated
            if setting_search.best is not None and setting_search.best_s < best_s:
                self.result.best, self.best_s = setting_search.best, setting_search.best_s
                self._best_setting = entry
            entry.bound_s = max(entry.bound_s, setting_search.bound_s * ROUNDING)


def _time_slice(deadline: Deadline, seconds: float) -> Deadline:
    """A deadline in processor time after ``seconds``, or when the given deadline is over if that is earlier."""
    return Deadline(min(seconds, deadline.left_s), deadline.stop, time.process_time)
