"""How stages can be run: for a stage, a way of recomputation and what its schedule asks of memory, all that is worth considering.

A row is one way to run a stage: seconds forward, backward, of running forward again, of the gradients' all-reduce; bytes that
stay on each device at the number of micro-batches in flight; the largest buffer; the layouts at both sides.  The step of a
pipeline grows with each of these, so that rows which another one with the same sides is nowhere above are never needed
(:mod:`autoddl.search.fronts`): the rest is the stage's front, and *within a threshold* that part of it that can still be of
use.

**Memory.** A stage with K micro-batches in flight and v versions of its weights needs state + (v - 1) weights + K kept +
buffer; where the whole stage is recomputed state + (v - 1) weights + K input + kept + buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.table import ClassCosts
from autoddl.costmodel.workload import Workload
from autoddl.search.fronts import Front, Guide, TooManyError, VectorEdge, VectorTable, front, least, least_choices

from .meshes import StageMesh
from .partition import Chain
from .stage_cost import Pricing, Replicas, StageTable, StageTables
from .unit_bounds import UnitBounds

__all__ = [
    "FixedStages",
    "Passes",
    "RowFilter",
    "StageDemand",
    "StageFront",
    "StageSearch",
    "megatron_stages",
    "replicated_stages",
]


#: Rows of a front, and of one that looks for the cheapest row alone, beyond which it is given up.
_MAX_ROWS, _MAX_PARTS = 8_000, 100_000
#: Within which part of the least a good row is looked for at first, and how that grows.
_FIRST_SLACK, _SLACK_GROWTH, _MAX_SLACK = 1e-4, 8.0, 3.0


@dataclass(frozen=True)
class StageDemand:
    """What a schedule asks of a stage's memory: micro-batches in flight, and weight versions."""

    in_flight: float
    versions: int


@dataclass(frozen=True)
class Passes:
    """What goes through a stage at a time, and who holds it.

    Attributes:
        micro_batch: samples.
        part: the samples of the smallest pass (half a micro-batch with Chimera's halving).
        replicas: the workers that hold the stage's weights.
    """

    micro_batch: int
    part: int
    replicas: Replicas


@dataclass(frozen=True)
class RowFilter:
    """Rows with ``weights . (forward, backward, recompute, gradient, memory) <= threshold`` are of use."""

    weights: tuple[float, float, float, float, float]
    threshold: float


@dataclass(frozen=True, eq=False)
class StageFront:
    """Ways to run a stage (module's docstring), one row each.

    Attributes:
        times: forward, backward (one pass through the stage), recompute, gradient; shape (rows, 4) [s].
        memory, buffer: bytes; shape (rows,).
        shared: bytes of the gradients of weights shared with other stages; shape (rows, weights).
        entry, exit: numbers of the layouts of the sides; -1 where data is read; shape (rows,).
        origin: (table, way of recomputation, options of its variables) of each row, by :meth:`strategies`.
    """

    times: np.ndarray
    memory: np.ndarray
    buffer: np.ndarray
    shared: np.ndarray
    entry: np.ndarray
    exit: np.ndarray
    origin: tuple[tuple[StageTable, str, np.ndarray], ...]

    def __len__(self) -> int:
        return len(self.memory)

    def strategies(self, row: int) -> tuple[str, dict[str, Strategy]]:
        """The way of recomputation of a row, and the strategy of every layer in the order of the stage's graph."""
        for table, way, choices in self.origin:
            if row < len(choices):
                return way, table.strategies(choices[row])
            row -= len(choices)
        raise IndexError(row)

    def only(self, rows: np.ndarray) -> StageFront:
        """Some rows, ascending."""
        origin, first = [], 0
        for table, way, choices in self.origin:
            mine = rows[(rows >= first) & (rows < first + len(choices))] - first
            origin.append((table, way, choices[mine]))
            first += len(choices)
        times, memory, buffer = self.times[rows], self.memory[rows], self.buffer[rows]
        return StageFront(times, memory, buffer, self.shared[rows], self.entry[rows], self.exit[rows], tuple(origin))


def joined(parts: Sequence[StageFront]) -> StageFront:
    """All rows of several."""

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    origin = tuple(origin for part in parts for origin in part.origin)
    times, memory, buffer = column("times"), column("memory"), column("buffer")
    return StageFront(times, memory, buffer, column("shared"), column("entry"), column("exit"), origin)


