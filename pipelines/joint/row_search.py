"""The search for a way through a graph of cuts: a cut with a row for every stage that is below a threshold on all its bounds.

It goes stage by stage, least first; what is still to come is at least what the way back over the arcs tells for each bound by
itself. A state (stage, unit, layout) that led to nothing at some sums leads to nothing at sums which are nowhere less.  Sums
are of all bounds, of the bytes on each worker that holds several stages, and the gradients' bytes of shared weights that
another stage waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoddl.costmodel.cluster import Link
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.search.fronts import undominated

from .cut_graph import Bound, CutGraph
from .cut_regions import Region

__all__ = ["RowSearch", "Selection", "TooManyStatesError"]

#: States that a search holds at a time before it is given up.
_MAX_STATES = 300_000
#: Steps of a descent before all states are spread.
_MAX_STEPS = 300
#: Ways on that are looked at in one go.
_CHUNK = 1 << 17

#: (stage, first unit, unit behind it, row or -1) of every stage.
Selection = list[tuple[int, int, int, int]]


class TooManyStatesError(Exception):
    """A search for a way has come to its limit, or cannot treat the model."""


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


class _Failures:
    """Sums of states that led to nothing.  With more bounds, which come before other columns, they still do.

    Args:
        others: columns that are no bounds'.
    """

    def __init__(self, others: int) -> None:
        self.others = others
        self._sums: np.ndarray | None = None

    def add(self, sums: np.ndarray) -> None:
        """A state that led to nothing."""
        if self._sums is None:
            self._sums = sums[None]
            return
        known = self._widened(len(sums))
        self._sums = np.vstack([known[~(sums <= known).all(axis=1)], sums])

    def is_beaten(self, sums: np.ndarray) -> bool:
        """Whether one of them was nowhere above a state."""
        return self._sums is not None and bool((self._widened(len(sums)) <= sums).all(axis=1).any())

    def _widened(self, columns: int) -> np.ndarray:
        """All of them, as if they had come to nothing at bounds that were not known then."""
        assert self._sums is not None
        new = columns - self._sums.shape[1]
        if new:
            bounds = self._sums.shape[1] - self.others
            parts = self._sums[:, :bounds], np.full((len(self._sums), new), -np.inf), self._sums[:, bounds:]
            self._sums = np.hstack(parts)
        return self._sums


def _grouped(*columns: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Equal rows of several columns of whole numbers, and where they are."""
    if not len(columns[0]):
        return
    rows = np.stack(columns, axis=1)
    distinct, number = np.unique(rows, axis=0, return_inverse=True)
    number = number.ravel()
    for place, row in enumerate(distinct.tolist()):
        yield tuple(row), np.flatnonzero(number == place)


@dataclass(frozen=True)
class _SharedWeight:
    """A weight that two stages hold: (stage, place among what it shares) of the earlier and of the later one."""

    early: tuple[int, int]
    late: tuple[int, int]
    link: Link


