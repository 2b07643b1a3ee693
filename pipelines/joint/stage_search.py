"""The search for the best strategies of a stage: its Pareto front of time and memory.

A *row* is an assignment of strategies to the layers of a stage, with its costs:

- seconds of the forward pass, the backward pass, the recomputation and the gradient all-reduce;
- resident bytes per device at the number of micro-batches in flight, and bytes of the largest buffer;
- the layouts of the tensors at both sides of the stage.

The step of a pipeline does not decrease with any of the costs.  So a row is *dominated* if another row with the same layouts at
both sides is no greater in any cost, and dominated rows are not needed (:mod:`autoddl.search.fronts`).  The other rows are the
stage's *front*.  *Filters* restrict the front to the rows that may be part of a plan better than the incumbent.

**Memory.**  A stage with K micro-batches in flight and v versions of its weights needs

    state + (v - 1) weights + K kept + recomputed + buffer,           or with recomputation of the stage
    state + (v - 1) weights + K input + L kept + buffer

where L micro-batches are between the second forward pass and the end of the backward pass, and the activations of one block are
*recomputed*, if blocks are recomputed one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.table import ClassCosts
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import Baseline
from autoddl.search.dominance import TooManyError
from autoddl.search.fronts import Front, Guide, VectorEdge, VectorTable, front, least, least_choices

from .meshes import StageMesh
from .partition import Chain
from .stage_cost import MEMORY, Pricing, Replicas, StageTable, StageTables
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


#: Largest number of rows of a front.
_MAX_ROWS = 32_000
#: Largest number of partial rows in a search for a single row.
_MAX_PARTIAL_ROWS = 100_000
#: The search for the cheapest row first considers rows up to this relative distance above the lower bound.
_FIRST_SLACK = 1e-4
#: Factor by which that distance grows as long as no row is found.
_SLACK_GROWTH = 8.0
#: Distance after which the search for the cheapest row ends without a row.
_MAX_SLACK = 3.0
#: Prices of a byte that give a lower bound on the cheapest row, relative to (least seconds) / (memory limit).
_RELATIVE_PRICES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class StageDemand:
    """The memory demand of a schedule on one stage.

    Attributes:
        in_flight: Largest number of micro-batches in flight.
        versions: Largest number of weight versions at a time.
        running: Largest number of micro-batches whose activations are kept if the whole stage is recomputed.
    """

    in_flight: float
    versions: int
    running: float = 1.0


@dataclass(frozen=True)
class Passes:
    """The samples of a stage's passes, and the workers that hold the stage.

    Attributes:
        micro_batch: Samples per micro-batch.
        smallest_pass: Samples of the smallest pass: a micro-batch, or half of it with Chimera's backward halving.
        replicas: Workers that hold the stage's weights.
    """

    micro_batch: int
    smallest_pass: int
    replicas: Replicas


@dataclass(frozen=True)
class RowFilter:
    """A restriction to rows with ``weights . (forward, backward, recompute, gradient, memory) + exchange shared <= threshold``.

    Attributes:
        weights: Weights of the four times and of the resident bytes.
        threshold: Largest allowed value of the weighted sum.
        exchange: Weight of a byte of the gradients that are shared with another stage.
    """

    weights: tuple[float, float, float, float, float]
    threshold: float
    exchange: float = 0.0


@dataclass(frozen=True, eq=False)
class StageFront:
    """Rows of one stage (see the module's docstring).

    Attributes:
        times: Seconds of the forward pass, one backward pass, the recomputation and the gradient all-reduce; shape (rows, 4).
        memory: Resident bytes per device; shape (rows,).
        buffer: Bytes of the largest buffer per device; shape (rows,).
        shared: Gradient bytes that a device updates of each weight that is shared with another stage; shape (rows, weights).
        entry: Class of the layout in which the stage needs its input; -1 for the first stage, which reads the data; shape (rows,).
        exit: Class of the layout in which the stage leaves its output; shape (rows,).
        origin: The rows in groups of (table, way of recomputation, option of each variable, shape (rows, variables)).
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
        for table, recompute, choices in self.origin:
            if row < len(choices):
                return recompute, table.strategies(choices[row])
            row -= len(choices)
        raise IndexError(row)

    def only(self, rows: np.ndarray) -> StageFront:
        """The front restricted to some rows, given by ascending indices."""
        origin, first = [], 0
        for table, recompute, choices in self.origin:
            in_group = rows[(rows >= first) & (rows < first + len(choices))] - first
            origin.append((table, recompute, choices[in_group]))
            first += len(choices)
        times, memory, buffer = self.times[rows], self.memory[rows], self.buffer[rows]
        return StageFront(times, memory, buffer, self.shared[rows], self.entry[rows], self.exit[rows], tuple(origin))


def concatenated_fronts(parts: Sequence[StageFront]) -> StageFront:
    """Concatenate the rows of several fronts."""

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    origin = tuple(group for part in parts for group in part.origin)
    times, memory, buffer = column("times"), column("memory"), column("buffer")
    return StageFront(times, memory, buffer, column("shared"), column("entry"), column("exit"), origin)


class StageSearch:
    """Searches of all stages of one model on one rectangle of devices.

    The methods share these arguments:

    - ``first``, ``stop``: the stage has the units ``first`` to ``stop - 1``;
    - ``recompute``: way of recomputation, one of :data:`.configuration.RECOMPUTATIONS`;
    - ``passes``: samples of the passes, and workers that hold the stage;
    - ``demand``: memory demand of the schedule on the stage;
    - ``limit``: memory limit per device in bytes.

    Args:
        chain: The model as a chain of units.
        mesh: The rectangle of devices.
        cluster: The devices and their network.
        workload: Batch, precision and optimizer.
        pricing: Objective and offered strategies.
        share_with: Another search with the same arguments, whose tables this one shares.
        stop: When it is requested, the current search raises StopRequestedError.
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
        self.unit_bounds: UnitBounds = share_with.unit_bounds if share_with else UnitBounds(chain, self.tables)
        #: Tables derived from stage tables, by table and arguments.
        self._derived: dict[object, VectorTable] = {}
        self._hulls: dict[object, StageFront | None] = {}
        self.num_searches = 0
        workload = self.tables.workload
        #: Bytes of one version of the weights, relative to a stage's state.
        self.weights_per_state = workload.itemsize / workload.bytes_per_parameter

    def table(self, first: int, stop: int, recompute: str, passes: Passes) -> StageTable | None:
        """The table of a stage; None if some layer has no strategy for these passes."""
        return self.tables.table(first, stop, recompute, passes.micro_batch, passes.smallest_pass, passes.replicas)

    def memory_of(
        self, first: int, stop: int, recompute: str, passes: Passes, demand: StageDemand
    ) -> tuple[np.ndarray, float]:
        """The resident bytes as a linear function (see the module's docstring).

        Returns:
            counts, constant: resident bytes = counts . (state, kept, recomputed) + constant.
        """
        num_kept, constant = demand.in_flight, 0.0
        if recompute == "stage":
            num_kept = demand.running
            constant = demand.in_flight * self.tables.input_bytes(first, stop, passes.micro_batch)
        return np.array([1 + (demand.versions - 1) * self.weights_per_state, num_kept, 1.0]), constant

    def rows(
        self,
        first: int,
        stop: int,
        recompute: str,
        passes: Passes,
        demand: StageDemand,
        filters: Sequence[RowFilter],
        limit: float,
        is_shared: bool = False,
        has_sides: bool = True,
        has_memory: bool = True,
    ) -> StageFront | None:
        """The rows of the front that pass all filters and fit the memory limit; None if some layer has no strategy.

        Args:
            first, stop, recompute, passes, demand, limit: As described in the class's docstring.
            filters: Restrictions of the rows.
            is_shared: Whether other stages of the worker use a part of the memory limit, so that less memory is always better.
            has_sides: Whether only rows with the same layouts at both sides dominate each other.
            has_memory: Whether memory matters.  If not, rows are compared by their seconds and shared bytes alone, so that there
                are much fewer; all have the least memory of the stage, and no buffer.

        Raises:
            TooManyError: the front has too many rows.
        """
        self.num_searches += 1
        stage_table = self.table(first, stop, recompute, passes)
        if stage_table is None:
            return None
        counts, constant = self.memory_of(first, stop, recompute, passes, demand)
        if not has_memory:
            constant = self.least_memory(first, stop, recompute, passes, demand, has_buffer=False)
            counts, limit, is_shared = np.zeros_like(counts), math.inf, False
        table = self._table_with_memory(stage_table, counts, has_sides)
        guides = [_guide(row_filter, recompute, constant, table.num_components) for row_filter in filters]
        chosen = self._front(stage_table, table, guides, limit - constant, is_shared)
        sizes = chosen.sizes if has_memory else np.zeros_like(chosen.sizes)
        return _stage_front(stage_table, recompute, chosen.choices, chosen.sums, sizes, constant)

    def _front(
        self, stage_table: StageTable, table: VectorTable, guides: Sequence[Guide], limit: float, is_shared: bool
    ) -> Front:
        """The front of ``table``, which is derived from ``stage_table`` by :meth:`_table_with_memory`."""
        return front(table, guides, (3, limit), self.stop, _MAX_ROWS, is_shared)

    def cheapest(
        self,
        first: int,
        stop: int,
        recompute: str,
        passes: Passes,
        demand: StageDemand,
        weights: Sequence[float],
        limit: float,
        max_cost: float,
    ) -> tuple[float, StageFront] | None:
        """The row of the least weighted seconds that fits the memory limit.

        Args:
            first, stop, recompute, passes, demand, limit: As described in the class's docstring.
            weights: Weights of the seconds forward, backward, of recomputation and of the gradient all-reduce.
            max_cost: Weighted seconds that the row must be below.

        Returns:
            The weighted seconds and the row; None if no row is below ``max_cost``, or if the search is too large.
        """
        self.num_searches += 1
        stage_table = self.table(first, stop, recompute, passes)
        if stage_table is None:
            return None
        counts, constant = self.memory_of(first, stop, recompute, passes, demand)
        table = self._table_of_cost_and_memory(stage_table, recompute, tuple(weights), counts)
        room = limit - constant
        if room <= 0:
            return None
        try:
            # A lower bound on the cost: the Lagrangian dual, at the best one of several prices of a byte.
            price = float(least(table, np.array([[1.0, 0.0]]))[0]) / room
            prices = price * np.array(_RELATIVE_PRICES)
            bounds = least(table, np.column_stack([np.ones(len(prices)), prices])) - prices * room
            bound = float(bounds.max())
            best_price = float(prices[int(bounds.argmax())])
            # Search the rows near the bound, farther and farther away, until there is one.
            slack = _FIRST_SLACK
            while bound < max_cost and math.isfinite(bound):
                threshold = min(bound * (1 + slack) + 1e-15, max_cost)
                guides = [Guide((1.0, 0.0), threshold), Guide((1.0, best_price), threshold + best_price * room)]
                chosen = front(table, guides, (1, room), self.stop, _MAX_PARTIAL_ROWS)
                if len(chosen):
                    row = int(chosen.sums[:, 0].argmin())
                    choice = chosen.choices[row : row + 1]
                    sums, sizes = self._table_with_memory(stage_table, counts).evaluate(choice)
                    rows = _stage_front(stage_table, recompute, choice, sums, sizes, constant)
                    return float(chosen.sums[row, 0]), rows
                if threshold >= max_cost or slack > _MAX_SLACK:
                    break
                slack *= _SLACK_GROWTH
        except TooManyError:
            pass
        return None

    def hull(
        self,
        first: int,
        stop: int,
        recompute: str,
        passes: Passes,
        demand: StageDemand,
        weights: np.ndarray,
        byte_s: float = 0.0,
    ) -> StageFront | None:
        """For each of several weightings, the row of the least weighted sum, whatever its memory.

        Args:
            first, stop, recompute, passes, demand: As described in the class's docstring.
            weights: Weights of the seconds forward, backward, of recomputation and of the gradient all-reduce, and of resident
                bytes; shape (weightings, 5).
            byte_s: Seconds to all-reduce a byte of the gradient of a weight that another stage holds, too.

        Returns:
            The different rows; None if there is no row, or if the search is too large.
        """
        stage_table = self.table(first, stop, recompute, passes)
        if stage_table is None:
            return None
        counts, constant = self.memory_of(first, stop, recompute, passes, demand)
        if stage_table.table.num_components == MEMORY.stop:
            byte_s = 0.0  # no weight is shared
        key = (id(stage_table), recompute, constant, *counts.tolist(), weights.tobytes(), byte_s)
        if key not in self._hulls:
            self._hulls[key] = self._hull(stage_table, recompute, counts, constant, weights, byte_s)
        return self._hulls[key]

    def _hull(
        self,
        stage_table: StageTable,
        recompute: str,
        counts: np.ndarray,
        constant: float,
        weights: np.ndarray,
        byte_s: float,
    ) -> StageFront | None:
        recompute_weights = weights[:, 2:3] if recompute == "stage" else 0.0
        table_weights = np.zeros((len(weights), stage_table.table.num_components))
        table_weights[:, : MEMORY.stop] = np.hstack(
            [weights[:, :1] + recompute_weights, weights[:, [1, 3]], weights[:, 4:] * counts]
        )
        table_weights[:, MEMORY.stop :] = byte_s * weights[:, 3:4]
        try:
            choices = self._least_choices(stage_table, table_weights)
        except TooManyError:
            return None
        if not len(choices):
            return None
        choices = np.unique(choices, axis=0)
        sums, sizes = stage_table.table.evaluate(choices)
        sums = np.column_stack([sums[:, :3], sums[:, MEMORY] @ counts, sums[:, MEMORY.stop :]])
        return _stage_front(stage_table, recompute, choices, sums, sizes, constant)

    def _least_choices(self, stage_table: StageTable, weights: np.ndarray) -> np.ndarray:
        """For each weighting, a choice of the least weighted sum; no rows if there is no feasible choice."""
        return least_choices(self._table_without_sides(stage_table), weights)

    def derived(self, key: object, make: Callable[[], VectorTable]) -> VectorTable:
        """The table of a key, which is derived from stage tables; cached, so that its elimination steps are computed once for all
        schedules.

        Args:
            key: Identifies the stage tables by their ``id``, and what is derived from them.
            make: Makes the table if it is missing.
        """
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def _table_without_sides(self, stage_table: StageTable) -> VectorTable:
        """The table without layouts at the sides."""
        return self.derived(id(stage_table), lambda: replace(stage_table.table, keys=()))

    def least_memory(
        self, first: int, stop: int, recompute: str, passes: Passes, demand: StageDemand, has_buffer: bool = True
    ) -> float:
        """The least bytes per device that a stage needs; inf if some layer has no strategy.

        Args:
            first, stop, recompute, passes, demand: As described in the class's docstring.
            has_buffer: Whether to count the largest buffer in addition to the resident bytes.
        """
        stage_table = self.table(first, stop, recompute, passes)
        if stage_table is None:
            return math.inf
        counts, constant = self.memory_of(first, stop, recompute, passes, demand)
        table = self._table_of_cost_and_memory(stage_table, recompute, (0.0, 0.0, 0.0, 0.0), counts)
        if not has_buffer:
            return float(least(table, np.array([[0.0, 1.0]]))[0]) + constant
        chosen = front(table, (), (1, math.inf), self.stop, _MAX_PARTIAL_ROWS, is_shared=True)
        return float((chosen.sums[:, 1] + chosen.sizes).min(initial=math.inf)) + constant

    def _table_of_cost_and_memory(
        self, stage_table: StageTable, recompute: str, weights: tuple[float, ...], counts: np.ndarray
    ) -> VectorTable:
        """The table with two components: weighted seconds, and resident bytes (without their constant part)."""
        forward_weight = weights[0] + (weights[2] if recompute == "stage" else 0.0)
        time_weights = np.array([forward_weight, weights[1], weights[3]])

        def make() -> VectorTable:
            table = stage_table.table
            sums = tuple(np.column_stack([s[:, :3] @ time_weights, s[:, MEMORY] @ counts]) for s in table.sums)
            edges = []
            for edge in table.edges:
                (_, forward), (_, backward) = edge.parts
                costs = time_weights[0] * forward.class_costs + time_weights[1] * backward.class_costs
                class_costs = ClassCosts(costs, forward.rows, forward.columns)
                edges.append(VectorEdge(edge.source, edge.target, ((0, class_costs),)))
            return VectorTable(sums, table.sizes, tuple(edges))

        return self.derived((id(stage_table), recompute == "stage", weights, *counts.tolist()), make)

    def _table_with_memory(self, stage_table: StageTable, counts: np.ndarray, has_sides: bool = True) -> VectorTable:
        """The table with components forward, backward, gradient, resident bytes (without their constant part), and then the bytes
        of every shared weight."""

        def make() -> VectorTable:
            table = stage_table.table
            sums = tuple(np.column_stack([s[:, :3], s[:, MEMORY] @ counts, s[:, MEMORY.stop :]]) for s in table.sums)
            return VectorTable(sums, table.sizes, table.edges, table.keys if has_sides else ())

        return self.derived((id(stage_table), has_sides, *counts.tolist()), make)


def _guide(row_filter: RowFilter, recompute: str, constant: float, num_components: int) -> Guide:
    """A row filter as a guide over the components of :meth:`StageSearch._table_with_memory`."""
    forward, backward, recomputation, gradient, memory = row_filter.weights
    if recompute == "stage":
        forward += recomputation
    weights = (forward, backward, gradient, memory, *(row_filter.exchange,) * (num_components - 4))
    return Guide(weights, row_filter.threshold - memory * constant)


def _stage_front(
    stage_table: StageTable, recompute: str, choices: np.ndarray, sums: np.ndarray, sizes: np.ndarray, constant: float
) -> StageFront:
    """Choices as rows, from their sums and sizes in the table of :meth:`StageSearch._table_with_memory`."""
    recompute_s = sums[:, 0] if recompute == "stage" else np.zeros(len(sums))
    entry, exit_ = stage_table.sides(choices)
    return StageFront(
        times=np.column_stack([sums[:, 0], sums[:, 1], recompute_s, sums[:, 2]]),
        memory=sums[:, 3] + constant,
        buffer=sizes,
        shared=sums[:, 4:],
        entry=entry,
        exit=exit_,
        origin=((stage_table, recompute, choices),),
    )


class FixedStages(StageSearch):
    """Searches of stages in which all layers follow one rule: the strategies of named baselines (:mod:`autoddl.search.baselines`).

    Args:
        names: Names of the baselines; the other arguments are those of :class:`StageSearch`.
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
        *,
        names: tuple[str, ...],
    ):
        # The tables of ``share_with`` have the prices of many more strategies: sharing them would not save time.
        super().__init__(chain, mesh, cluster, workload, replace(pricing, untied=False, names=names), None, stop)
        self._choices: dict[object, np.ndarray] = {}

    def _least_choices(self, stage_table: StageTable, weights: np.ndarray) -> np.ndarray:
        choices = self._choices_of_baselines(stage_table)
        sums, _ = stage_table.table.evaluate(choices)
        choices, sums = choices[np.isfinite(sums).all(axis=1)], sums[np.isfinite(sums).all(axis=1)]
        return choices[(weights @ sums.T).argmin(axis=1)] if len(choices) else choices

    def _front(
        self, stage_table: StageTable, table: VectorTable, guides: Sequence[Guide], limit: float, is_shared: bool
    ) -> Front:
        choices = self._choices_of_baselines(stage_table)
        sums, sizes = table.evaluate(choices)
        fits = np.isfinite(sums).all(axis=1) & (sums[:, 3] + sizes <= limit)
        for guide in guides:
            fits &= sums @ np.array(guide.weights) <= guide.threshold * (1 + 1e-12)
        return Front(choices, sums, sizes).only(np.flatnonzero(fits))

    def cheapest(
        self,
        first: int,
        stop: int,
        recompute: str,
        passes: Passes,
        demand: StageDemand,
        weights: Sequence[float],
        limit: float,
        max_cost: float,
    ) -> tuple[float, StageFront] | None:
        rows = self.rows(first, stop, recompute, passes, demand, (), limit)
        if rows is None or not len(rows):
            return None
        costs = rows.times @ np.array(weights)
        row = int(costs.argmin())
        return (float(costs[row]), rows.only(np.array([row]))) if costs[row] < max_cost else None

    def _choices_of_baselines(self, stage_table: StageTable) -> np.ndarray:
        """The baselines as choices; shape (baselines, variables)."""
        if id(stage_table) not in self._choices:
            choices = []
            for baseline in self.tables.members(stage_table.graph):
                choice = _choice_of(baseline, stage_table)
                if choice is not None:
                    choices.append(choice)
            num_variables = len(stage_table.phases.variables)
            self._choices[id(stage_table)] = np.array(choices, dtype=np.intp).reshape(-1, num_variables)
        return self._choices[id(stage_table)]


def _choice_of(baseline: Baseline, stage_table: StageTable) -> list[int] | None:
    """The option of every variable that gives the baseline's strategies; None if there is none."""
    choice = []
    for variable in stage_table.phases.variables:
        strategies = {baseline.strategies[name] for name in variable.layers if name not in variable.swapped}
        option = variable.option_set.index.get(next(iter(strategies))) if len(strategies) == 1 else None
        if option is None:
            return None
        if any(variable.strategy(name, option) != baseline.strategies[name] for name in variable.swapped):
            return None
        choice.append(option)
    return choice


#: Constructor of the searches of stages, with the arguments of :class:`StageSearch`.
MakeStages = Callable[..., StageSearch]

#: Stages with Megatron's tensor parallelism, of any degree down to pure data parallelism.
megatron_stages: MakeStages = partial(FixedStages, names=("megatron", "expert parallel", "data parallel"))
#: Stages that are replicated on all devices of their worker (pure data parallelism), as in the papers about pipelines.
replicated_stages: MakeStages = partial(FixedStages, names=("data parallel",))
