"""The best plan of one setting, or that none is better than what is known: all its cuts, all ways to run their stages.

A plan is a way through the setting's terrain (:mod:`.terrain`) with a row for every arc on it.  Its step is the longest path of the
schedule's graph, so that *every* path is a lower bound, linear in what the stages take.  Of the paths that matter there are few:

1. Look for a way that is below the threshold on all paths known so far; there is none: the setting is settled.
2. Work out its step.  It is at or above the threshold: its longest path joins those known, and this way, with all that are like it,
   is out of the question from now on.
3. It is below: where arcs on the way are not known to the last grade, take them to the next one.
4. All are: it is the best plan so far, its step is the new threshold.

So the paths are cutting planes, and cuts are only ever looked for, not listed.  Where the mean of the paths does not come to the
threshold for all cuts together, they are divided in regions; what is left in the end, one cut with the rows of its stages, is
searched through (:mod:`.ways`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.stopping import Deadline
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.stepgraph import StepGraph

from .bounds import balance, loads
from .evaluation import Evaluation
from .explorer import SAME, Explorer, Setting
from .regions import Cut, Region, least_cut, level_cut
from .relaxation import Relaxation
from .stages import Rows, Wanted, joined
from .terrain import PRICES, Bound, Terrain, TooManyError
from .ways import TooManyStatesError, Way, Ways

__all__ = ["Settled", "Settling", "UnsettledError"]

#: Rounds of an ascent, the first one and later ones.
_FIRST_ROUNDS, _ROUNDS = 40, 8
#: Progress of a round, relatively, that is none.
_STALLED = 1e-3
#: Units that a cut is improved by.
_MOST_MOVES = 12
#: Long paths that are held at a time.
_MOST_PATHS = 80
#: Paths that rows are wanted by.
_MOST_GUIDES = 5
#: Prices of a byte at which rows of stages that share workers are tried, in steps per limit.
_HULL = (0.0, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 10.0, 30.0, 1000.0)
#: Paths that a search for rows is guided by.
_MOST_BOUNDS = 12


@dataclass(frozen=True)
class Settled:
    """What is known of a setting: its best plan, if one was below the threshold, and that no plan is below ``bound_s``."""

    best: Evaluation | None
    bound_s: float
    simulated: int


#: Sums of the same terms in another order differ by less: what is at the threshold is not below it.
ROUNDING = 1 - 1e-12


class UnsettledError(Exception):
    """The work on a setting was given up."""


@dataclass(frozen=True, eq=False)
class _Guide:
    """A path, and the least that it comes to before a stage that begins with a unit, and from such a stage on; per stage."""

    weights: np.ndarray
    before: Sequence[np.ndarray]
    behind: Sequence[np.ndarray]


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
        #: No plan of the setting is below it.
        self.bound_s = 0.0
        self._price: float | None = None
        self._prices: tuple[float, ...] = (0.0, *PRICES)
        self._regions = 0
        self._region = Region.whole(self.terrain.num_stages, self.terrain.num_units)
        self._paths: list[np.ndarray] = []
        self._mean = self._places = np.zeros(0)

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
        for path in (
            balance(self.setting.schedule, self.setting.widths),
            *loads(self.setting.schedule),
            *self.course.paths,
        ):
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
        terms = self.terrain.terms
        weights = np.maximum.reduce(loads(self.setting.schedule))
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

    def _explored(self, rounds: int) -> list[Region]:
        """Settle the cuts of a region, or divide it."""
        if self._ascend(rounds):
            return []
        if self.look < 1:
            raise UnsettledError
        try:
            self._searched()
        except TooManyStatesError as error:
            parts = self._region.divided(self._places)
            if not parts:
                raise UnsettledError from error
            return parts
        return []

    def _ascended(self, cut: Cut) -> tuple[float, np.ndarray]:
        """The mean of paths that bounds one cut best, and the bound."""
        region, mean, places = self._region, self._mean, self._places
        self._region = Region(tuple((stop, stop) for _, stop in cut[:-1]), self.terrain.num_units)
        try:
            is_above = self._ascend(_ROUNDS)
            return (math.inf if is_above else self._least()[0]), self._mean
        finally:
            self._region, self._mean, self._places = region, mean, places

    def _searched(self) -> None:
        """Search the cuts of a region through: first with what their units take, then, of those that are left, with their rows."""
        ways = Ways(self.terrain, self._region, self.threshold * ROUNDING, self.best_s, self._check)
        ways.add(Bound(self._mean))
        for path in self._main_paths(_MOST_BOUNDS):
            ways.add(Bound(path))
        if not self.terrain.is_alone and math.isfinite(self.best_s):
            for part in PRICES:
                ways.add(Bound(self._mean, part * self.best_s / self.terrain.limit))
        n=[0,0,0,0]
        try:
         while ways.is_open():
            self._check()
            n[0]+=1
            way = ways.find()
            if way is None:
                return
            cut = [(first, stop) for _, first, stop, _ in way]
            lacking = [(stage, *ends) for stage, ends in enumerate(cut) if self.terrain.grade(stage, *ends) < 2]
            if lacking:
                of_units = self.terrain.at_least(Bound(self._mean, self._price), cut, self.best_s)
                times, is_exact = self._unit_times([cut], of_units)[:, 0], False
            else:
                times, is_exact = ways.times(way)
            step, path = self.graph.step(times)
            n[1]+=1
            if step >= self.threshold and not ways.knows(path):
                self._learn(path)
                ways.add(Bound(path))
                continue
            n[2]+=1
            if lacking:
                least, mean = self._ascended(cut)
                0 and print('   cut',[b-a for a,b in cut],step,least,self.threshold,n)
                if least >= self.threshold and not ways.knows(mean):
                    ways.add(Bound(mean, self._price))
                    continue
            if lacking:
                0 and print('   survives',[b-a for a,b in cut],step,self.threshold, n)
                real = self._try(cut, self._mean)
                if real is not None and self._learn(real): 
                    ways.add(Bound(real))
                guides = self._guides()
                for arc in lacking:
                    self._check()
                    t=__import__('time').process_time()
                    self._load(guides, *arc)
                    0 and print('     load',arc,len(self.terrain.arcs[arc].rows),round(__import__('time').process_time()-t,3))
                ways.renew(self.threshold * ROUNDING)
            elif not is_exact:
                ways.work_out_crossings(way)
            else:
                self._found(way)
                ways.renew(self.threshold * ROUNDING)
        finally: 0 and print('   ways',n,len(ways.bounds))

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
        """Take in the longest paths of the best divided cuts (:mod:`.relaxation`) and of whole ones near by, until the mean of
        paths is at the threshold on all cuts of the region: whether it has come to that.

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

    def _visit(self, cut: Cut, of_units: np.ndarray) -> bool:
        """Take in the longest path of a cut; whether something new was learned of it.

        First with what its units take; where that is below the threshold, with the best rows.
        """
        terrain = self.terrain
        if any(terrain.is_closed(stage, *ends) for stage, ends in enumerate(cut)):
            return False
        times = self._unit_times([cut], of_units)[:, 0]
        step, path = self.graph.step(times)
        is_new = self._learn(path)
        if step >= self.threshold:
            return is_new
        if self.look < 2:
            cut = self._improved(cut, of_units)
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

    def _unit_times(self, cuts: Sequence[Cut], of_units: np.ndarray) -> np.ndarray:
        """What every term takes on cuts where units take so much (shape (4, stages, units)); shape (terms, cuts)."""
        terrain, terms = self.terrain, self.terrain.terms
        sums = np.concatenate([np.zeros((4, terrain.num_stages, 1)), np.cumsum(of_units, axis=2)], axis=2)
        ends = np.array(cuts)
        stages = np.arange(terrain.num_stages)
        times = np.zeros((terms.count, len(cuts)))
        for part, of_one in zip((terms.forward, terms.backward, terms.recompute, terms.all_reduce), sums):
            times[part] = (of_one[stages, ends[:, :, 1]] - of_one[stages, ends[:, :, 0]]).T
        for boundary in stages[1:] - 1:
            transfer = terrain.least_transfers_at(boundary)[ends[:, boundary, 1]]
            times[terms.transfer_forward.start + boundary] = transfer
            times[terms.transfer_backward.start + boundary] = transfer
        return times

    def _improved(self, cut: Cut, of_units: np.ndarray) -> Cut:
        """A cut from which no unit that goes from one stage to another makes the step shorter."""
        best_s = float(self.graph.steps(self._unit_times([cut], of_units))[0])
        sizes = np.array([stop - first for first, stop in cut])
        for _ in range(_MOST_MOVES):
            moved = [
                sizes - np.eye(len(sizes), dtype=int)[giver] + np.eye(len(sizes), dtype=int)[taker]
                for giver in np.flatnonzero(sizes > 1).tolist()
                for taker in range(len(sizes))
                if taker != giver
            ]
            if not moved:
                break
            stops = np.cumsum(moved, axis=1)
            cuts = np.stack([stops - moved, stops], axis=2)
            steps = self.graph.steps(self._unit_times(cuts.tolist(), of_units))
            least = int(steps.argmin())
            if steps[least] >= best_s * (1 - SAME):
                break
            best_s, sizes = float(steps[least]), np.array(moved[least])
        stops_of = np.cumsum(sizes).tolist()
        return list(zip([0, *stops_of[:-1]], stops_of))

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
            found = least_cut(costs)
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
        if not wanted and self.terrain.least_memory(stage, first, stop) > limit:
            limit = 0.0  # no row fits
        try:
            self.terrain.load(stage, first, stop, wanted, limit)
        except TooManyError as error:
            raise UnsettledError from error

    # ---------------------------------------------------------------------------------------------------------- plans

    def _try(self, cut: Cut, path: np.ndarray) -> np.ndarray | None:
        """A plan with a cut: for every stage a row that is good on a path, so that all fit; its longest path.

        None where there is no such row.
        """
        terms, terrain = self.terrain.terms, self.terrain
        parts = (terms.forward, terms.backward, terms.recompute, terms.all_reduce)
        weights = np.array([[max(float(path[part][stage]), 1e-3) for part in parts] for stage in range(len(cut))])
        rows = self._rows_alone(cut, weights) if terrain.is_alone else self._rows_together(cut, weights)
        if rows is None:
            return None
        times = np.zeros(terms.count)
        sides: tuple[int, int] | None = None
        for stage, ((first, _), row) in enumerate(zip(cut, rows)):
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

    def _rows_alone(self, cut: Cut, weights: np.ndarray) -> list[Rows] | None:
        """Of every stage that has a worker for itself the best row that fits."""
        rows: list[Rows] = []
        for stage, (first, stop) in enumerate(cut):
            row = self._best_row(stage, first, stop, weights[stage].tolist())
            if row is None:
                return None
            rows.append(row)
        return rows

    def _rows_together(self, cut: Cut, weights: np.ndarray) -> list[Rows] | None:
        """Rows of stages that share workers: bytes get dearer for all until each worker's stages fit, then every stage takes what
        room is left, those first that gain most by a byte."""
        terrain = self.terrain
        hulls: list[Rows] = []
        for stage, (first, stop) in enumerate(cut):
            parts = []
            for way in terrain.ways:
                busy = float(weights[stage, :2].sum())
                scale = self._scale(cut) * busy / float(weights[:, :2].sum(axis=1).mean())
                prices = scale / terrain.limit * np.array(_HULL)
                of_way = terrain.stages[stage].hull(
                    first, stop, way, terrain.passes[stage], terrain.need[stage], weights[stage].tolist(), prices
                )
                if of_way is not None:
                    parts.append(of_way)
            if not parts:
                return None
            hulls.append(joined(parts))
        chosen = self._fitting(hulls, weights)
        return None if chosen is None else [rows.only(np.array([row])) for rows, row in zip(hulls, chosen)]

    def _scale(self, cut: Cut) -> float:
        """Seconds that a step may take, for prices of memory."""
        if math.isfinite(self.best_s):
            return self.best_s
        weights = np.maximum.reduce(loads(self.setting.schedule))
        return float(self.terrain.quick(Bound(weights), 0.0, (0.0,)))

    def _fitting(self, hulls: Sequence[Rows], weights: np.ndarray) -> list[int] | None:
        """A row of each stage's, so that all fit their workers."""
        limit, homes = self.terrain.limit, [[stage for _, stage in held] for held in self.homes]
        # The rows of each stage that are better the more they take.
        costs = [rows.times @ own for rows, own in zip(hulls, weights)]
        lines: list[list[int]] = []
        for rows, cost in zip(hulls, costs):
            line: list[int] = []
            for row in np.lexsort((rows.memory + rows.buffer, cost)).tolist():
                if not line or rows.memory[row] + rows.buffer[row] < rows.memory[line[-1]] + rows.buffer[line[-1]]:
                    line.append(row)
            lines.append(line)
        at = [0] * len(hulls)

        def room(worker: int) -> float:
            held = homes[worker]
            own = [lines[stage][at[stage]] for stage in held]
            memory = sum(float(hulls[stage].memory[row]) for stage, row in zip(held, own))
            return limit - memory - max(float(hulls[stage].buffer[row]) for stage, row in zip(held, own))

        def gain(stage: int, step: int) -> tuple[float, float]:
            here, there = lines[stage][at[stage]], lines[stage][at[stage] + step]
            return (
                float(costs[stage][there] - costs[stage][here]),
                float(hulls[stage].memory[here] - hulls[stage].memory[there]),
            )

        for worker, held in enumerate(homes):
            while room(worker) < 0:
                left = [stage for stage in held if at[stage] + 1 < len(lines[stage])]
                if not left:
                    return None
                dearer = {stage: gain(stage, 1) for stage in left}
                at[min(left, key=lambda stage: dearer[stage][0] / max(dearer[stage][1], 1.0))] += 1
        holders: list[list[int]] = [[] for _ in hulls]
        for worker, held in enumerate(homes):
            for stage in held:
                holders[stage].append(worker)
        for stage in sorted(range(len(hulls)), key=lambda stage: gain(stage, -1)[0] if at[stage] else 0.0):
            while at[stage]:
                at[stage] -= 1
                if any(room(worker) < 0 for worker in holders[stage]):
                    at[stage] += 1
                    break
        return [line[place] for line, place in zip(lines, at)]

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

    def _found(self, way: Way) -> None:
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
