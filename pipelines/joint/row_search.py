"""The search for a selection: a path through the cut graph with a row for every arc, below a threshold on every bound.

A *row* is one way to run a stage (:mod:`.stage_search`).  A *selection* has one arc of each stage and one of its rows.  The search
extends selections stage by stage, from the first stage to the last.  Its *state* before stage s is

    (s, unit, layout, sums)        the first unit of stage s, the exit layout of stage s - 1, and a vector of sums:

==========================  ==========================================================================================
columns of the sums         content
==========================  ==========================================================================================
one per bound               value of the stages so far, with the transfers between them
one per shared weight       bytes of its gradient at its first stage, until its last stage is chosen
one per crowded worker      resident bytes of its stages so far; a worker is crowded if it holds several stages
one per crowded worker      largest buffer of its stages so far
==========================  ==========================================================================================

Three rules keep the search small:

-   *Bounding.*  A pass from the last stage to the first gives, for each bound by itself, the least value of all remaining stages.
    A state is dropped if its sum plus this value reaches the threshold for some bound.
-   *Failed states.*  If a state has no selection below the threshold, no state of the same (s, unit, layout) whose sums are all at
    least as large has one.
-   *Order.*  :meth:`RowSearch.find` goes depth first, the extension of the least bound first.  If this finds no selection within
    some hundred states, an integer program decides (:mod:`.selection_program`).  It keeps to constraints up to a tolerance, so
    selections that it finds are added up again.  If one after the other turns out not to be below the threshold, as plans that
    are as good as the incumbent do, or if the program takes long, the threshold is lowered by :data:`MARGIN`.  If that happens
    again, the search goes breadth first: it extends all states of a stage together, and drops dominated ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from .bounds import Bound
from .cut_graph import CutGraph
from .cut_regions import Region
from .row_states import Extensions, FailedStates, States, groups_of
from .selection_program import Crossing, SelectionProgram, SharedSeconds
from .shared_weights import SharedWeight, TiesError, shared_weights

__all__ = ["MARGIN", "RowSearch", "Selection", "TooManyStatesError"]

#: Part by which the threshold is lowered if many selections are as good as the incumbent: a better plan may be missed if it is
#: better by less.
MARGIN = 1e-6

#: Largest number of states of one stage in the breadth-first search.
_MAX_STATES = 300_000
#: Number of states that the depth-first search visits before the integer program is solved.
_MAX_DEPTH_FIRST = 300
#: Number of selections of the integer program that turn out not to be below the threshold before the breadth-first search begins.
_MAX_CLOSE = 20
#: The same number, and seconds of a program, before the threshold is lowered by the margin.
_MAX_CLOSE_AT_FIRST, _FIRST_PROGRAM_S = 3, 1.0
#: Largest number of transfers over one boundary that are computed together.
_MAX_CROSSINGS = 400
#: Number of extensions that the breadth-first search computes at once.
_CHUNK = 1 << 17

#: Per stage (stage, first unit, unit behind the last one, row); the row is -1 if the rows of the arc are not loaded.
Selection = list[tuple[int, int, int, int]]


class TooManyStatesError(Exception):
    """The search has too many states, or does not support the model's shared weights."""