class RowSearch:
    """Searches of one region below one threshold.

    Args:
        threshold: what the sums of a way have to be below.
        check: called now and then; it may raise.
    """

    def __init__(self, cut_graph: CutGraph, region: Region, threshold: float, check: Callable[[], None]) -> None:
        self.cut_graph, self.region, self.threshold, self.check = cut_graph, region, threshold, check
        self.bounds: list[Bound] = []
        self._costs: list[np.ndarray] = []
        #: Arcs that are on no way below the threshold are not allowed; shape (stages, units + 1, units + 1).
        self._allowed = np.zeros((0, 0, 0), dtype=bool)
        #: Bounds that have had their say in that, at which threshold.
        self._closed, self._closed_below = 0, math.nan
        self._behind = np.zeros(0)
        self._states = 0
        self._candidates: dict[tuple[int, int], _Candidates] = {}
        self._failed: dict[tuple[int, int, int], _Failures] = {}
        self._shared = self._shared_weights()
        homes = cut_graph.demand.homes
        self._workers = [worker for worker, held in enumerate(homes) if len(held) > 1]
        place = {worker: number for number, worker in enumerate(self._workers)}
        #: Of every stage the places of its workers among those that hold several.
        self._worker_of: list[list[int]] = [[] for _ in range(cut_graph.num_stages)]
        for worker in self._workers:
            for _, stage in homes[worker]:
                self._worker_of[stage].append(place[worker])

    def add(self, bound: Bound) -> None:
        """A further bound."""
        self.bounds.append(bound)
        self._costs.append(np.stack(self.cut_graph.costs(bound)))
        self._candidates.clear()

    def knows(self, path: np.ndarray) -> bool:
        """Whether a path is among the bounds, memory for nothing."""
        return any(bound.is_path(path) for bound in self.bounds)

    def renew(self) -> None:
        """Take in what has become known of the graph of cuts."""
        self._costs = [np.stack(self.cut_graph.costs(bound)) for bound in self.bounds]
        self._allowed = np.zeros((0, 0, 0), dtype=bool)
        self._candidates.clear()
        self._failed.clear()

    def is_open(self) -> bool:
        """Close the arcs that are on no way below the threshold; whether there is a way left."""
        if not len(self._allowed):
            self._allowed = np.stack([np.isfinite(cost) for cost in self.region.among(list(self._costs[0]))])
            self._closed = 0
        if self._closed_below != self.threshold:
            self._closed, self._closed_below = 0, self.threshold
            self._failed.clear()
        # What is new closes arcs; those of all others that this leaves without a way go with the next threshold.
        for costs in self._costs[self._closed :]:
            before, behind = self._least_before(costs), self._least_behind(costs)
            whole = before[:, :, None] + costs + behind[1:, None, :]
            self._allowed &= whole < self.threshold
            if not self._allowed.any(axis=(1, 2)).all():
                return False
        if self._closed < len(self._costs):
            self._candidates.clear()
            self._behind = np.stack([self._least_behind(costs) for costs in self._costs], axis=2)
            self._closed = len(self._costs)
        return bool((self._behind[0, 0] < self.threshold).all())

    def _least_before(self, costs: np.ndarray) -> np.ndarray:
        """For every stage and unit the least of a bound on the way there; shape (stages, units + 1)."""
        found = np.full(costs.shape[:2], np.inf)
        found[0, 0] = 0.0
        for stage in range(len(costs) - 1):
            held = np.where(self._allowed[stage], costs[stage], np.inf)
            found[stage + 1] = (found[stage][:, None] + held).min(axis=0)
        return found

    def _least_behind(self, costs: np.ndarray) -> np.ndarray:
        """For every stage and unit the least of a bound that is still to come; shape (stages + 1, units + 1)."""
        found = np.full((len(costs) + 1, costs.shape[1]), np.inf)
        found[-1, -1] = 0.0
        for stage in range(len(costs) - 1, -1, -1):
            held = np.where(self._allowed[stage], costs[stage], np.inf)
            found[stage] = (held + found[stage + 1][None, :]).min(axis=1)
        return found

    # ---------------------------------------------------------------------------------------------------- looking for a way

    def find(self) -> Selection | None:
        """(stage, first unit, unit behind it, row or -1) of every stage of a way that is below the threshold on all bounds.

        Raises:
            TooManyStatesError, UnsettledError
        """
        self._states = 0
        chosen: Selection = []
        sums = np.zeros(len(self.bounds) + len(self._shared) + 2 * len(self._workers))
        try:
            return chosen[::-1] if self._descend(0, 0, -1, sums, chosen) else None
        except TooManyStatesError:
            return self._spread(sums)

    def _descend(self, stage: int, unit: int, layout: int, sums: np.ndarray, chosen: Selection) -> bool:
        """Depth first: a way on from a state, if it has one."""
        if stage == self.cut_graph.num_stages:
            return True
        self._states += 1
        if self._states > _MAX_STEPS:
            raise TooManyStatesError
        failed = self._failed.setdefault((stage, unit, layout), _Failures(len(self._shared) + 2 * len(self._workers)))
        if failed.is_beaten(sums):
            return False
        found = self._ways_on(stage, unit)
        new, row, score = self._on(stage, unit, layout, sums[None], found)
        for place in np.argsort(score, kind="stable").tolist():
            at = int(row[place])
            if self._descend(stage + 1, int(found.stop[at]), int(found.exit[at]), new[place], chosen):
                chosen.append((stage, unit, int(found.stop[at]), int(found.row[at])))
                return True
        failed.add(sums)
        return False

    def _spread(self, sums: np.ndarray) -> Selection | None:
        """Breadth first: all states of a stage at once, without those that another one is nowhere above."""
        level: dict[tuple[int, int], _States] = {(0, -1): _States.first(sums)}
        trail: list[dict[tuple[int, int], _States]] = []
        for stage in range(self.cut_graph.num_stages):
            trail.append(level)
            parts: dict[tuple[int, int], list[_States]] = {}
            total = 0
            for (unit, layout), states in level.items():
                found = self._ways_on(stage, unit)
                chunk = max(1, _CHUNK // max(1, len(found.stop)))
                for begin in range(0, len(states.sums), chunk):
                    self.check()
                    new, fitting, _ = self._on(stage, unit, layout, states.sums[begin : begin + chunk], found)
                    origin, row = np.divmod(fitting, max(1, len(found.stop)))
                    for key, mine in _grouped(found.stop[row], found.exit[row]):
                        part = _States(new[mine], origin[mine] + begin, row[mine], (unit, layout))
                        parts.setdefault((key[0], key[1]), []).append(part)
                        total += len(mine)
                if total > 4 * _MAX_STATES:
                    raise TooManyStatesError
            level = {key: _States.joined(several) for key, several in parts.items()}
            if sum(len(states.sums) for states in level.values()) > _MAX_STATES:
                raise TooManyStatesError
        ends = [key for key in level if len(level[key].sums)]
        if not ends:
            return None
        at, place = ends[0], 0
        chosen: Selection = []
        for stage in range(self.cut_graph.num_stages - 1, -1, -1):
            states = level[at]
            at, way = states.key[int(states.number[place])], int(states.row[place])
            found = self._ways_on(stage, at[0])
            chosen.append((stage, at[0], int(found.stop[way]), int(found.row[way])))
            place, level = int(states.origin[place]), trail[stage]
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
            room = self.threshold - sums[:, :num]
            fits = (ahead[None] < room[:, None]).all(axis=2)
        at = np.flatnonzero(fits)
        state, way = np.divmod(at, len(found.stop))
        new = sums[state]
        new[:, :num] += costs[way]
        self._carry(stage, found, way, new)
        first, count = num + len(self._shared), len(self._workers)
        good = (new[:, :num] + self._behind[stage + 1][found.stop[way]] < self.threshold).all(axis=1)
        for worker in self._worker_of[stage]:
            resident, buffer = first + worker, first + count + worker
            new[:, resident] += found.memory[way]
            new[:, buffer] = np.maximum(new[:, buffer], found.buffer[way])
            good &= new[:, resident] + new[:, buffer] <= self.cut_graph.limit * (1 + 1e-12)
        new, at, way = new[good], at[good], way[good]
        score = (new[:, :num] + self._behind[stage + 1][found.stop[way]]).max(axis=1, initial=0.0)
        return new, at, score

    def _extra_crossing(self, stage: int, unit: int, layout: int, found: _Candidates) -> np.ndarray:
        """What arriving from a layout takes beyond the least, as far as it is known; shape (ways, bounds)."""
        extra = np.zeros((len(found.stop), len(self.bounds)))
        known = found.entry >= 0
        if layout < 0 or not stage or not known.any():
            return extra
        terms = self.cut_graph.terms
        seconds = self.cut_graph.known_crossings(stage - 1, unit, layout, found.entry[known])
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
        reduce = self.cut_graph.terms.all_reduce
        for number, bound in enumerate(self.bounds):
            weights = bound.weights[reduce]
            new[:, number] += (weights[weight.early[0]] + weights[weight.late[0]]) * seconds
        new[:, column] = 0.0

    def _ways_on(self, stage: int, unit: int) -> _Candidates:
        key = (stage, unit)
        if key not in self._candidates:
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
        arc = self.cut_graph.arcs.get((stage, unit, stop))
        if arc is None:
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
        costs = np.column_stack([self.cut_graph.row_costs(bound, stage, arc) for bound in self.bounds])
        if stage < self.cut_graph.num_stages - 1:
            terms = self.cut_graph.terms
            crossing = np.array(
                [
                    b.weights[terms.transfer_forward][stage] + b.weights[terms.transfer_backward][stage]
                    for b in self.bounds
                ]
            )
            costs = costs + crossing * self.cut_graph.least_transfer(stage, stop)
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

    def times(self, way: Selection, instead: np.ndarray) -> tuple[np.ndarray, bool]:
        """The least that every term takes on a way, and whether nothing takes more.

        Args:
            instead: what the terms of stages take whose rows are not known.
        """
        terms, cut_graph = self.cut_graph.terms, self.cut_graph
        times, is_exact = instead.copy(), True
        shared: dict[tuple[int, int], float] = {}
        before = -1
        for stage, first, stop, row in way:
            entry = exit_ = -1
            arc = cut_graph.arcs.get((stage, first, stop))
            if arc is None:
                is_exact = False
            else:
                values, entry, exit_ = arc.rows.times[row], int(arc.entry[row]), int(arc.exit[row])
                shared.update({(stage, k): float(value) for k, value in enumerate(arc.rows.shared[row])})
                for part, value in zip(terms.of_stages, values):
                    times[part.start + stage] = value
            if stage:
                least = cut_graph.least_transfer(stage - 1, first)
                extra = np.zeros(2)
                if before >= 0 and entry >= 0:
                    extra = cut_graph.known_crossings(stage - 1, first, before, np.array([entry]))[0]
                    is_exact &= cut_graph.has_crossing(stage - 1, first, before, entry)
                times[terms.transfer_forward.start + stage - 1] = least + extra[0]
                times[terms.transfer_backward.start + stage - 1] = least + extra[1]
            before = exit_
        for weight in self._shared:
            held = [shared.get(end, 0.0) for end in (weight.early, weight.late)]
            seconds = float(self._shared_seconds(weight, np.array([max(held)]))[0]) if max(held) else 0.0
            for stage, _ in (weight.early, weight.late):
                times[terms.all_reduce.start + stage] += seconds
        return times, is_exact

    def work_out_crossings(self, way: Selection) -> None:
        """What the layouts on a way really take to pass from stage to stage."""
        for (stage, first, stop, row), (_, begin, end, other) in zip(way, way[1:]):
            source = int(self.cut_graph.arcs[stage, first, stop].exit[row])
            target = int(self.cut_graph.arcs[stage + 1, begin, end].entry[other])
            self.cut_graph.crossing(stage, begin, source, target)
        self._failed.clear()

    def _shared_weights(self) -> tuple[_SharedWeight, ...]:
        """Those whose stages are run by different workers; which depends on the cut alone where it has several units (the first and
        the last one hold it in transformers)."""
        chain, setting = self.cut_graph.explorer.chain, self.cut_graph.setting
        if not chain.shares_weights:
            return ()
        found: list[_SharedWeight] = []
        last = self.cut_graph.num_stages - 1
        placement = self.cut_graph.placement[0]
        for here, there in chain.ends_of_ties():
            if (here, there) != (0, chain.num_units - 1):
                raise TooManyStatesError
            workers = placement[0], placement[last]
            if workers[0] != workers[1]:
                link = setting.mesh.link_between(self.cut_graph.explorer.cluster, workers)
                number = len(found)
                found.append(_SharedWeight((0, number), (last, number), link))
        return tuple(found)

    def _shared_seconds(self, weight: _SharedWeight, nbytes: np.ndarray) -> np.ndarray:
        times = {}
        for value in np.unique(nbytes).tolist():
            step = Step(Collective.ALL_REDUCE, Axis(2, 1), value)
            times[value] = weight.link.time(step)
        return np.array([times[value] for value in nbytes.tolist()])
