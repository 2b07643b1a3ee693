"""The cut graph of a setting: a layered graph whose paths are cuts, with lower bounds on the cost of every arc.

An *arc* (s, i, j) is stage s with the units i to j - 1.  A path through one arc of each stage is a cut (:mod:`.cut_regions`).  A
:class:`.bounds.Bound` is a linear lower bound on the step: weights of the schedule's terms, and prices of memory.  For each bound
an arc costs at least

    cost(s, i, j) = least over the ways to run the stage of [ weights . seconds + price (bytes - share of the limit) ]
                    + weight of the transfers over the boundary behind the stage * their least seconds

The least over the ways to run a stage comes from one of two sources:

-   its *units*: the sum of what each unit adds at least, with free redistributions between units, and inside them unless the bounds
    are tight (:mod:`.unit_bounds`); known for all arcs;
-   its *rows*, once they are loaded (:mod:`.arc_rows`): the front of the stage's ways to run, as far as it is within the memory
    limit and within thresholds; expensive, so only for the arcs of single cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from autoddl.costmodel.distribution import RowsAndFeatures

from ..stepgraph import Terms
from .boundary import boundary_of
from .bounds import Bound, least_over_cuts, placement_of
from .configuration import recomputed_inside
from .cut_regions import impossible_arcs
from .explorer import Explorer, Setting
from .memory_demand import MemoryDemand
from .meshes import StageMesh
from .shared_weights import exchange_of
from .space import SOME_BLOCKS, recomputations_of_stage, ways_of_arcs, ways_of_units
from .stage_cost import COMPONENTS
from .stage_search import Passes, StageDemand, StageFront, StageSearch
from .unit_runs import UnitRuns, runs_of

if TYPE_CHECKING:
    from .arc_rows import Arc

__all__ = ["MEMORY_PRICES", "CutGraph"]

#: Prices of a byte that bounds try, for a stage of mean weight: as parts of a step per memory limit.
MEMORY_PRICES = (0.03, 0.1, 0.3, 1.0, 3.0)
#: Number of bounds whose costs of all arcs by units are remembered.
_MAX_KNOWN_ARC_COSTS = 32


class CutGraph:
    """The arcs of one setting, and what they cost at least in a bound.

    Args:
        explorer: Searches of stages on each rectangle of devices.
        setting: The setting.
        recomputations: The ways of recomputation on offer (:data:`.configuration.RECOMPUTATIONS`).
        demand: The micro-batches in flight and the weight versions of the setting's schedule.

    Attributes:
        stage_searches, stage_demands, passes: Per stage the search of its rows, its memory demand, and its passes.
        is_alone: Whether each worker has a single stage.
        limit_bytes: Memory limit of a device [bytes].
        is_tight: Whether redistributions inside units count (:mod:`.unit_bounds`).
        arcs: The arcs whose rows are loaded.
    """

    def __init__(self, explorer: Explorer, setting: Setting, recomputations: Sequence[str], demand: MemoryDemand):
        self.explorer, self.setting, self.recomputations, self.demand = explorer, setting, tuple(recomputations), demand
        self.spec = setting.schedule
        self.num_stages, self.num_units = self.spec.num_stages, explorer.chain.num_units
        self.passes: tuple[Passes, ...] = explorer.passes(setting)
        self.stage_searches: tuple[StageSearch, ...] = tuple(explorer.stage_search(mesh) for mesh in setting.meshes)
        self.stage_demands = [StageDemand(*counts) for counts in zip(demand.in_flight, demand.versions, demand.running)]
        self.has_one_stage_per_worker = all(len(held) == 1 for held in demand.homes)
        self.terms = Terms(self.num_stages)
        self.placement = placement_of(self.spec.num_workers, self.spec.groups, self.spec.num_pipelines)
        self.limit_bytes = explorer.limit_bytes
        self.is_tight = False
        #: Per stage the number of stages on its worker (the largest of them if several workers hold the stage).
        self._stages_on_worker = np.ones(self.num_stages)
        for held in demand.homes:
            for _, stage in held:
                self._stages_on_worker[stage] = max(self._stages_on_worker[stage], float(len(held)))
        self._in_flight = np.array(demand.in_flight)
        self._running = np.array(demand.running)
        #: Per stage its bytes of state with all weight versions, as a multiple of the state with one version.
        self._state_factors = np.array(
            [1 + (v - 1) * one.weights_per_state for v, one in zip(demand.versions, self.stage_searches)]
        )
        #: Stages of equal rectangles and passes, by (first stage on the rectangle, passes).
        self._equal_stages: dict[tuple[int, Passes], list[int]] = {}
        first: dict[StageMesh, int] = {}
        for stage, (mesh, passes) in enumerate(zip(setting.meshes, self.passes)):
            self._equal_stages.setdefault((first.setdefault(mesh, stage), passes), []).append(stage)
        self._layout_numbers: dict[RowsAndFeatures, int] = {}
        self._layouts: list[RowsAndFeatures] = []
        self._crossings: dict[tuple[int, int, int, int], tuple[float, float]] = {}
        self.arcs: dict[tuple[int, int, int], Arc] = {}
        #: The costs of all arcs by units for the latest bounds, if rows are loaded one after the other; else None.
        self._known_arc_costs: dict[tuple[Bound, bool], list[np.ndarray]] | None = None

    def without_rows(self) -> CutGraph:
        """Return a cut graph of the same setting to load rows into; it shares layouts and transfers with this one."""
        graph = copy(self)
        graph.arcs, graph._known_arc_costs = {}, {}
        return graph

    # ------------------------------------------------------------------------------------------- transfers between stages

    @cached_property
    def _transfers(self) -> np.ndarray:
        """Least seconds of a transfer over each boundary, by the first unit behind the boundary; shape (stages - 1, units + 1)."""
        return self.explorer.least_transfers(self.setting)

    def crossing(self, boundary: int, unit: int, source: int, target: int) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward transfer over a boundary.

        Args:
            boundary: The boundary.
            unit: The first unit behind the boundary.
            source, target: Numbers of the layouts before and behind the boundary.
        """
        key = (boundary, unit, source, target)
        if key not in self._crossings:
            explorer, setting = self.explorer, self.setting
            chain = explorer.chain
            between = boundary_of(
                setting.mesh,
                explorer.cluster,
                self.placement,
                boundary,
                chain.graph.layers[chain.starts[unit] - 1],
                self._layouts[source],
                self._layouts[target],
                replace(explorer.workload, micro_batch=setting.micro_batch),
            )
            self._crossings[key] = between.forward_s, between.backward_s
        return self._crossings[key]

    def has_crossing(self, boundary: int, unit: int, source: int, target: int) -> bool:
        """Return whether :meth:`crossing` was already called with these arguments."""
        return (boundary, unit, source, target) in self._crossings

    def known_extra_crossings(self, boundary: int, unit: int, source: int, targets: np.ndarray) -> np.ndarray:
        """Return by how many seconds transfers take longer than the least; 0 for those that :meth:`crossing` has not computed.

        Args:
            boundary, unit, source: As :meth:`crossing`.
            targets: Numbers of the layouts behind the boundary, shape (targets,).

        Returns:
            Seconds forward and backward, shape (targets, 2).
        """
        least = self._transfers[boundary, unit]
        extra = np.zeros((len(targets), 2))
        for target in np.unique(targets).tolist():
            known = self._crossings.get((boundary, unit, source, target))
            if known is not None:
                extra[targets == target] = max(0.0, known[0] - least), max(0.0, known[1] - least)
        return extra

    def least_transfers_at(self, boundary: int) -> np.ndarray:
        """Return the least seconds of a transfer over a boundary in one direction, by the first unit behind it; shape
        (units + 1,)."""
        return np.asarray(self._transfers[boundary])

    def least_transfer(self, boundary: int, unit: int) -> float:
        """Return the least seconds of a transfer in one direction over a boundary before ``unit``."""
        return float(self._transfers[boundary, unit])

    def _numbers_of(self, layouts: Sequence[RowsAndFeatures], classes: np.ndarray) -> np.ndarray:
        """Return the numbers, in this setting, of layouts that are given by their indices in the list of one table."""
        numbers = []
        for layout in layouts:
            if layout not in self._layout_numbers:
                self._layout_numbers[layout] = len(self._layouts)
                self._layouts.append(layout)
            numbers.append(self._layout_numbers[layout])
        return np.array(numbers, dtype=np.intp)[classes] if layouts else np.full(len(classes), -1)

    def side_layouts(self, rows: StageFront) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each row of a stage, the numbers of its entry and exit layouts; -1 for none."""
        entry, exit_, begin = [], [], 0
        for table, _, choices in rows.origin:
            end = begin + len(choices)
            entry.append(self._numbers_of(table.entries, rows.entry[begin:end]))
            exit_.append(self._numbers_of(table.exits, rows.exit[begin:end]))
            begin = end
        return np.concatenate(entry), np.concatenate(exit_)

    @cached_property
    def exchange(self) -> tuple[float, float]:
        """Seconds to exchange gradients of shared weights, in any case and for each byte (:func:`.shared_weights.exchange_of`)."""
        return exchange_of(self)

    @cached_property
    def fixed_times(self) -> np.ndarray:
        """Least seconds of every term beside what units and transfers take: to exchange gradients of shared weights."""
        times = np.zeros(self.terms.count)
        times[self.terms.all_reduce][[0, -1]] = self.exchange[0]
        return times

    def fixed_seconds(self, weights: np.ndarray) -> float:
        """What :attr:`fixed_times` add to a bound with some weights of the terms."""
        ends = weights[self.terms.all_reduce][[0, -1]]
        return float(weights @ self.fixed_times) if ends.any() else 0.0

    # ------------------------------------------------------------------------------------------- bounds of arcs by units

    def _vector_weights(self, weights: np.ndarray, recompute: str, price: np.ndarray) -> np.ndarray:
        """Return the weight of each component of a stage's vector (:data:`.stage_cost.COMPONENTS`).

        Args:
            weights: Weights of the terms.
            recompute: Way of recomputation.
            price: Price of a byte for each stage, shape (..., stages).

        Returns:
            Shape (..., stages, components).
        """
        terms = self.terms
        vector_weights = np.empty((*price.shape, len(COMPONENTS)))
        vector_weights[..., 0] = weights[terms.forward] + (weights[terms.recompute] if recompute == "stage" else 0.0)
        vector_weights[..., 1] = weights[terms.backward]
        vector_weights[..., 2] = weights[terms.all_reduce]
        vector_weights[..., 3] = price * self._state_factors
        vector_weights[..., 4] = price * self._kept_in_flight(recompute)
        vector_weights[..., 5] = price
        return vector_weights

    def _exchange_weights(self, weights: np.ndarray, exchange: tuple[float, float] | None) -> np.ndarray | None:
        """Return the weight of a byte that each stage exchanges (:class:`.bounds.Bound`), shape (stages,); None if none does."""
        if not self.exchange[1]:
            return None
        ends = weights[self.terms.all_reduce][[0, -1]] if exchange is None else np.array(exchange)
        of_stages = np.zeros(self.num_stages)
        of_stages[[0, -1]] = self.exchange[1] * ends
        return of_stages

    def exchange_weight(self, bound: Bound, stage: int) -> float:
        """Return the weight of a byte that a stage exchanges in a bound."""
        weights = self._exchange_weights(bound.weights, bound.exchange)
        return 0.0 if weights is None else float(weights[stage])

    def _kept_in_flight(self, recompute: str) -> np.ndarray:
        """Return the number of micro-batches whose activations each stage keeps at a time; shape (stages,).

        A stage that is recomputed as a whole keeps only those that run.
        """
        return self._running if recompute == "stage" else self._in_flight

    def recomputations_of(self, stage: int) -> tuple[str, ...]:
        """The ways of recomputation on offer for a stage (see :mod:`.space`)."""
        return recomputations_of_stage(self.recomputations, stage, self.num_stages)

    @property
    def _recomputations_if_memory_is_free(self) -> tuple[str, ...]:
        """The ways of recomputation that can be the cheapest if a byte costs nothing: no recomputation, if that is allowed."""
        ways = ways_of_units(self.recomputations)
        return ("none",) if "none" in ways else ways

    def price_grid(self, weights: np.ndarray, step_s: float) -> tuple[np.ndarray, ...]:
        """Return vectors of prices of a byte for each stage, from 0 to the largest of :data:`MEMORY_PRICES`.

        Args:
            weights: Weights of the terms; a byte costs more at a stage whose seconds have more weight.
            step_s: Seconds that a step takes, approximately.
        """
        busy = weights[self.terms.forward] + weights[self.terms.backward]
        unit_price = step_s / self.limit_bytes * busy / (busy.mean() or 1.0)
        return (0.0 * unit_price, *(part * unit_price for part in MEMORY_PRICES))

    def _tight_units(self, stages: Sequence[int], shape: tuple[int, ...]) -> bool | np.ndarray:
        """Whether redistributions inside units count, for each unit of some stages, shape (rows, units): they count for the units
        of the runs that a stage may have.  False if they do not count at all.

        Args:
            stages: The stages.
            shape: Shape (..., stages) of what is asked for, which has as many rows as entries.
        """
        if not self.is_tight:
            return False
        rows = np.broadcast_to(np.array(stages), shape).ravel()
        return np.repeat(self.runs.possible, self.runs.sizes, axis=1)[rows]

    def _least_of_units(
        self, recompute: str, vector_weights: np.ndarray, exchange: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Return the least weighted sum of each unit at each stage.

        Args:
            recompute: Way of recomputation of :func:`.space.ways_of_arcs`.
            vector_weights: Shape (..., stages, components).
            exchange: Weight of a byte that each stage exchanges, shape (stages,).  None: the exchange of the gradients of shared
                weights has no weight.

        Returns:
            Shape (..., stages, units); None if some layer has no strategy.
        """
        least = np.empty((*vector_weights.shape[:-1], self.num_units))
        for (number, passes), stages in self._equal_stages.items():
            own, units = vector_weights[..., stages, :], self.stage_searches[number].unit_bounds
            rows = own.reshape(-1, own.shape[-1])
            of_exchange = None if exchange is None else np.broadcast_to(exchange[stages], own.shape[:-1]).ravel()
            size = passes.replicas, passes.micro_batch, passes.smallest_pass
            ways = ("none", "blocks") if recompute == SOME_BLOCKS else (recomputed_inside(recompute),)
            is_tight = self._tight_units(stages, own.shape[:-1])
            by_way = [units.least(way, *size, rows, is_tight, of_exchange) for way in ways]
            values = [value for value in by_way if value is not None]
            if not values:
                return None
            least[..., stages, :] = np.minimum.reduce(values).reshape(*own.shape[:-1], self.num_units)
        return least

    def least_over_all_cuts(
        self, bound: Bound, threshold: float, parts: Sequence[float] = (0.0, *MEMORY_PRICES)
    ) -> float:
        """Return the least of a bound over all cuts, from units alone and with one price of a byte for all stages.

        Args:
            bound: The bound; its own prices are not used.
            threshold: Seconds that a step takes, approximately.
            parts: The prices of a byte to try, as parts of ``threshold`` per memory limit; the best one counts.

        Returns:
            The least value [s]; infinite if some layer has no strategy.
        """
        terms = self.terms
        crossing = (bound.weights[terms.transfer_forward] + bound.weights[terms.transfer_backward])[:, None]
        exchange = self._exchange_weights(bound.weights, bound.exchange)
        prices = np.array([part * threshold / self.limit_bytes if part else 0.0 for part in parts])
        least = np.full((len(prices), self.num_stages, self.num_units), np.inf)
        for recompute in ways_of_arcs(self.recomputations) if any(parts) else self._recomputations_if_memory_is_free:
            vector_weights = np.array(
                [self._vector_weights(bound.weights, recompute, np.full(self.num_stages, price)) for price in prices]
            )
            values = self._least_of_units(recompute, vector_weights, exchange)
            if values is None:
                return np.inf
            least = np.minimum(least, values)
        constants = prices * float((self.limit_bytes / self._stages_on_worker).sum())
        constants -= self.fixed_seconds(bound.weights)
        return max(0.0, float((least_over_cuts(least, crossing * self._transfers) - constants).max()))

    def _entering_bytes(self, stage: int) -> np.ndarray:
        """Bytes per device of the tensor that enters a stage, for one micro-batch, by the stage's first unit; shape (units,)."""
        size, devices = self.setting.micro_batch, self.setting.meshes[stage].num_devices
        return np.asarray(size * self.explorer.workload.itemsize / devices * self.explorer.chain.entering_elements[:-1])

    def arc_costs(self, bound: Bound, has_exchange: bool = True) -> list[np.ndarray]:
        """Return what every arc costs at least in a bound, with the transfers over the boundary behind it.

        Args:
            bound: The bound.
            has_exchange: Whether the exchange of gradients counts at the first and at the last stage.

        Returns:
            Per stage the costs by first unit and by the unit behind the last one, shape (units + 1, units + 1); infinite for arcs
            that are in no cut, or cannot be run.
        """
        costs = [cost.copy() for cost in self._arc_costs_by_units(bound, has_exchange)]
        for (stage, first, stop), arc in self.arcs.items():
            if np.isfinite(costs[stage][first, stop]):
                by_rows = self._arc_cost_by_rows(bound, stage, stop, arc, has_exchange)
                costs[stage][first, stop] = max(costs[stage][first, stop], by_rows)
        return costs

    def _arc_costs_by_units(self, bound: Bound, has_exchange: bool) -> list[np.ndarray]:
        """Return :meth:`arc_costs` without loaded rows."""
        if self._known_arc_costs is None:
            return self._compute_arc_costs(bound, has_exchange)
        key = (bound, has_exchange)
        if key not in self._known_arc_costs:
            if len(self._known_arc_costs) >= _MAX_KNOWN_ARC_COSTS:
                del self._known_arc_costs[next(iter(self._known_arc_costs))]
            self._known_arc_costs[key] = self._compute_arc_costs(bound, has_exchange)
        return self._known_arc_costs[key]

    def _compute_arc_costs(self, bound: Bound, has_exchange: bool) -> list[np.ndarray]:
        """Return :meth:`_arc_costs_by_units`."""
        terms, size = self.terms, self.num_units + 1
        prices = bound.prices or (np.zeros(self.num_stages),)
        exchange = self._exchange_weights(bound.weights, bound.exchange) if has_exchange else None
        is_priced = any(price.any() for price in prices)
        costs = [np.full((size, size), np.inf) for _ in range(self.num_stages)]
        for recompute in ways_of_arcs(self.recomputations) if is_priced else self._recomputations_if_memory_is_free:
            dearest = self._dearest_arcs(bound.weights, prices, recompute, exchange)
            if dearest is None:
                return [np.full((size, size), np.inf) for _ in range(self.num_stages)]
            for stage in range(self.num_stages):
                costs[stage] = np.minimum(costs[stage], dearest[stage])
        crossing = bound.weights[terms.transfer_forward] + bound.weights[terms.transfer_backward]
        for stage in range(self.num_stages):
            if stage < self.num_stages - 1:
                costs[stage] += crossing[stage] * self._transfers[stage][None, :]
            costs[stage][self._impossible[stage]] = np.inf
        return costs

    def _dearest_arcs(
        self, weights: np.ndarray, prices: Sequence[np.ndarray], recompute: str, exchange: np.ndarray | None
    ) -> list[np.ndarray] | None:
        """Return what every arc costs with one way of recomputation, at the vector of prices at which it costs the most.

        Transfers are left out; ``exchange`` is as in :meth:`_least_of_units`.  Costs are negative for stages that need less than
        their share of memory.

        Returns:
            Per stage an array of shape (units + 1, units + 1); None if some layer has no strategy.
        """
        size = self.num_units + 1
        dearest = [np.full((size, size), -np.inf) for _ in range(self.num_stages)]
        for price in prices:
            vector_weights = self._vector_weights(weights, recompute, price)
            least = self._least_of_units(recompute, vector_weights, exchange)
            if least is None:
                return None
            sums = np.zeros((self.num_stages, size))
            np.cumsum(least, axis=1, out=sums[:, 1:])
            # Stages with equal units share an array of differences.
            differences: dict[bytes, np.ndarray] = {}
            for stage, line in enumerate(sums):
                key = line.tobytes()
                if key not in differences:
                    differences[key] = line[None, :] - line[:, None]
                cost = differences[key]
                if recompute == "stage" and price[stage]:
                    cost = cost.copy()
                    cost[:-1] += (price[stage] * self._in_flight[stage] * self._entering_bytes(stage))[:, None]
                with_limit = cost - price[stage] * self.limit_bytes / self._stages_on_worker[stage]
                dearest[stage] = np.maximum(dearest[stage], with_limit)
        return dearest

    @cached_property
    def _impossible(self) -> list[np.ndarray]:
        """Per stage the arcs that are in no cut."""
        return [impossible_arcs(stage, self.num_stages, self.num_units) for stage in range(self.num_stages)]

    # ------------------------------------------------------------------------------------ linear functions of unit counts

    @cached_property
    def runs(self) -> UnitRuns:
        """The runs of equal units, with linear lower bounds on transfers."""
        return runs_of(self.explorer.chain.kinds, self._transfers)

    def cheapest_units(
        self, weights: np.ndarray, price: np.ndarray, exchange: tuple[float, float] | None = None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what every unit costs at least at every stage, and a way to run the unit that costs that much.

        Args:
            weights: Weights of the terms.
            price: Price of a byte for each stage, shape (..., stages).
            exchange: Weights of the exchange (:class:`.bounds.Bound`).

        Returns:
            The costs, shape (..., stages, units), and the vectors (seconds forward, backward, of recomputation, of all-reduce;
            bytes; exchanged bytes), shape (..., stages, units, 6); None if some layer has no strategy.
        """
        costs = np.full((*price.shape, self.num_units), np.inf)
        vectors = np.zeros((*costs.shape, 6))
        of_exchange = self._exchange_weights(weights, exchange)
        weights_of_ways = {way: self._vector_weights(weights, way, price) for way in ways_of_units(self.recomputations)}
        for (number, passes), stages in self._equal_stages.items():
            shape = price[..., stages].shape
            rows = {way: each[..., stages, :].reshape(-1, each.shape[-1]) for way, each in weights_of_ways.items()}
            of_stage = np.broadcast_to(np.arange(self.num_stages)[stages], shape).ravel()
            ones = np.ones(self.num_stages)
            factors = {
                way: np.column_stack([self._state_factors, self._kept_in_flight(way), ones])[of_stage] for way in rows
            }
            size = passes.replicas, passes.micro_batch, passes.smallest_pass
            found = self.stage_searches[number].unit_bounds.cheapest_ways(
                *size,
                rows,
                factors,
                self._tight_units(stages, shape),
                None if of_exchange is None else of_exchange[of_stage],
            )
            if found is None:
                return None
            costs[..., stages, :] = found[0].reshape(*shape, self.num_units)
            vectors[..., stages, :, :] = found[1].reshape(*shape, self.num_units, 6)
        return costs, vectors

    def least_of_units(
        self, weights: np.ndarray, price: np.ndarray, exchange: tuple[float, float] | None = None
    ) -> np.ndarray | None:
        """Return what every unit costs at least at every stage; arguments as :meth:`cheapest_units`.

        Returns:
            Shape (..., stages, units); None if some layer has no strategy.
        """
        least = np.full((*price.shape, self.num_units), np.inf)
        of_exchange = self._exchange_weights(weights, exchange)
        for recompute in ways_of_units(self.recomputations) if price.any() else self._recomputations_if_memory_is_free:
            values = self._least_of_units(recompute, self._vector_weights(weights, recompute, price), of_exchange)
            if values is None:
                return None
            least = np.minimum(least, values)
        return least

    def crossing_costs(self, weights: np.ndarray) -> np.ndarray:
        """Return what the transfers over each boundary cost at least in a bound, by the first unit behind the boundary.

        Returns:
            Shape (stages - 1, units + 1).
        """
        terms = self.terms
        crossing = (weights[terms.transfer_forward] + weights[terms.transfer_backward])[:, None]
        return np.asarray(crossing * self._transfers)

    def price_of_limits(self, price: np.ndarray) -> float:
        """Return the sum over all workers of price times memory limit [s], for the price of a byte of each stage."""
        return float((price * self.limit_bytes / self._stages_on_worker).sum())

    def value_at(self, bound: Bound, of_units: np.ndarray, counts: np.ndarray) -> float:
        """Return the value of a bound at a cut, which may be fractional.

        Args:
            bound: The bound.
            of_units: What units cost in it at least (:meth:`cheapest_units`), shape (stages, units).
            counts: Number of units of each run at each stage, shape (stages, runs).
        """
        row, constant = self.row_of(bound, of_units)
        return float((row * counts).sum()) + constant

    def row_of(self, bound: Bound, of_units: np.ndarray) -> tuple[np.ndarray, float]:
        """Return a bound as a linear function of the numbers of units of each run at each stage; arguments as :meth:`value_at`.

        Returns:
            The coefficients, shape (stages, runs), and the constant.
        """
        terms = self.terms
        weights = bound.weights[terms.transfer_forward] + bound.weights[terms.transfer_backward]
        crossing, constant = self.runs.transfer_coefficients(weights)
        fixed = self.fixed_seconds(bound.weights) - sum(self.price_of_limits(price) for price in bound.prices)
        return of_units[:, self.runs.first] + crossing, float(constant) + fixed

    def memory_share(self, stage: int) -> float:
        """Return a stage's share of the memory limit [bytes], if all stages of its worker have equal shares."""
        return float(self.limit_bytes / self._stages_on_worker[stage])

    def least_in_region(self, bound: Bound, of_units: np.ndarray, ranges: Sequence[tuple[int, int]]) -> float:
        """Return the least of a bound over the cuts whose boundaries are within ranges.

        Args:
            bound: The bound.
            of_units: What units cost in it at least (:meth:`cheapest_units`), shape (stages, units).
            ranges: Smallest and largest unit of each boundary.
        """
        after = self.crossing_costs(bound.weights)
        for boundary, (first, last) in enumerate(ranges):
            after[boundary, :first] = after[boundary, last + 1 :] = np.inf
        fixed = self.fixed_seconds(bound.weights) - sum(self.price_of_limits(price) for price in bound.prices)
        return float(least_over_cuts(of_units, after)) + fixed

    # --------------------------------------------------------------------------------------------- bounds of arcs by rows

    def _arc_cost_by_rows(self, bound: Bound, stage: int, stop: int, arc: Arc, has_exchange: bool) -> float:
        """Return the least cost of an arc's rows in a bound, with the least transfers over the boundary behind it."""
        terms, weights = self.terms, bound.weights
        costs = self.row_costs(bound, stage, arc)
        if has_exchange and arc.rows.shared.shape[1]:
            costs = costs + self.exchange_weight(bound, stage) * arc.rows.shared.sum(axis=1)
        after = 0.0
        if stage < self.num_stages - 1:
            crossing = weights[terms.transfer_forward][stage] + weights[terms.transfer_backward][stage]
            after = float(crossing * self._transfers[stage, stop])
        return float(costs.min(initial=np.inf)) + after

    def stage_work(self, weights: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Return the weighted sum of each stage's terms, without transfers; shape (stages,)."""
        terms, products = self.terms, weights * times
        parts = terms.of_stages
        return np.asarray(sum(products[part] for part in parts))

    def row_costs(self, bound: Bound, stage: int, arc: Arc) -> np.ndarray:
        """Return what each row of an arc costs in a bound, without the transfers over the boundary behind it."""
        rows, terms, weights = arc.rows, self.terms, bound.weights
        own = [weights[part][stage] for part in terms.of_stages]
        costs = rows.times @ np.array(own)
        if not bound.prices:
            return np.asarray(costs)
        of_memory = [
            price[stage] * (rows.memory - self.limit_bytes / self._stages_on_worker[stage]) for price in bound.prices
        ]
        return np.asarray(costs + np.max(of_memory, axis=0))
