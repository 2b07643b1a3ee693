"""The best plan of one setting, or that none is better than what is known: all its cuts, all ways to run their stages.

A plan is a way through the setting's terrain (:mod:`.terrain`) with a row for every arc on it.  Its step is the longest path of the
schedule's graph, so that *every* path is a lower bound, linear in what the stages take.  Of the paths that matter there are few:

1. Look for a way that is below the threshold on all paths known so far; there is none: the setting is settled.
2. Work out its step.  It is at or above the threshold: its longest path joins those known, and this way, with all that are like it,
   is out of the question from now on.
3. It is below: where arcs on the way are not known to the last grade, take them to the next one.
4. All are: it is the best plan so far, its step is the new threshold.

So the paths are cutting planes, and ways are only ever looked for, not listed.  **The search for a way** goes stage by stage, least
first; what is still to come is at least what the way back over the arcs tells for each path by itself.  A state (stage, unit, layout)
that led to nothing at some sums leads to nothing at sums which are nowhere less.  Sums are of all paths, of the bytes on each worker
that holds several stages, and the gradients' bytes of shared weights that another stage waits for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.stopping import Deadline
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.stepgraph import StepGraph
from autoddl.search.fronts import undominated

from .bounds import balance, loads
from .evaluation import Evaluation
from .explorer import SAME, Course, Explorer, Setting
from .relaxation import Relaxation
from .stages import Rows, Wanted
from .terrain import PRICES, Arc, Bound, Terrain, TooManyError

__all__ = ["Settled", "Settling", "UnsettledError", "level_cut"]

#: States that a search for a way holds at a time before it is given up.
_MOST_STATES = 300_000
#: Steps of a descent before all states are spread.
_MOST_STEPS = 300
#: Ways on that are looked at in one go.
_CHUNK = 1 << 17
#: Rounds of an ascent, the first one and later ones.
_FIRST_ROUNDS, _ROUNDS = 40, 8
#: Progress of a round, relatively, that is none.
_STALLED = 1e-3
#: Long paths that are held at a time.
_MOST_PATHS = 80
#: Paths that rows are wanted by.
_MOST_GUIDES = 5
#: Paths that a search for rows is guided by.
_MOST_BOUNDS = 12


@dataclass(frozen=True)
class Settled:
    """What is known of a setting: its best plan, if one was below the threshold, and that no plan is below ``bound_s``."""

    best: Evaluation | None
    bound_s: float
    simulated: int


#: First unit and unit behind it of every stage.
_Cut = list[tuple[int, int]]
#: (stage, first unit, unit behind it, row or -1) of every stage.
_Way = list[tuple[int, int, int, int]]
#: Sums of the same terms in another order differ by less: what is at the threshold is not below it.
ROUNDING = 1 - 1e-12


class UnsettledError(Exception):
    """The work on a setting was given up."""


class _TooManyStatesError(Exception):
    """A search for a way has come to its limit."""


@dataclass(frozen=True, eq=False)
class _Candidates:
    """The ways on from (stage, unit): one entry each.

    Attributes:
        stop: where the arc ends.
        row: of the arc; -1 where it has none yet.
        costs: its part of every bound; shape (entries, bounds).
        memory, buffer: bytes.
        shared: bytes of shared weights' gradients; shape (entries, weights of the stage).
        entry, exit: numbers of layouts, -1 for any.
    """

    stop: np.ndarray
    row: np.ndarray
    costs: np.ndarray
    memory: np.ndarray
    buffer: np.ndarray
    shared: np.ndarray
    entry: np.ndarray
    exit: np.ndarray


@dataclass(frozen=True, eq=False)
class _States:
    """States of one (unit, layout): sums, and where each came from.

    Attributes:
        sums: shape (states, columns).
        origin, row: the state before, and the way on from it.
        key: of the states before; one for all, or several of which ``number`` tells the right one.
    """

    sums: np.ndarray
    origin: np.ndarray
    row: np.ndarray
    came: tuple[int, int]
    key: tuple[tuple[int, int], ...] = ()
    number: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.intp))

    @classmethod
    def first(cls, sums: np.ndarray) -> _States:
        none = np.zeros(1, dtype=np.intp)
        return cls(sums[None], none, none, (0, -1))

    @classmethod
    def joined(cls, parts: Sequence[_States]) -> _States:
        """All of them, those left out that another one is nowhere above."""
        sums = np.concatenate([part.sums for part in parts])
        number = np.repeat(np.arange(len(parts)), [len(part.sums) for part in parts])
        kept = undominated(np.zeros(len(sums), dtype=np.intp), sums - sums.min(axis=0, initial=0.0))
        return cls(
            sums[kept],
            np.concatenate([part.origin for part in parts])[kept],
            np.concatenate([part.row for part in parts])[kept],
            (0, -1),
            tuple(part.came for part in parts),
            number[kept],
        )


def _grouped(*columns: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Equal rows of several columns of whole numbers, and where they are."""
    if not len(columns[0]):
        return
    rows = np.stack(columns, axis=1)
    distinct, number = np.unique(rows, axis=0, return_inverse=True)
    number = number.ravel()
    for place, row in enumerate(distinct.tolist()):
        yield tuple(row), np.flatnonzero(number == place)