class StageSearch:
    """All stages of one model on one rectangle of devices.

    Args:
        workload: batch, precision and optimizer.
        share_with: others of the same, whose prices these may share.
        stop: when it is requested, what is being worked out is given up by StopRequestedError.
    """

    def __init__(
        self,
        chain: Chain,
        mesh: StageMesh,
        cluster: Cluster,
        workload: Workload,
        pricing: Pricing,
        share_with: StageSearch | None = None,
        stop: Stop | None = None,
    ):
        self.chain, self.mesh, self.stop = chain, mesh, stop or Stop()
        self.tables: StageTables = (
            share_with.tables if share_with else StageTables(chain, mesh, cluster, workload, pricing)
        )
        self.units: UnitBounds = share_with.units if share_with else UnitBounds(chain, self.tables)
        self._projected: dict[object, VectorTable] = {}
        self._hulls: dict[object, StageFront | None] = {}
        self.num_searches = 0
        workload = self.tables.workload
        #: What a further version of the weights adds to a stage's state, relatively.
        self.per_version = workload.itemsize / workload.bytes_per_parameter

    def table(self, first: int, stop: int, way: str, passes: Passes) -> StageTable | None:
        """The vectors of a stage; None where some layer has no strategy for these passes."""
        return self.tables.table(first, stop, way == "layers", passes.micro_batch, passes.part, passes.replicas)

    def memory_of(self, first: int, stop: int, way: str, passes: Passes, need: StageDemand) -> tuple[np.ndarray, float]:
        """What state and kept count for in bytes, and bytes besides (see the module's docstring)."""
        alive, constant = need.in_flight, 0.0
        if way == "stage":
            alive, constant = 1.0, need.in_flight * self.tables.input_bytes(first, stop, passes.micro_batch)
        return np.array([1 + (need.versions - 1) * self.per_version, alive]), constant

    def rows(
        self,
        first: int,
        stop: int,
        way: str,
        passes: Passes,
        need: StageDemand,
        wanted: Sequence[RowFilter],
        limit: float,
        is_shared: bool = False,
        has_sides: bool = True,
    ) -> StageFront | None:
        """The part of the front that is of use and within ``limit`` bytes; None where the stage cannot be run so at all.

        Args:
            is_shared: the bytes are for other stages, too.
            has_sides: rows of other layouts at the sides do not beat each other.

        Raises:
            TooManyError: it is too large to be looked at.
        """
        self.num_searches += 1
        found = self.table(first, stop, way, passes)
        if found is None:
            return None
        counts, constant = self.memory_of(first, stop, way, passes, need)
        table = self._with_memory(found, counts, has_sides)
        guides = [_guide(one, way, constant, table.num_components) for one in wanted]
        chosen = self._front(found, table, guides, limit - constant, is_shared)
        return _rows(found, way, chosen.choices, chosen.sums, chosen.sizes, constant)

    def _front(
        self, found: StageTable, table: VectorTable, guides: Sequence[Guide], limit: float, is_shared: bool
    ) -> Front:
        """What is worth considering of a table with memory."""
        return front(table, guides, (3, limit), self.stop, _MAX_ROWS, is_shared)

    def cheapest(
        self,
        first: int,
        stop: int,
        way: str,
        passes: Passes,
        need: StageDemand,
        weights: Sequence[float],
        limit: float,
        most: float,
    ) -> tuple[float, StageFront] | None:
        """The least weighted seconds (forward, backward, recompute, gradient) within ``limit`` bytes, and its row; by growing
        slack.

        None where there is nothing, or nothing below ``most``.
        """
        self.num_searches += 1
        found = self.table(first, stop, way, passes)
        if found is None:
            return None
        counts, constant = self.memory_of(first, stop, way, passes, need)
        table = self._scalar(found, way, tuple(weights), counts)
        room = limit - constant
        if room <= 0:
            return None
        try:
            price = float(least(table, np.array([[1.0, 0.0]]))[0]) / room
            prices = price * np.array([0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
            bounds = least(table, np.column_stack([np.ones(len(prices)), prices])) - prices * room
            bound = float(bounds.max())
            dual = float(prices[int(bounds.argmax())])
            slack = _FIRST_SLACK
            while bound < most and math.isfinite(bound):
                threshold = min(bound * (1 + slack) + 1e-15, most)
                guides = [Guide((1.0, 0.0), threshold), Guide((1.0, dual), threshold + dual * room)]
                chosen = front(table, guides, (1, room), self.stop, _MAX_PARTS)
                if len(chosen):
                    row = int(chosen.sums[:, 0].argmin())
                    choice = chosen.choices[row : row + 1]
                    sums, sizes = self._with_memory(found, counts).evaluate(choice)
                    return float(chosen.sums[row, 0]), _rows(found, way, choice, sums, sizes, constant)
                if threshold >= most or slack > _MAX_SLACK:
                    break
                slack *= _SLACK_GROWTH
        except TooManyError:
            pass
        return None

    def hull(
        self, first: int, stop: int, way: str, passes: Passes, need: StageDemand, weights: np.ndarray
    ) -> StageFront | None:
        """For each row of weights (forward, backward, recompute, gradient, bytes that stay) the row of the least weighted sum; None
        where there is none."""
        found = self.table(first, stop, way, passes)
        if found is None:
            return None
        counts, constant = self.memory_of(first, stop, way, passes, need)
        key = (id(found), way, constant, *counts.tolist(), weights.tobytes())
        if key not in self._hulls:
            self._hulls[key] = self._hull(found, way, counts, constant, weights)
        return self._hulls[key]

    def _hull(
        self, found: StageTable, way: str, counts: np.ndarray, constant: float, weights: np.ndarray
    ) -> StageFront | None:
        again = weights[:, 2:3] if way == "stage" else 0.0
        wanted = np.zeros((len(weights), found.table.num_components))
        wanted[:, :5] = np.hstack([weights[:, :1] + again, weights[:, [1, 3]], weights[:, 4:] * counts])
        try:
            choices = self._least_choices(found, wanted)
        except TooManyError:
            return None
        if not len(choices):
            return None
        choices = np.unique(choices, axis=0)
        sums, sizes = found.table.evaluate(choices)
        sums = np.column_stack([sums[:, :3], sums[:, 3:5] @ counts, sums[:, 5:]])
        return _rows(found, way, choices, sums, sizes, constant)

    def _least_choices(self, found: StageTable, weights: np.ndarray) -> np.ndarray:
        """A choice of the least sum of a stage's vectors for each weight, none where there is none."""
        return least_choices(self._sideless(found), weights)

    def _sideless(self, found: StageTable) -> VectorTable:
        """A stage's vectors, whatever its sides: taken apart once for all schedules."""
        if id(found) not in self._projected:
            self._projected[id(found)] = replace(found.table, keys=())
        return self._projected[id(found)]

    def least_memory(
        self, first: int, stop: int, way: str, passes: Passes, need: StageDemand, has_buffer: bool = True
    ) -> float:
        """The least bytes per device that a stage can be run with: what stays, and its largest buffer; inf without a way.

        Args:
            has_buffer: else what stays alone.
        """
        found = self.table(first, stop, way, passes)
        if found is None:
            return math.inf
        counts, constant = self.memory_of(first, stop, way, passes, need)
        table = self._scalar(found, way, (0.0, 0.0, 0.0, 0.0), counts)
        if not has_buffer:
            return float(least(table, np.array([[0.0, 1.0]]))[0]) + constant
        chosen = front(table, (), (1, math.inf), self.stop, _MAX_PARTS, is_shared=True)
        return float((chosen.sums[:, 1] + chosen.sizes).min(initial=math.inf)) + constant

    def _scalar(self, found: StageTable, way: str, weights: tuple[float, ...], counts: np.ndarray) -> VectorTable:
        """Components: weighted seconds, bytes."""
        key = (id(found), way == "stage", weights, *counts.tolist())
        if key not in self._projected:
            table = found.table
            forward = weights[0] + (weights[2] if way == "stage" else 0.0)
            seconds = np.array([forward, weights[1], weights[3]])
            sums = tuple(np.column_stack([s[:, :3] @ seconds, s[:, 3:5] @ counts]) for s in table.sums)
            edges = []
            for edge in table.edges:
                (_, there), (_, back) = edge.parts
                between = seconds[0] * there.class_costs + seconds[1] * back.class_costs
                edges.append(
                    VectorEdge(edge.source, edge.target, ((0, ClassCosts(between, there.rows, there.columns)),))
                )
            self._projected[key] = VectorTable(sums, table.sizes, tuple(edges))
        return self._projected[key]

    def _with_memory(self, found: StageTable, counts: np.ndarray, has_sides: bool = True) -> VectorTable:
        """Components forward, backward, gradient, memory, then bytes of shared weights."""
        key = (id(found), has_sides, *counts.tolist())
        if key not in self._projected:
            table = found.table
            sums = tuple(np.column_stack([s[:, :3], s[:, 3:5] @ counts, s[:, 5:]]) for s in table.sums)
            self._projected[key] = VectorTable(sums, table.sizes, table.edges, table.keys if has_sides else ())
        return self._projected[key]


def _guide(wanted: RowFilter, way: str, constant: float, num_components: int) -> Guide:
    forward, backward, recompute, gradient, memory = wanted.weights
    if way == "stage":
        forward += recompute
    weights = (forward, backward, gradient, memory, *(0.0,) * (num_components - 4))
    return Guide(weights, wanted.threshold - memory * constant)


def _rows(
    found: StageTable, way: str, choices: np.ndarray, sums: np.ndarray, sizes: np.ndarray, constant: float
) -> StageFront:
    again = sums[:, 0] if way == "stage" else np.zeros(len(sums))
    entry, exit_ = found.sides(choices)
    return StageFront(
        times=np.column_stack([sums[:, 0], sums[:, 1], again, sums[:, 2]]),
        memory=sums[:, 3] + constant,
        buffer=sizes,
        shared=sums[:, 4:],
        entry=entry,
        exit=exit_,
        origin=((found, way, choices),),
    )


class FixedStages(StageSearch):
    """Stages as experts run them: all layers follow one rule, the members of the named baselines."""

    def __init__(
        self,
        chain: Chain,
        mesh: StageMesh,
        cluster: Cluster,
        workload: Workload,
        pricing: Pricing,
        share_with: StageSearch | None = None,
        stop: Stop | None = None,
        *,
        names: tuple[str, ...],
    ):
        # Of few strategies few prices are worked out: nothing of the others' is of use.
        super().__init__(chain, mesh, cluster, workload, replace(pricing, untied=False, names=names), None, stop)
        self._members: dict[object, np.ndarray] = {}

    def _least_choices(self, found: StageTable, weights: np.ndarray) -> np.ndarray:
        choices = self._choices(found)
        sums, _ = found.table.evaluate(choices)
        choices, sums = choices[np.isfinite(sums).all(axis=1)], sums[np.isfinite(sums).all(axis=1)]
        return choices[(weights @ sums.T).argmin(axis=1)] if len(choices) else choices

    def _front(
        self, found: StageTable, table: VectorTable, guides: Sequence[Guide], limit: float, is_shared: bool
    ) -> Front:
        choices = self._choices(found)
        sums, sizes = table.evaluate(choices)
        fits = np.isfinite(sums).all(axis=1) & (sums[:, 3] + sizes <= limit)
        for guide in guides:
            fits &= sums @ np.array(guide.weights) <= guide.threshold * (1 + 1e-12)
        return Front(choices, sums, sizes).only(np.flatnonzero(fits))

    def cheapest(
        self,
        first: int,
        stop: int,
        way: str,
        passes: Passes,
        need: StageDemand,
        weights: Sequence[float],
        limit: float,
        most: float,
    ) -> tuple[float, StageFront] | None:
        rows = self.rows(first, stop, way, passes, need, (), limit)
        if rows is None or not len(rows):
            return None
        costs = rows.times @ np.array(weights)
        row = int(costs.argmin())
        return (float(costs[row]), rows.only(np.array([row]))) if costs[row] < most else None

    def _choices(self, found: StageTable) -> np.ndarray:
        if id(found) not in self._members:
            self._members[id(found)] = np.array(list(self._of_members(found)), dtype=np.intp).reshape(
                -1, len(found.phases.variables)
            )
        return self._members[id(found)]

    def _of_members(self, found: StageTable) -> Iterator[list[int]]:
        for member in self.tables.members(found.graph):
            choice = []
            for variable in found.phases.variables:
                wanted = {member.strategies[name] for name in variable.layers if name not in variable.swapped}
                option = variable.option_set.index.get(next(iter(wanted))) if len(wanted) == 1 else None
                if option is None:
                    break
                if any(variable.strategy(name, option) != member.strategies[name] for name in variable.swapped):
                    break
                choice.append(option)
            else:
                yield choice


MakeStages = Callable[..., StageSearch]

#: Megatron's tensor parallelism, down to pure data parallelism.
megatron_stages: MakeStages = partial(FixedStages, names=("megatron", "data parallel"))
#: Every stage is replicated on its devices, as the papers of pipelines have it.
replicated_stages: MakeStages = partial(FixedStages, names=("data parallel",))