class RowSearch:
    """Searches selections in one region of cuts, below a threshold on every bound.

    Args:
        cut_graph: The cut graph; arcs whose rows are not loaded count with their bounds by units.
        region: The region.
        threshold: Value that a selection must be below in every bound [s]; may be lowered later.
        check: Called from time to time; it may raise an exception that ends the search.
        left_s: Returns the seconds that are left for the search.

    Raises:
        TooManyStatesError: The model shares weights between other units than the first and the last one.
    """

    def __init__(
        self,
        cut_graph: CutGraph,
        region: Region,
        threshold: float,
        check: Callable[[], None],
        left_s: Callable[[], float],
    ) -> None:
        self.cut_graph, self.region, self.threshold = cut_graph, region, threshold
        self.check, self.left_s = check, left_s
        self.bounds: list[Bound] = []
        #: Per bound the costs of all arcs, shape (stages, units + 1, units + 1).
        self._costs: list[np.ndarray] = []
        #: Whether an arc may be on a path below the threshold, shape (stages, units + 1, units + 1); empty until it is computed.
        self._allowed = np.zeros((0, 0, 0), dtype=bool)
        #: Number of bounds, and the threshold, that `_allowed` accounts for.
        self._num_pruned, self._pruned_threshold = 0, math.nan
        #: Least value of the stages from each one on, by their first unit; shape (stages + 1, units + 1, bounds).
        self._remaining = np.zeros(0)
        #: Whether the threshold was lowered by the margin.
        self._has_margin = False
        #: Number of states that the depth-first search has visited.
        self._num_visited = 0
        self._extensions: dict[tuple[int, int], Extensions] = {}
        self._failed: dict[tuple[int, int, int], FailedStates] = {}
        try:
            self._shared = shared_weights(cut_graph)
        except TiesError as error:
            raise TooManyStatesError from error
        #: The workers that hold several stages; others need no column, because the rows of their stage are within the limit.
        homes = cut_graph.demand.homes
        self._workers = [worker for worker, held in enumerate(homes) if len(held) > 1]
        index = {worker: number for number, worker in enumerate(self._workers)}
        #: Per stage the indices, in `_workers`, of the workers that hold it.
        self._workers_of_stage: list[list[int]] = [[] for _ in range(cut_graph.num_stages)]
        for worker in self._workers:
            for _, stage in homes[worker]:
                self._workers_of_stage[stage].append(index[worker])

    @property
    def _num_other_columns(self) -> int:
        """Number of columns of the sums behind those of the bounds."""
        return len(self._shared) + 2 * len(self._workers)

    # --------------------------------------------------------------------------------------------------- bounds and arcs

    def add(self, bound: Bound) -> None:
        """Add a bound."""
        self.bounds.append(bound)
        self._costs.append(np.stack(self.cut_graph.arc_costs(bound)))
        self._extensions.clear()

    def knows(self, path: np.ndarray) -> bool:
        """Return whether a path, without prices of memory, is one of the bounds."""
        return any(bound.is_path(path) for bound in self.bounds)

    def update_arcs(self) -> None:
        """Compute the costs of all arcs again, after rows were loaded into the cut graph."""
        self._costs = [np.stack(self.cut_graph.arc_costs(bound)) for bound in self.bounds]
        self._allowed = np.zeros((0, 0, 0), dtype=bool)
        self._extensions.clear()
        self._failed.clear()

    def prune(self) -> bool:
        """Exclude arcs that are on no path below the threshold; return whether there may be a path left."""
        if not len(self._allowed):
            self._allowed = np.stack([np.isfinite(cost) for cost in self.region.restrict(list(self._costs[0]))])
            self._num_pruned = 0
        if self._pruned_threshold != self.threshold:
            self._num_pruned, self._pruned_threshold = 0, self.threshold
            self._failed.clear()
        # Only new bounds exclude arcs.  Older bounds, which might then exclude more, are applied again at the next threshold.
        for bound, costs in zip(self.bounds[self._num_pruned :], self._costs[self._num_pruned :]):
            before, behind = self._least_before(costs), self._least_behind(costs)
            through = before[:, :, None] + costs + behind[1:, None, :]
            self._allowed &= through < self.threshold - self.cut_graph.fixed_seconds(bound.weights)
            if not self._allowed.any(axis=(1, 2)).all():
                return False
        if self._num_pruned < len(self._costs):
            self._extensions.clear()
            self._remaining = np.stack([self._least_behind(costs) for costs in self._costs], axis=2)
            self._num_pruned = len(self._costs)
        return bool((self._remaining[0, 0] < self.threshold).all())

    def _least_before(self, costs: np.ndarray) -> np.ndarray:
        """Return the least cost of the stages before each one, by the unit behind them; shape (stages, units + 1)."""
        least = np.full(costs.shape[:2], np.inf)
        least[0, 0] = 0.0
        for stage in range(len(costs) - 1):
            allowed_costs = np.where(self._allowed[stage], costs[stage], np.inf)
            least[stage + 1] = (least[stage][:, None] + allowed_costs).min(axis=0)
        return least

    def _least_behind(self, costs: np.ndarray) -> np.ndarray:
        """Return the least cost of the stages from each one on, by their first unit; shape (stages + 1, units + 1)."""
        least = np.full((len(costs) + 1, costs.shape[1]), np.inf)
        least[-1, -1] = 0.0
        for stage in range(len(costs) - 1, -1, -1):
            allowed_costs = np.where(self._allowed[stage], costs[stage], np.inf)
            least[stage] = (allowed_costs + least[stage + 1][None, :]).min(axis=1)
        return least

    # -------------------------------------------------------------------------------------------- searches for a selection

    def find(self) -> Selection | None:
        """Return a selection that is below the threshold on every bound and within the memory limit; None if there is none.

        Transfers count as long as is known: as their least time if :meth:`price_crossings` has not computed them.

        Raises:
            TooManyStatesError: There are too many states.
            TimeoutError: The integer program was not solved in the time that is left.
            UnsettledError: Raised by ``check``.
        """
        self._num_visited = 0
        selection: Selection = []
        sums = np.zeros(len(self.bounds) + self._num_other_columns)
        try:
            return selection[::-1] if self._depth_first(0, 0, -1, sums, selection) else None
        except TooManyStatesError:
            pass
        if not self._has_margin:
            try:
                return self._by_program(sums, _MAX_CLOSE_AT_FIRST, min(_FIRST_PROGRAM_S, self.left_s()))
            except (TooManyStatesError, TimeoutError):
                self._has_margin = True
                self.lower(self.threshold)
        try:
            return self._by_program(sums, _MAX_CLOSE, self.left_s())
        except TooManyStatesError:
            return self._breadth_first(sums)

    def lower(self, threshold: float) -> None:
        """Lower the threshold to a value, or below it by the margin."""
        self.threshold = min(self.threshold, threshold * (1 - MARGIN * self._has_margin))

    def _by_program(self, sums: np.ndarray, most: int, seconds: float) -> Selection | None:
        """Return a selection that the integer program finds; None if there is none.

        Args:
            sums: The first state.
            most: Largest number of selections that turn out not to be below the threshold.
            seconds: Time limit of each program.

        Raises:
            TooManyStatesError: So many selections are not below the threshold.
            TimeoutError, UnsettledError: As of :meth:`find`.
        """
        ends = [0, *(first for first, _ in self.region.ranges), self.cut_graph.num_units]
        program = self._selection_program(ends)
        for _ in range(most):
            self.check()
            rows = program.find(seconds)
            if rows is None:
                return None
            if self._is_below(rows, ends, sums):
                return [
                    (stage, unit, stop, int(self._extensions_from(stage, unit).row[row]))
                    for stage, (unit, stop, row) in enumerate(zip(ends, ends[1:], rows))
                ]
            program.exclude(rows)
        raise TooManyStatesError

    def _depth_first(self, stage: int, unit: int, layout: int, sums: np.ndarray, selection: Selection) -> bool:
        """Return whether a state has a selection; if so, append its stages to ``selection``, the last one first."""
        if stage == self.cut_graph.num_stages:
            return True
        self.check()
        self._num_visited += 1
        if self._num_visited > _MAX_DEPTH_FIRST:
            raise TooManyStatesError
        failed = self._failed.setdefault((stage, unit, layout), FailedStates(self._num_other_columns))
        if failed.implies(sums):
            return False
        extensions = self._extensions_from(stage, unit)
        new, pair, score = self._extend(stage, unit, layout, sums[None], extensions)
        for number in np.argsort(score, kind="stable").tolist():
            at = int(pair[number])
            stop, exit_ = int(extensions.stop[at]), int(extensions.exit[at])
            if self._depth_first(stage + 1, stop, exit_, new[number], selection):
                selection.append((stage, unit, stop, int(extensions.row[at])))
                return True
        failed.add(sums)
        return False

    def _selection_program(self, ends: Sequence[int]) -> SelectionProgram:
        """Return the integer program of the rows of a cut.

        Args:
            ends: The first unit of each stage, and the number of units.
        """
        homes = self.cut_graph.demand.homes
        return SelectionProgram(
            [self._extensions_from(stage, unit) for stage, unit in enumerate(ends[:-1])],
            [[stage for _, stage in homes[worker]] for worker in self._workers],
            self.cut_graph.limit_bytes,
            self.threshold,
            [
                crossing
                for stage, unit in enumerate(ends[1:-1])
                for crossing in self._dear_crossings(stage, ends[stage], unit)
            ],
            [self._shared_of_rows(weight, ends) for weight in self._shared],
        )

    def _dear_crossings(self, stage: int, first: int, unit: int) -> list[Crossing]:
        """Return the known transfers behind a stage that take longer than the least.

        Args:
            stage: The stage.
            first: Its first unit.
            unit: The first unit behind it.
        """
        sources = np.unique(self._extensions_from(stage, first).exit)
        behind = self._extensions_from(stage + 1, unit)
        targets, index = np.unique(behind.entry, return_index=True)
        crossings: list[Crossing] = []
        for source in sources[sources >= 0].tolist():
            costs = self._extra_crossing_costs(stage + 1, unit, source, behind)[index]
            crossings += [
                Crossing(stage, source, target, cost) for target, cost in zip(targets.tolist(), costs) if cost.any()
            ]
        return crossings

    def _shared_of_rows(self, weight: SharedWeight, ends: Sequence[int]) -> SharedSeconds:
        """Return the all-reduce of a shared weight for the rows of a cut; ``ends`` as :meth:`_selection_program`."""
        of_rows = {
            stage: weight.seconds(self._extensions_from(stage, ends[stage]).shared[:, number])
            for stage, number in (weight.early, weight.late)
        }
        return SharedSeconds(of_rows, np.array([self._shared_count(weight, bound) for bound in self.bounds]))

    def _is_below(self, rows: Sequence[int], ends: Sequence[int], sums: np.ndarray) -> bool:
        """Return whether a selection is below the threshold on every bound and fits.

        Args:
            rows: Per stage the index of its extension.
            ends: As :meth:`_selection_program`.
            sums: The first state.
        """
        layout = -1
        for stage, (unit, row) in enumerate(zip(ends, rows)):
            extensions = self._extensions_from(stage, unit)
            new, pairs, _ = self._extend(stage, unit, layout, sums[None], extensions)
            if row not in pairs:
                return False
            sums, layout = new[int(np.flatnonzero(pairs == row)[0])], int(extensions.exit[row])
        return True

    def _breadth_first(self, sums: np.ndarray) -> Selection | None:
        """Return a selection from the first state on, by extending all undominated states of each stage; None if there is none."""
        level: dict[tuple[int, int], States] = {(0, -1): States.initial(sums)}
        trail: list[dict[tuple[int, int], States]] = []
        for stage in range(self.cut_graph.num_stages):
            trail.append(level)
            parts: dict[tuple[int, int], list[States]] = {}
            total = 0
            for (unit, layout), states in level.items():
                extensions = self._extensions_from(stage, unit)
                chunk = max(1, _CHUNK // max(1, len(extensions)))
                for begin in range(0, len(states.sums), chunk):
                    self.check()
                    new, pairs, _ = self._extend(stage, unit, layout, states.sums[begin : begin + chunk], extensions)
                    origin, extension = np.divmod(pairs, max(1, len(extensions)))
                    for key, members in groups_of(extensions.stop[extension], extensions.exit[extension]):
                        part = States.of_one_source(
                            new[members], origin[members] + begin, extension[members], (unit, layout)
                        )
                        parts.setdefault(key, []).append(part)
                        total += len(members)
                if total > 4 * _MAX_STATES:
                    raise TooManyStatesError
            stop = self.cut_graph.explorer.stop
            level = {key: States.merged(several, stop) for key, several in parts.items()}
            if sum(len(states.sums) for states in level.values()) > _MAX_STATES:
                raise TooManyStatesError
        ends = [key for key in level if len(level[key].sums)]
        return self._traced(ends[0], level, trail) if ends else None

    def _traced(
        self,
        end: tuple[int, int],
        level: dict[tuple[int, int], States],
        trail: Sequence[dict[tuple[int, int], States]],
    ) -> Selection:
        """Return the selection of the first state of ``end``.

        Args:
            end: The (unit, layout) behind the last stage.
            level: The states behind the last stage.
            trail: The states before each stage.
        """
        key, index = end, 0
        selection: Selection = []
        for stage in range(self.cut_graph.num_stages - 1, -1, -1):
            states = level[key]
            key, extension = states.sources[int(states.source[index])], int(states.extension[index])
            extensions = self._extensions_from(stage, key[0])
            selection.append((stage, key[0], int(extensions.stop[extension]), int(extensions.row[extension])))
            index, level = int(states.origin[index]), trail[stage]
        return selection[::-1]

    # --------------------------------------------------------------------------------------------------------- extensions

    def _extend(
        self, stage: int, unit: int, layout: int, sums: np.ndarray, extensions: Extensions
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Extend states of one (stage, unit, layout) by each extension; leave out what is not below the threshold or does not fit.

        Args:
            stage, unit, layout: What the states have in common.
            sums: Shape (states, columns).
            extensions: The extensions from (stage, unit).

        Returns:
            For each remaining pair its sums, its index state * number of extensions + extension, and its score: the largest lower
            bound on a selection with it.
        """
        num_bounds = len(self.bounds)
        if not len(extensions):
            return sums[:0], np.zeros(0, dtype=np.intp), np.zeros(0)
        costs = extensions.costs + self._extra_crossing_costs(stage, unit, layout, extensions)
        with np.errstate(invalid="ignore"):
            least = costs + self._remaining[stage + 1][extensions.stop]
            room = self.threshold - sums[:, :num_bounds]
            is_below = (least[None] < room[:, None]).all(axis=2)
        pair = np.flatnonzero(is_below)
        state, extension = np.divmod(pair, len(extensions))
        new = sums[state]
        new[:, :num_bounds] += costs[extension]
        self._add_shared_weights(stage, extensions, extension, new)
        remaining = self._remaining[stage + 1][extensions.stop[extension]]
        fits = (new[:, :num_bounds] + remaining < self.threshold).all(axis=1)
        first, count = num_bounds + len(self._shared), len(self._workers)
        for worker in self._workers_of_stage[stage]:
            resident, buffer = first + worker, first + count + worker
            new[:, resident] += extensions.memory[extension]
            new[:, buffer] = np.maximum(new[:, buffer], extensions.buffer[extension])
            fits &= new[:, resident] + new[:, buffer] <= self.cut_graph.limit_bytes * (1 + 1e-12)
        new = new[fits]
        score = (new[:, :num_bounds] + remaining[fits]).max(axis=1, initial=0.0)
        return new, pair[fits], score

    def _extra_crossing_costs(self, stage: int, unit: int, layout: int, extensions: Extensions) -> np.ndarray:
        """Return what the known transfers from a layout to each extension cost beyond the least; shape (extensions, bounds)."""
        extra = np.zeros((len(extensions), len(self.bounds)))
        has_entry = extensions.entry >= 0
        if layout < 0 or not stage or not has_entry.any():
            return extra
        terms = self.cut_graph.terms
        seconds = self.cut_graph.known_extra_crossings(stage - 1, unit, layout, extensions.entry[has_entry])
        forward = [bound.weights[terms.transfer_forward][stage - 1] for bound in self.bounds]
        backward = [bound.weights[terms.transfer_backward][stage - 1] for bound in self.bounds]
        extra[has_entry] = seconds @ np.array([forward, backward])
        return extra

    def _extensions_from(self, stage: int, unit: int) -> Extensions:
        """Return the extensions by all allowed arcs that begin with ``unit``."""
        key = (stage, unit)
        if key not in self._extensions:
            stops = np.flatnonzero(self._allowed[stage][unit]).tolist()
            parts = [self._extensions_by_arc(stage, unit, stop) for stop in stops]
            self._extensions[key] = Extensions.joined(parts) if parts else self._no_extensions(stage)
        return self._extensions[key]

    def _no_extensions(self, stage: int) -> Extensions:
        none = np.zeros(0, dtype=np.intp)
        shared = np.zeros((0, self._num_shared(stage)))
        return Extensions(none, none, np.zeros((0, len(self.bounds))), none, none, shared, none, none)

    def _num_shared(self, stage: int) -> int:
        """Return the number of shared weights that a stage holds."""
        return sum(stage in (weight.early[0], weight.late[0]) for weight in self._shared)

    def _extensions_by_arc(self, stage: int, unit: int, stop: int) -> Extensions:
        arc = self.cut_graph.arcs.get((stage, unit, stop))
        if arc is None:
            # The rows are not loaded: one row of unknown layouts that takes the arc's least, and no memory.
            none = np.zeros(1)
            return Extensions(
                stop=np.array([stop]),
                row=np.array([-1]),
                costs=np.array([self._costs_without_exchange(stage, unit, stop)]),
                memory=none,
                buffer=none,
                shared=np.zeros((1, self._num_shared(stage))),
                entry=np.array([-1]),
                exit=np.array([-1]),
            )
        rows = arc.rows
        costs = np.column_stack([self.cut_graph.row_costs(bound, stage, arc) for bound in self.bounds])
        if stage < self.cut_graph.num_stages - 1:
            terms = self.cut_graph.terms
            crossing = np.array(
                [
                    bound.weights[terms.transfer_forward][stage] + bound.weights[terms.transfer_backward][stage]
                    for bound in self.bounds
                ]
            )
            costs = costs + crossing * self.cut_graph.least_transfer(stage, stop)
        return Extensions(
            stop=np.full(len(rows), stop),
            row=np.arange(len(rows)),
            costs=costs,
            memory=rows.memory,
            buffer=rows.buffer,
            shared=rows.shared,
            entry=arc.entry,
            exit=arc.exit,
        )

    # ----------------------------------------------------------------------------------------------------- shared weights

    def _costs_without_exchange(self, stage: int, unit: int, stop: int) -> list[float]:
        """Return what an arc costs in every bound without the exchange, which counts when the later stage is known."""
        if not self._num_shared(stage):
            return [float(costs[stage][unit, stop]) for costs in self._costs]
        plain = (self.cut_graph.arc_costs(bound, has_exchange=False) for bound in self.bounds)
        return [float(costs[stage][unit, stop]) for costs in plain]

    def _add_shared_weights(self, stage: int, extensions: Extensions, extension: np.ndarray, sums: np.ndarray) -> None:
        """Update the sums of extended states for the shared weights of a stage.

        The bytes of a gradient are a column of the sums between the weight's two stages.  At the later stage both stages reduce as
        many bytes as the one with more of them has.
        """
        for number, weight in enumerate(self._shared):
            column = len(self.bounds) + number
            if stage == weight.early[0]:
                sums[:, column] = extensions.shared[extension, weight.early[1]]
            elif stage == weight.late[0]:
                late_bytes = extensions.shared[extension, weight.late[1]]
                self._add_shared_all_reduce(weight, np.maximum(sums[:, column], late_bytes), sums)
                sums[:, column] = 0.0

    def _add_shared_all_reduce(self, weight: SharedWeight, nbytes: np.ndarray, sums: np.ndarray) -> None:
        """Add the all-reduce of a shared weight at both of its stages to the sums of every bound."""
        seconds = weight.seconds(nbytes)
        for number, bound in enumerate(self.bounds):
            sums[:, number] += self._shared_count(weight, bound) * seconds

    def _shared_count(self, weight: SharedWeight, bound: Bound) -> float:
        """Return how often the all-reduce of a shared weight counts in a bound: once for each of its stages."""
        weights = bound.weights[self.cut_graph.terms.all_reduce]
        return float(weights[weight.early[0]] + weights[weight.late[0]])

    # ------------------------------------------------------------------------------------------------ times of a selection

    def times(self, selection: Selection, unit_times: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the least seconds of every term for a selection, and whether they are exact.

        Args:
            selection: The selection.
            unit_times: Least seconds of every term by units, for stages whose rows are not loaded.

        Returns:
            The seconds, in the order of :class:`autoddl.pipelines.stepgraph.Terms`.  They are exact if the rows of all stages are
            loaded and the transfers between the stages' layouts are computed.
        """
        terms, cut_graph = self.cut_graph.terms, self.cut_graph
        times, is_exact = unit_times.copy(), True
        shared: dict[tuple[int, int], float] = {}
        previous_exit = -1
        for stage, first, stop, row in selection:
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
                if previous_exit >= 0 and entry >= 0:
                    entries = np.array([entry])
                    extra = cut_graph.known_extra_crossings(stage - 1, first, previous_exit, entries)[0]
                    is_exact &= cut_graph.has_crossing(stage - 1, first, previous_exit, entry)
                times[terms.transfer_forward.start + stage - 1] = least + extra[0]
                times[terms.transfer_backward.start + stage - 1] = least + extra[1]
            previous_exit = exit_
        for weight in self._shared:
            nbytes = max(shared.get(end, 0.0) for end in (weight.early, weight.late))
            seconds = float(weight.seconds(np.array([nbytes]))[0]) if nbytes else 0.0
            for stage, _ in (weight.early, weight.late):
                times[terms.all_reduce.start + stage] += seconds
        return times, is_exact

    def price_crossings(self, selection: Selection) -> None:
        """Compute the transfers between the layouts of a selection for later searches, and those between all layouts of its arcs
        if they are not too many."""
        arcs = [self.cut_graph.arcs[stage, first, stop] for stage, first, stop, _ in selection]
        for (stage, _, unit, row), (*_, next_row), before, behind in zip(selection, selection[1:], arcs, arcs[1:]):
            sources, targets = set(before.exit.tolist()), set(behind.entry.tolist())
            if len(sources) * len(targets) > _MAX_CROSSINGS:
                sources, targets = {int(before.exit[row])}, {int(behind.entry[next_row])}
            for source, target in product(sorted(sources), sorted(targets)):
                if source >= 0 and target >= 0:  # both sides have layouts
                    self.cut_graph.crossing(stage, unit, source, target)
        self._failed.clear()