@dataclass(frozen=True, eq=False)
class _Guide:
    """A path, and the least that it comes to before a stage that begins with a unit, and from such a stage on; per stage."""

    weights: np.ndarray
    before: Sequence[np.ndarray]
    behind: Sequence[np.ndarray]


@dataclass(frozen=True)
class _Region:
    """Some of the cuts: for each boundary the units that may stand first behind it, from one to another."""

    ranges: tuple[tuple[int, int], ...]
    num_units: int

    @classmethod
    def whole(cls, num_stages: int, num_units: int) -> _Region:
        return cls(tuple((b, num_units - num_stages + b) for b in range(1, num_stages)), num_units)

    def among(self, costs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The costs of arcs, infinite outside of the region."""
        found = [cost.copy() for cost in costs]
        for boundary, (first, last) in enumerate(self.ranges):
            found[boundary][:, :first] = found[boundary][:, last + 1 :] = np.inf
        return found

    def nearest(self, places: np.ndarray) -> tuple[int, ...]:
        """The cut whose boundaries are near the places."""
        found, before = [], 0
        for (first, last), place in zip(self.ranges, places.tolist()):
            before = min(max(round(place), first, before + 1), last)
            found.append(before)
        return tuple(found)

    def divided(self, places: np.ndarray) -> list[_Region]:
        """Two parts of it, by the boundary of a divided cut that is the furthest from standing between units; none where there is one
        cut alone."""
        room = np.array([last - first for first, last in self.ranges])
        if not room.any():
            return []
        off = np.where(room > 0, np.abs(places - np.round(places)) + 1e-6 * room, -1.0)
        boundary = int(off.argmax())
        first, last = self.ranges[boundary]
        middle = min(max(first, math.floor(places[boundary])), last - 1)
        return [self._with(boundary, (first, middle)), self._with(boundary, (middle + 1, last))]

    def _with(self, boundary: int, ends: tuple[int, int]) -> _Region:
        """With one boundary from ``ends``, and the others where that leaves a unit for every stage."""
        ranges = list(self.ranges)
        ranges[boundary] = ends
        for b in range(boundary + 1, len(ranges)):
            ranges[b] = max(ranges[b][0], ranges[b - 1][0] + 1), ranges[b][1]
        for b in range(boundary - 1, -1, -1):
            ranges[b] = ranges[b][0], min(ranges[b][1], ranges[b + 1][1] - 1)
        return _Region(tuple(ranges), self.num_units)


@dataclass(frozen=True)
class _SharedWeight:
    """A weight that two stages hold: (stage, place among what it shares) of the earlier and of the later one."""

    early: tuple[int, int]
    late: tuple[int, int]
    link: object


class Settling:
    """One setting.

    Args:
        known_s: the step to be below.
        look: how far to go: 0: separable, 1: whole stages, 2: all (the grades of :mod:`.terrain`).
    """

    def __init__(
        self,
        explorer: Explorer,
        setting: Setting,
        known_s: float,
        deadline: Deadline,
        look: int = 2,
    ):
        needs = explorer.needs(setting.schedule)
        assert needs is not None
        self.explorer, self.setting, self.deadline = explorer, setting, deadline
        self.course = explorer.course(setting)
        self.terrain = Terrain(explorer, setting, explorer.recomputations, needs)
        self.relaxation = Relaxation(explorer.chain.kinds, self.terrain.num_stages, self.terrain.least_transfers)
        self.homes, self.look = needs.homes, look
        self.simulated = 0
        self.best: Evaluation | None = None
        self.best_s = known_s
        self.bounds: list[Bound] = []
        self._costs: list[list[np.ndarray]] = []
        self._allowed: list[np.ndarray] | None = None
        self._candidates: dict[tuple[int, int], _Candidates] = {}
        self._failed: dict[tuple[int, int, int], list[np.ndarray]] = {}
        #: No plan of the setting is below it.
        self.bound_s = 0.0
        self._most_states = _MOST_STATES
        self._price: float | None = None
        self._prices: tuple[float, ...] = (0.0, *PRICES)
        self._regions = 0
        self._region = _Region.whole(self.terrain.num_stages, self.terrain.num_units)
        self._paths: list[np.ndarray] = []
        self._mean = self._places = np.zeros(0)
        self._shared = self._shared_weights()
        self._workers = [worker for worker, held in enumerate(self.homes) if len(held) > 1]
        place = {worker: number for number, worker in enumerate(self._workers)}
        #: Of every stage the places of its workers among those that hold several.
        self._worker_of: list[list[int]] = [[] for _ in range(self.terrain.num_stages)]
        for worker in self._workers:
            for _, stage in self.homes[worker]:
                self._worker_of[stage].append(place[worker])

    @property
    def graph(self) -> StepGraph:
        """Of the course, which is a synchronous one."""
        assert self.course.graph is not None
        return self.course.graph

    @property
    def threshold(self) -> float:
        return self.best_s * (1 - SAME)

    # -------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> Settled:
        """Settle it.

        Raises:
            UnsettledError: the deadline came first, or it is too large.
        """
        for path in (balance(self.setting.schedule, self.setting.widths), *loads(self.setting.schedule), *self.course.paths):
            self._learn(path, from_course=True)
        if not self.setting.schedule.synchronous:
            return self._drifting()
        open_ones = [self._region]
        while open_ones:
            self._region = open_ones.pop()
            open_ones += self._explored(_FIRST_ROUNDS if not self._regions else _ROUNDS)
            self._regions += 1
        return Settled(self.best, self.best_s, self.simulated)

    def _drifting(self) -> Settled:
        """An asynchronous schedule's period is no longest path: bounded by what its workers put through, and tried.

        Raises:
            UnsettledError: its bound is below the threshold, whatever was tried.
        """
        relaxed = self.relaxation.solve(self._region.ranges)
        if relaxed is not None:
            self._mean = np.asarray(relaxed.shares @ np.array(self._paths))
            self.bound_s, lowest = self._least()
            if self.bound_s < self.threshold:
                near = self._region.nearest(relaxed.places)
                self._level()
                for cut in (list(zip((0, *near), (*near, self.terrain.num_units))), lowest):
                    self._check()
                    self._try(cut, self._mean)
                if self.bound_s < self.threshold:
                    raise UnsettledError
        return Settled(self.best, self.best_s, self.simulated)

    def _level(self) -> bool:
        """Try the cut whose most loaded stage has the least to do, memory at a price; whether one may be below the threshold."""
        spec, terms = self.setting.schedule, self.terrain.terms
        weights = np.zeros(terms.count)
        for load in loads(spec):
            weights = np.maximum(weights, load)
        most, cut = level_cut(self.terrain.costs(Bound(weights), self.best_s))
        if most >= self.threshold:
            return False
        if self.terrain.is_alone:
            self.bound_s = max(self.bound_s, most)
        weights[terms.all_reduce] = 1.0
        longest = self._try(cut, weights)
        if longest is not None:
            self._learn(longest)
        return True

    def _explored(self, rounds: int) -> list[_Region]:
        """Settle the cuts of a region, or divide it."""
        while True:
            if self._ascend(rounds):
                return []
            if self.look < 2 and self._regions > 8:
                raise UnsettledError
            if self.look == 2 and self._load_lowest():
                continue
            parts = self._region.divided(self._places)
            if parts:
                return parts
            if self.look < 2:
                raise UnsettledError
            way = self._searched()
            if way is None:
                return []
            if self._times(way)[1]:
                self._found(way)
            else:
                self._work_out_crossings(way)

    def _load_lowest(self) -> bool:
        """Work out the rows of the arcs of the cut that is the least on the mean path; whether there was one without."""
        _, cut = self._least()
        lacking = [(stage, *ends) for stage, ends in enumerate(cut) if self.terrain.grade(stage, *ends) < 2]
        if lacking:
            guides = self._guides()
            for arc in lacking:
                self._check()
                self._load(guides, *arc)
        return bool(lacking)

    def _ascend(self, rounds: int) -> bool:
        """Take in the longest paths of the best divided cuts (:mod:`.relaxation`) and of whole ones near by, until the mean of paths is
        at the threshold on all cuts of the region: whether it has come to that.

        Raises:
            UnsettledError: it has not, and more would be asked than the look allows.
        """
        stalled, last = 0, 0.0
        center_s, center = math.inf, self.relaxation.even(self.setting.widths)
        for _ in range(rounds):
            self._check()
            relaxed = self.relaxation.solve(self._region.ranges)
            if relaxed is None:
                return True
            self._places = relaxed.places
            self._mean = np.asarray(relaxed.shares @ np.array(self._paths))
            least, lowest = self._least()
            if not least < self.threshold * ROUNDING:
                return True
            if not self._regions:
                self.bound_s = max(self.bound_s, least)
            near = self._region.nearest(relaxed.places)
            ends = list(zip((0, *near), (*near, self.terrain.num_units)))
            of_units = self.terrain.at_least(Bound(self._mean, self._price), ends, self.best_s)
            # Halfway to the best divided cut so far, too: the best one of the program alone swings from one extreme to another.
            is_new = False
            for amounts in ((relaxed.amounts + center) / 2, relaxed.amounts):
                step, path = self.graph.step(self.relaxation.times(amounts, of_units))
                is_new |= self._learn(path)
                if step < center_s:
                    center_s, center = step, amounts
            for cut in (ends, lowest):
                is_new |= self._visit(cut, of_units)
            stalled = 0 if relaxed.step_s > last * (1 + _STALLED) else stalled + 1
            if not is_new or stalled == 3:
                break
            last = max(last, relaxed.step_s)
        return False

    def _check(self) -> None:
        """Whether to go on.

        Raises:
            StopRequestedError, UnsettledError
        """
        self.explorer.stop.check()
        if self.deadline.is_over:
            raise UnsettledError

    def _visit(self, cut: _Cut, of_units: np.ndarray) -> bool:
        """Take in the longest path of a cut; whether something new was learned of it.

        First with what its units take; where that is below the threshold, with the best rows.
        """
        terrain, terms = self.terrain, self.terrain.terms
        if any(terrain.is_closed(stage, *ends) for stage, ends in enumerate(cut)):
            return False
        sums = np.concatenate([np.zeros((4, terrain.num_stages, 1)), np.cumsum(of_units, axis=2)], axis=2)
        times = np.zeros(terms.count)
        parts = (terms.forward, terms.backward, terms.recompute, terms.all_reduce)
        for stage, (first, stop) in enumerate(cut):
            for part, of_one in zip(parts, sums):
                times[part.start + stage] = of_one[stage, stop] - of_one[stage, first]
            if stage:
                transfer = terrain.least_transfer(stage - 1, first)
                times[terms.transfer_forward.start + stage - 1] = transfer
                times[terms.transfer_backward.start + stage - 1] = transfer
        step, path = self.graph.step(times)
        is_new = self._learn(path)
        if step >= self.threshold:
            return is_new
        if self.look == 0:
            if self._level():
                self._try(cut, path)
            raise UnsettledError
        coarse = [(stage, *ends) for stage, ends in enumerate(cut) if terrain.grade(stage, *ends) < 1]
        for arc in coarse:
            terrain.refine(*arc)
        real = self._try(cut, self._mean)
        if real is not None:
            is_new |= self._learn(real)
        return is_new or bool(coarse)

    def _least(self) -> tuple[float, list[tuple[int, int]]]:
        """The least of the mean path over the cuts of the region, memory at the best price; and that cut."""
        best: tuple[float, list[tuple[int, int]]] = (-math.inf, [])
        prices: list[float | None] = [None]
        if not self.terrain.is_alone and math.isfinite(self.best_s):
            # Near the price that was the best one; all of them at first.
            prices = [part * self.best_s / self.terrain.limit for part in self._prices]
        chosen = 0
        for place, price in enumerate(prices):
            costs = self._region.among(self.terrain.costs(Bound(self._mean, price), self.best_s))
            found = _least_cut(costs)
            if found[0] > best[0]:
                best, chosen, self._price = found, place, price
            if found[0] >= self.threshold:
                return found
        if len(prices) > 1:
            self._prices = tuple(self._prices[max(0, chosen - 1) : chosen + 2])
        return best

    def _main_paths(self, most: int) -> list[np.ndarray]:
        """The paths that were of use the latest."""
        return [self._paths[number] for number in self.relaxation.latest(most)]

    def _learn(self, path: np.ndarray, from_course: bool = False) -> bool:
        """Take a path in; whether it is a new one."""
        if any(np.array_equal(path, other) for other in self._paths):
            return False
        self._paths.append(path)
        self.relaxation.add(path, self.terrain.of_units(path))
        if not from_course:
            self.course.remember(path)
        if len(self._paths) > _MOST_PATHS:
            used = self.relaxation.least_used(len(self._paths) - _MOST_PATHS // 2)
            self._paths = [path for number, path in enumerate(self._paths) if number not in used]
        return True

    def _searched(self) -> _Way | None:
        """A way that is below the threshold on all bounds, and by its own step; None, and it is settled, where there is none."""
        self.bounds, self._costs = [], []
        self._candidates.clear()
        self._failed.clear()
        self._add(Bound(self._mean))
        for path in self._main_paths(_MOST_BOUNDS):
            self._add(Bound(path))
        if not self.terrain.is_alone and math.isfinite(self.best_s):
            for part in PRICES:
                self._add(Bound(self._mean, part * self.best_s / self.terrain.limit))
        while True:
            self._check()
            if not self._is_open():
                return None
            try:
                way = self._way()
            except _TooManyStatesError as error:
                raise UnsettledError from error
            if way is None:
                return None
            times, _ = self._times(way)
            step, path = self.graph.step(times)
            if step < self.threshold:
                return way
            self._learn(path)
            self._add(Bound(path))

    def _add(self, bound: Bound) -> None:
        self.bounds.append(bound)
        self._costs.append(self.terrain.costs(bound, self.best_s))
        self._candidates.clear()
        self._failed.clear()

    def _is_open(self) -> bool:
        """Close the arcs that are on no way below the threshold; whether there is a way left."""
        stages, size = self.terrain.num_stages, self.terrain.num_units + 1
        self._allowed = [np.isfinite(cost) for cost in self._region.among(self._costs[0])]
        changed = True
        rounds = 0
        while changed and rounds < 4:
            changed, rounds = False, rounds + 1
            for costs in self._costs:
                held = [np.where(allowed, cost, np.inf) for allowed, cost in zip(self._allowed, costs)]
                before = [np.full(size, np.inf)]
                before[0][0] = 0.0
                for cost in held[:-1]:
                    before.append((before[-1][:, None] + cost).min(axis=0))
                behind = np.full(size, np.inf)
                behind[-1] = 0.0
                for stage in range(stages - 1, -1, -1):
                    whole = before[stage][:, None] + held[stage] + behind[None, :]
                    closed = self._allowed[stage] & ~(whole < self.threshold * ROUNDING)
                    if closed.any():
                        changed = True
                        self._allowed[stage] &= ~closed
                    behind = (held[stage] + behind[None, :]).min(axis=1)
                if not behind[0] < self.threshold * ROUNDING:
                    return False
        self._behind = self._least_behind()
        return all(allowed.any() for allowed in self._allowed)

    def _least_behind(self) -> list[np.ndarray]:
        """For every stage and unit the least of each bound that is still to come; shape (units + 1, bounds) each."""
        size = self.terrain.num_units + 1
        assert self._allowed is not None
        found = [np.full((size, len(self._costs)), np.inf) for _ in range(self.terrain.num_stages + 1)]
        found[-1][-1] = 0.0
        for number, costs in enumerate(self._costs):
            for stage in range(self.terrain.num_stages - 1, -1, -1):
                held = np.where(self._allowed[stage], costs[stage], np.inf)
                found[stage][:, number] = (held + found[stage + 1][None, :, number]).min(axis=1)
        return found

    # ---------------------------------------------------------------------------------------------------- looking for a way

    def _way(self) -> _Way | None:
        """(stage, first unit, unit behind it, row or -1) of every stage of a way that is below the threshold on all bounds.

        Raises:
            _TooManyStatesError, UnsettledError
        """
        self._states = 0
        chosen: _Way = []
        sums = np.zeros(len(self.bounds) + len(self._shared) + 2 * len(self._workers))
        try:
            return chosen[::-1] if self._descend(0, 0, -1, sums, chosen) else None
        except _TooManyStatesError:
            return self._spread(sums)

    def _descend(
        self, stage: int, unit: int, layout: int, sums: np.ndarray, chosen: _Way
    ) -> bool:
        """Depth first: a way on from a state, if it has one."""
        if stage == self.terrain.num_stages:
            return True
        self._states += 1
        if self._states > _MOST_STEPS:
            raise _TooManyStatesError
        key = (stage, unit, layout)
        failed = self._failed.setdefault(key, [])
        if any((other <= sums).all() for other in failed):
            return False
        found = self._ways_on(stage, unit)
        new, row, score = self._on(stage, unit, layout, sums[None], found)
        for place in np.argsort(score, kind="stable").tolist():
            at = int(row[place])
            if self._descend(stage + 1, int(found.stop[at]), int(found.exit[at]), new[place], chosen):
                chosen.append((stage, unit, int(found.stop[at]), int(found.row[at])))
                return True
        failed[:] = [other for other in failed if not (sums <= other).all()]
        failed.append(sums)
        return False

    def _spread(self, sums: np.ndarray) -> _Way | None:
        """Breadth first: all states of a stage at once, without those that another one is nowhere above."""
        level: dict[tuple[int, int], _States] = {(0, -1): _States.first(sums)}
        trail: list[dict[tuple[int, int], _States]] = []
        for stage in range(self.terrain.num_stages):
            trail.append(level)
            parts: dict[tuple[int, int], list[_States]] = {}
            total = 0
            for (unit, layout), states in level.items():
                found = self._ways_on(stage, unit)
                chunk = max(1, _CHUNK // max(1, len(found.stop)))
                for begin in range(0, len(states.sums), chunk):
                    self.explorer.stop.check()
                    if self.deadline.is_over:
                        raise UnsettledError
                    new, at, _ = self._on(stage, unit, layout, states.sums[begin : begin + chunk], found)
                    origin, row = np.divmod(at, max(1, len(found.stop)))
                    for key, mine in _grouped(found.stop[row], found.exit[row]):
                        part = _States(new[mine], origin[mine] + begin, row[mine], (unit, layout))
                        parts.setdefault((key[0], key[1]), []).append(part)
                        total += len(mine)
                if total > 4 * self._most_states:
                    raise _TooManyStatesError
            level = {key: _States.joined(several) for key, several in parts.items()}
            if sum(len(states.sums) for states in level.values()) > self._most_states:
                raise _TooManyStatesError
        ends = [key for key in level if len(level[key].sums)]
        if not ends:
            return None
        key, place = ends[0], 0
        chosen: _Way = []
        for stage in range(self.terrain.num_stages - 1, -1, -1):
            states = level[key]
            before, origin, row = states.key[states.number[place]], int(states.origin[place]), int(states.row[place])
            found = self._ways_on(stage, before[0])
            chosen.append((stage, before[0], int(found.stop[row]), int(found.row[row])))
            key, place, level = before, origin, trail[stage]
        return chosen[::-1]

    def _on(
        self, stage: int, unit: int, layout: int, sums: np.ndarray, found: _Candidates
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every way on from states: (sums behind it, number of the state * ways + way, score), those that are below the threshold.

        Args:
            sums: shape (states, columns).
        """
        num = len(self.bounds)
        if not len(found.stop):
            return sums[:0], np.zeros(0, dtype=np.intp), np.zeros(0)
        costs = found.costs + self._extra_crossing(stage, unit, layout, found)
        with np.errstate(invalid="ignore"):
            ahead = costs + self._behind[stage + 1][found.stop]
            room = self.threshold * ROUNDING - sums[:, :num]
            fits = (ahead[None] < room[:, None]).all(axis=2)
        at = np.flatnonzero(fits)
        state, way = np.divmod(at, len(found.stop))
        new = sums[state]
        new[:, :num] += costs[way]
        self._carry(stage, found, way, new)
        first, count = num + len(self._shared), len(self._workers)
        good = (new[:, :num] + self._behind[stage + 1][found.stop[way]] < self.threshold * ROUNDING).all(axis=1)
        for worker in self._worker_of[stage]:
            resident, buffer = first + worker, first + count + worker
            new[:, resident] += found.memory[way]
            new[:, buffer] = np.maximum(new[:, buffer], found.buffer[way])
            good &= new[:, resident] + new[:, buffer] <= self.terrain.limit * (1 + 1e-12)
        new, at, way = new[good], at[good], way[good]
        score = (new[:, :num] + self._behind[stage + 1][found.stop[way]]).max(axis=1, initial=0.0)
        return new, at, score

    def _extra_crossing(self, stage: int, unit: int, layout: int, found: _Candidates) -> np.ndarray:
        """What arriving from a layout takes beyond the least, as far as it is known; shape (ways, bounds)."""
        extra = np.zeros((len(found.stop), len(self.bounds)))
        known = found.entry >= 0
        if layout < 0 or not stage or not known.any():
            return extra
        terms = self.terrain.terms
        seconds = self.terrain.known_crossings(stage - 1, unit, layout, found.entry[known])
        forward = [bound.weights[terms.transfer_forward][stage - 1] for bound in self.bounds]
        backward = [bound.weights[terms.transfer_backward][stage - 1] for bound in self.bounds]
        extra[known] = seconds @ np.array([forward, backward])
        return extra

    def _carry(self, stage: int, found: _Candidates, way: np.ndarray, new: np.ndarray) -> None:
        """Bytes of shared weights, from the first stage that holds them to the last."""
        for place, weight in enumerate(self._shared):
            column = len(self.bounds) + place
            if stage == weight.early[0]:
                new[:, column] = found.shared[way, weight.early[1]]
            elif stage == weight.late[0]:
                self._reduce_shared(weight, found.shared[way, weight.late[1]], new, column)

    def _reduce_shared(self, weight: _SharedWeight, late: np.ndarray, new: np.ndarray, column: int) -> None:
        """Both stages of a shared weight reduce its gradient as far as the one with more of it has it."""
        seconds = self._shared_seconds(weight, np.maximum(new[:, column], late))
        reduce = self.terrain.terms.all_reduce
        for number, bound in enumerate(self.bounds):
            weights = bound.weights[reduce]
            new[:, number] += (weights[weight.early[0]] + weights[weight.late[0]]) * seconds
        new[:, column] = 0.0

    def _ways_on(self, stage: int, unit: int) -> _Candidates:
        key = (stage, unit)
        if key not in self._candidates:
            assert self._allowed is not None
            parts = [self._of_arc(stage, unit, stop) for stop in np.flatnonzero(self._allowed[stage][unit]).tolist()]
            columns = zip(*([getattr(part, name) for name in _Candidates.__dataclass_fields__] for part in parts))
            if not parts:
                none = np.zeros(0, dtype=np.intp)
                shared = np.zeros((0, self._num_shared(stage)))
                self._candidates[key] = _Candidates(
                    none, none, np.zeros((0, len(self.bounds))), none, none, shared, none, none
                )
            else:
                self._candidates[key] = _Candidates(*(np.concatenate(column) for column in columns))
        return self._candidates[key]

    def _num_shared(self, stage: int) -> int:
        return sum(stage in (one.early[0], one.late[0]) for one in self._shared)

    def _of_arc(self, stage: int, unit: int, stop: int) -> _Candidates:
        arc = self.terrain.arcs.get((stage, unit, stop))
        if arc is None or arc.rows is None:
            one = np.zeros(1)
            return _Candidates(
                np.array([stop]),
                np.array([-1]),
                np.array([[costs[stage][unit, stop] for costs in self._costs]]),
                one,
                one,
                np.zeros((1, self._num_shared(stage))),
                np.array([-1]),
                np.array([-1]),
            )
        rows = arc.rows
        costs = np.column_stack([self.terrain.row_costs(bound, stage, arc) for bound in self.bounds])
        if stage < self.terrain.num_stages - 1:
            terms = self.terrain.terms
            crossing = np.array(
                [b.weights[terms.transfer_forward][stage] + b.weights[terms.transfer_backward][stage] for b in self.bounds]
            )
            costs = costs + crossing * self.terrain.least_transfer(stage, stop)
        return _Candidates(
            np.full(len(rows), stop),
            np.arange(len(rows)),
            costs,
            rows.memory,
            rows.buffer,
            rows.shared,
            arc.entry,
            arc.exit,
        )

    # ------------------------------------------------------------------------------------------------------ a way's step

    def _times(self, way: _Way) -> tuple[np.ndarray, bool]:
        """The least that every term takes on a way, and whether nothing takes more."""
        terms, terrain = self.terrain.terms, self.terrain
        times, is_exact = np.zeros(terms.count), True
        shared: dict[tuple[int, int], float] = {}
        before = -1
        for stage, first, stop, row in way:
            arc = terrain.arcs[stage, first, stop]
            assert arc.rows is not None
            values, entry, exit_ = arc.rows.times[row], int(arc.entry[row]), int(arc.exit[row])
            shared.update({(stage, k): float(value) for k, value in enumerate(arc.rows.shared[row])})
            for part, value in zip((terms.forward, terms.backward, terms.recompute, terms.all_reduce), values):
                times[part.start + stage] = value
            if stage:
                least = terrain.least_transfer(stage - 1, first)
                extra = np.zeros(2)
                if before >= 0 and entry >= 0:
                    extra = terrain.known_crossings(stage - 1, first, before, np.array([entry]))[0]
                    is_exact &= terrain.has_crossing(stage - 1, first, before, entry)
                times[terms.transfer_forward.start + stage - 1] = least + extra[0]
                times[terms.transfer_backward.start + stage - 1] = least + extra[1]
            before = exit_
        for weight in self._shared:
            held = [shared.get(end, 0.0) for end in (weight.early, weight.late)]
            seconds = float(self._shared_seconds(weight, np.array([max(held)]))[0]) if max(held) else 0.0
            for stage, _ in (weight.early, weight.late):
                times[terms.all_reduce.start + stage] += seconds
        return times, is_exact

    def _work_out_crossings(self, way: _Way) -> None:
        """What the layouts on a way really take to pass from stage to stage."""
        for (stage, first, stop, row), (_, begin, end, other) in zip(way, way[1:]):
            source = int(self.terrain.arcs[stage, first, stop].exit[row])
            target = int(self.terrain.arcs[stage + 1, begin, end].entry[other])
            self.terrain.crossing(stage, begin, source, target)
        self._failed.clear()

    def _shared_weights(self) -> tuple[_SharedWeight, ...]:
        """Those whose stages are run by different workers; which depends on the cut alone where it has several units (the first and
        the last one hold it in transformers)."""
        chain, setting = self.explorer.chain, self.setting
        if not chain.shares_weights:
            return ()
        found = []
        last = self.terrain.num_stages - 1
        placement = self.terrain.placement[0]
        for here, there in chain.ends_of_ties():
            if (here, there) != (0, chain.num_units - 1):
                raise UnsettledError
            workers = placement[0], placement[last]
            if workers[0] != workers[1]:
                link = setting.mesh.link_between(self.explorer.cluster, workers)
                number = len(found)
                found.append(_SharedWeight((0, number), (last, number), link))
        return tuple(found)

    def _shared_seconds(self, weight: _SharedWeight, nbytes: np.ndarray) -> np.ndarray:
        times = {}
        for value in np.unique(nbytes).tolist():
            step = Step(Collective.ALL_REDUCE, Axis(2, 1), value)
            times[value] = weight.link.time(step)  # type: ignore[attr-defined]
        return np.array([times[value] for value in nbytes.tolist()])

    # ------------------------------------------------------------------------------------------------------------- rows

    def _guides(self) -> list[_Guide]:
        """The mean path and those that have the most part in it, with what they come to before and behind every arc."""
        found = []
        for weights in (self._mean, *self._main_paths(_MOST_GUIDES)):
            costs = self.terrain.costs(Bound(weights), self.best_s)
            size = self.terrain.num_units + 1
            before, behind = [np.full(size, np.inf)], [np.full(size, np.inf)]
            before[0][0] = behind[0][-1] = 0.0
            for cost in costs[:-1]:
                before.append((before[-1][:, None] + cost).min(axis=0))
            for cost in reversed(costs):
                behind.append((cost + behind[-1][None, :]).min(axis=1))
            found.append(_Guide(weights, before, behind[::-1]))
        return found

    def _load(self, guides: Sequence[_Guide], stage: int, first: int, stop: int) -> None:
        """The rows of an arc that can be on a way below the threshold."""
        if self.terrain.grade(stage, first, stop) == 2:
            return
        terms, limit, wanted = self.terrain.terms, self.terrain.limit, []
        for guide in guides if math.isfinite(self.best_s) else ():
            weights = guide.weights
            room = self.threshold - guide.before[stage][first] - guide.behind[stage + 1][stop]
            if stage < self.terrain.num_stages - 1:
                crossing = weights[terms.transfer_forward][stage] + weights[terms.transfer_backward][stage]
                room -= float(crossing) * self.terrain.least_transfer(stage, stop)
            parts = (terms.forward, terms.backward, terms.recompute, terms.all_reduce)
            own = tuple(float(weights[part][stage]) for part in parts)
            wanted.append(Wanted((*own, 0.0), room))  # type: ignore[arg-type]
        for one in wanted[:2]:
            for part in PRICES[1:4]:
                price = part * max(one.threshold, 0.0) / limit
                wanted.append(Wanted((*one.weights[:4], price), one.threshold + price * limit))
        try:
            self.terrain.load(stage, first, stop, wanted, limit)
        except TooManyError as error:
            raise UnsettledError from error

    # ---------------------------------------------------------------------------------------------------------- plans

    def _try(self, cut: _Cut, path: np.ndarray) -> np.ndarray | None:
        """A plan with a cut: for every stage the best row on a path, if each fits its share of memory; its longest path.

        None where there is no such row.
        """
        terms, terrain = self.terrain.terms, self.terrain
        parts = (terms.forward, terms.backward, terms.recompute, terms.all_reduce)
        rows: list[Rows] = []
        times = np.zeros(terms.count)
        sides: tuple[int, int] | None = None
        for stage, (first, stop) in enumerate(cut):
            row = self._best_row(stage, first, stop, [max(float(path[part][stage]), 1e-3) for part in parts])
            if row is None:
                return None
            rows.append(row)
            for part, value in zip(parts, row.times[0]):
                times[part.start + stage] = value
            entry, exit_ = terrain.sides_of(row)
            if sides is not None:
                forward, backward = terrain.crossing(stage - 1, first, sides[1], entry)
                times[terms.transfer_forward.start + stage - 1] = forward
                times[terms.transfer_backward.start + stage - 1] = backward
            sides = entry, exit_
        if not self.setting.schedule.synchronous:
            self._consider([stop - first for first, stop in cut], [row.strategies(0) for row in rows])
            return None
        step, longest = self.graph.step(times)
        if step < self.threshold:
            self._consider([stop - first for first, stop in cut], [row.strategies(0) for row in rows])
        return longest

    def _best_row(self, stage: int, first: int, stop: int, weights: Sequence[float]) -> Rows | None:
        """The row of the least weighted seconds within the stage's share of memory."""
        terrain = self.terrain
        best: tuple[float, Rows] | None = None
        for way in terrain.ways:
            most = math.inf if best is None else best[0]
            found = terrain.stages[stage].cheapest(
                first, stop, way, terrain.passes[stage], terrain.need[stage], weights, terrain.share(stage), most
            )
            best = found or best
        return None if best is None else best[1]

    def _found(self, way: _Way) -> None:
        """A way of which everything is known is below the threshold: the best plan so far."""
        chosen = []
        for stage, first, stop, row in way:
            rows = self.terrain.arcs[stage, first, stop].rows
            assert rows is not None
            chosen.append(rows.strategies(row))
        before = self.best_s
        self._consider([stop - first for _, first, stop, _ in way], chosen)
        if not self.best_s < before:
            raise UnsettledError

    def _consider(self, cut: Sequence[int], chosen: Sequence[tuple[str, Mapping[str, Strategy]]]) -> None:
        """A plan, with all its figures from the layer graph."""
        found = self.explorer.evaluation(self.explorer.configuration(self.setting, cut, chosen))
        self.simulated += 1
        cost = found.cost(self.explorer.pricing.objective)
        if found.memory_bytes <= self.explorer.limit_bytes and cost < self.best_s:
            self.best, self.best_s = found, cost
            self._failed.clear()


def _least_cut(costs: Sequence[np.ndarray]) -> tuple[float, list[tuple[int, int]]]:
    """The least sum over all cuts, and the units of every stage at it; the costs of all arcs are given for every stage."""
    size = costs[0].shape[0]
    best = np.full(size, np.inf)
    best[0] = 0.0
    origins = []
    for cost in costs:
        whole = best[:, None] + cost
        origins.append(whole.argmin(axis=0))
        best = whole.min(axis=0)
    if not math.isfinite(best[-1]):
        return math.inf, []
    cut, stop = [], size - 1
    for origin in reversed(origins):
        first = int(origin[stop])
        cut.append((first, stop))
        stop = first
    return float(best[-1]), cut[::-1]


def level_cut(costs: Sequence[np.ndarray]) -> tuple[float, list[tuple[int, int]]]:
    """The cut whose dearest arc is the cheapest, and what that costs."""
    size = costs[0].shape[0]
    best = np.full(size, np.inf)
    best[0] = -np.inf
    origins = []
    for cost in costs:
        whole = np.maximum(best[:, None], cost)
        origins.append(whole.argmin(axis=0))
        best = whole.min(axis=0)
    if not math.isfinite(best[-1]):
        return math.inf, []
    cut, stop = [], size - 1
    for origin in reversed(origins):
        first = int(origin[stop])
        cut.append((first, stop))
        stop = first
    return float(best[-1]), cut[::-1]
