"""What the cuts of one setting cost at least: a layered graph of *arcs*, of which a way through is a cut.

An arc (s, i, j) is stage s with the units i to j - 1.  For every bound of the setting (a long path of its schedule, with prices of
memory, see :mod:`.bounds`) it has the least that any way to run the stage takes, and what crosses the boundary behind it: what
its units take, redistributions for nothing; or, where they are worked out, the least of its rows, its front within the memory
limit as far as that can be of use (:mod:`.stage_search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from autoddl.costmodel.layoutprices import Layout
from autoddl.search.fronts import TooManyError

from ..stepgraph import Terms
from .boundary import boundary_of
from .bounds import least_of_cuts, placement_of
from .cut_regions import closed_arcs
from .explorer import Explorer, Setting
from .memory_demand import MemoryDemand
from .meshes import StageMesh
from .stage_search import Passes, RowFilter, StageDemand, StageFront, StageSearch, joined

__all__ = ["PRICES", "Arc", "Bound", "CutGraph", "TooManyError"]

#: Prices of a byte at which memory is bounded: this part of a step per limit, at a stage of mean weight.
PRICES = (0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, eq=False)
class Bound:
    """A linear lower bound on steps.

    Attributes:
        weights: in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
        prices: of a byte on the workers of each stage [s]; of several every arc takes the best one by itself, in each way of
            recomputation, which holds where each worker has one stage alone; none: memory is for nothing.
    """

    weights: np.ndarray
    prices: tuple[np.ndarray, ...] = ()

    def is_path(self, path: np.ndarray) -> bool:
        """Whether it is a path alone, memory for nothing."""
        return not self.prices and np.array_equal(self.weights, path)


@dataclass(frozen=True, eq=False)
class Arc:
    """The rows of one stage of some units, with the numbers of the layouts at both sides in the whole setting."""

    rows: StageFront
    entry: np.ndarray
    exit: np.ndarray


@dataclass(frozen=True, eq=False)
class UnitRuns:
    """Runs of equal units.

    Attributes:
        first, sizes: the first unit and the number of units of each.
        base, slopes: of what crosses every boundary at least, each way: base + the sum over the units before it of its run's slope;
            shapes (stages - 1,) and (stages - 1, runs).
    """

    first: np.ndarray
    sizes: np.ndarray
    base: np.ndarray
    slopes: np.ndarray

    def may_be_in(self, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        """Whether a stage may have units of a run where boundaries are within ranges; shape (stages, runs)."""
        begins = np.array([0, *(low for low, _ in ranges)])[:, None]
        ends = np.array([*(high for _, high in ranges), int(self.sizes.sum())])[:, None]
        return np.asarray(np.maximum(begins, self.first) < np.minimum(ends, self.first + self.sizes))

    def crossing(self, weights: np.ndarray) -> tuple[np.ndarray, float]:
        """Where what crosses each boundary counts so often, shape (..., stages - 1): what each unit of a run at a stage adds, shape
        (..., stages, runs), and what is there without."""
        by_boundary = weights[..., None] * self.slopes
        none = np.zeros((*by_boundary.shape[:-2], 1, len(self.sizes)))
        sums = np.concatenate([np.cumsum(by_boundary[..., ::-1, :], axis=-2)[..., ::-1, :], none], axis=-2)
        return sums, weights @ self.base


class CutGraph:
    """The arcs of one setting.

    Args:
        ways: of recomputation that are on offer.
        demand: what its schedule asks of memory.
    """

    def __init__(self, explorer: Explorer, setting: Setting, ways: Sequence[str], demand: MemoryDemand):
        self.explorer, self.setting, self.ways, self.demand = explorer, setting, tuple(ways), demand
        self.spec = setting.schedule
        self.num_stages, self.num_units = self.spec.num_stages, explorer.chain.num_units
        self.passes: tuple[Passes, ...] = explorer.passes(setting)
        self.stages: tuple[StageSearch, ...] = tuple(explorer.stages(mesh) for mesh in setting.meshes)
        self.need = [StageDemand(k, v) for k, v in zip(demand.in_flight, demand.versions)]
        self.is_alone = all(len(held) == 1 for held in demand.homes)
        self.terms = Terms(self.num_stages)
        self.placement = placement_of(self.spec.num_workers, self.spec.groups, self.spec.num_pipelines)
        self.limit = explorer.limit_bytes
        self._shares = np.ones(self.num_stages)
        for held in demand.homes:
            for _, stage in held:
                self._shares[stage] = max(self._shares[stage], float(len(held)))
        self._in_flight = np.array(demand.in_flight)
        self._copies = np.array([1 + (v - 1) * one.per_version for v, one in zip(demand.versions, self.stages)])
        self._alike: dict[tuple[int, Passes], list[int]] = {}
        first: dict[StageMesh, int] = {}
        for stage, (mesh, passes) in enumerate(zip(setting.meshes, self.passes)):
            self._alike.setdefault((first.setdefault(mesh, stage), passes), []).append(stage)
        self._layouts: dict[Layout, int] = {}
        self._layout: list[Layout] = []
        self._crossings: dict[tuple[int, int, int, int], tuple[float, float]] = {}
        self.arcs: dict[tuple[int, int, int], Arc] = {}

    def again(self) -> CutGraph:
        """The same setting, without rows."""
        found = copy(self)
        found.arcs = {}
        return found

    # -------------------------------------------------------------------------------------------------- what passes between

    @cached_property
    def _transfers(self) -> np.ndarray:
        """The least seconds of every boundary where the stage behind it begins with a unit; shape (stages - 1, units + 1)."""
        return self.explorer.least_transfers(self.setting)

    def crossing(self, boundary: int, unit: int, source: int, target: int) -> tuple[float, float]:
        """Seconds forward and back of what crosses a boundary before a unit, between two layouts (by number)."""
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
                self._layout[source],
                self._layout[target],
                replace(explorer.workload, micro_batch=setting.micro_batch),
            )
            self._crossings[key] = between.forward_s, between.backward_s
        return self._crossings[key]

    def has_crossing(self, boundary: int, unit: int, source: int, target: int) -> bool:
        """Whether it is worked out."""
        return (boundary, unit, source, target) in self._crossings

    def share(self, stage: int) -> float:
        """The bytes of a device that are a stage's where all stages of its worker have as many."""
        return float(self.limit / self._shares[stage])

    def known_crossings(self, boundary: int, unit: int, source: int, targets: np.ndarray) -> np.ndarray:
        """By how much those that are worked out are above the least, forward and back; shape (targets, 2)."""
        least = self._transfers[boundary, unit]
        found = np.zeros((len(targets), 2))
        for target in np.unique(targets).tolist():
            known = self._crossings.get((boundary, unit, source, target))
            if known is not None:
                found[targets == target] = max(0.0, known[0] - least), max(0.0, known[1] - least)
        return found

    def least_transfers_at(self, boundary: int) -> np.ndarray:
        """Forward, and as much back, wherever a boundary is; shape (units + 1,)."""
        return np.asarray(self._transfers[boundary])

    def least_transfer(self, boundary: int, unit: int) -> float:
        """Forward, and as much back."""
        return float(self._transfers[boundary, unit])

    def _numbered(self, layouts: Sequence[Layout], classes: np.ndarray) -> np.ndarray:
        """Numbers of layouts in the whole setting for their classes in one table."""
        numbers = []
        for layout in layouts:
            if layout not in self._layouts:
                self._layouts[layout] = len(self._layout)
                self._layout.append(layout)
            numbers.append(self._layouts[layout])
        return np.array(numbers, dtype=np.intp)[classes] if layouts else np.full(len(classes), -1)

    def sides(self, rows: StageFront) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the layouts at both sides of a stage that is run by each of some rows; -1 for none."""
        entry, exit_, begin = [], [], 0
        for table, _, choices in rows.origin:
            end = begin + len(choices)
            entry.append(self._numbered(table.entries, rows.entry[begin:end]))
            exit_.append(self._numbered(table.exits, rows.exit[begin:end]))
            begin = end
        return np.concatenate(entry), np.concatenate(exit_)

    # ------------------------------------------------------------------------------------------------------- separable

    def _vectors(self, weights: np.ndarray, way: str, price: np.ndarray) -> np.ndarray:
        """What a stage's components count for in a bound, at a price of a byte for every stage; shape (stages, 5)."""
        terms = self.terms
        forward = weights[terms.forward] + (weights[terms.recompute] if way == "stage" else 0.0)
        alive = np.ones(self.num_stages) if way == "stage" else self._in_flight
        return np.column_stack(
            [forward, weights[terms.backward], weights[terms.all_reduce], price * self._copies, price * alive]
        )

    @property
    def _cheapest(self) -> tuple[str, ...]:
        """The ways that can be the least where memory is for nothing: nothing is gained by recomputation then."""
        return ("none",) if "none" in self.ways else self.ways

    def grid(self, weights: np.ndarray, step_s: float) -> tuple[np.ndarray, ...]:
        """Prices of a byte on the workers of each stage, from nothing to what a step of so many seconds makes it worth."""
        # A byte is worth more where a second is.
        busy = weights[self.terms.forward] + weights[self.terms.backward]
        whole = step_s / self.limit * busy / (busy.mean() or 1.0)
        return (0.0 * whole, *(part * whole for part in PRICES))

    def _of_units(self, way: str, vectors: np.ndarray) -> np.ndarray | None:
        """The least of every unit at every stage's vector, shape (..., stages, 5) -> (..., stages, units); None where some layer
        has no strategy."""
        found = np.empty((*vectors.shape[:-1], self.num_units))
        for (number, passes), stages in self._alike.items():
            own, units = vectors[..., stages, :], self.stages[number].units
            weights = own.reshape(-1, own.shape[-1])
            least = units.least(way == "layers", passes.replicas, passes.micro_batch, passes.part, weights)
            if least is None:
                return None
            found[..., stages, :] = least.reshape(*own.shape[:-1], self.num_units)
        return found

    def quick(self, bound: Bound, threshold: float, parts: Sequence[float] = (0.0, *PRICES)) -> float:
        """The least of a bound over all cuts, stages by their units; inf where some layer has no strategy.

        Args:
            parts: the prices of a byte to take the best of, in thresholds per limit.
        """
        terms = self.terms
        crossing = (bound.weights[terms.transfer_forward] + bound.weights[terms.transfer_backward])[:, None]
        prices = np.array([part * threshold / self.limit if part else 0.0 for part in parts])
        least = np.full((len(prices), self.num_stages, self.num_units), np.inf)
        for way in self.ways if any(parts) else self._cheapest:
            vectors = [self._vectors(bound.weights, way, np.full(self.num_stages, price)) for price in prices]
            of_way = self._of_units(way, np.array(vectors))
            if of_way is None:
                return np.inf
            least = np.minimum(least, of_way)
        constants = prices * float((self.limit / self._shares).sum())
        return max(0.0, float((least_of_cuts(least, crossing * self._transfers) - constants).max()))

    def _entering(self, stage: int) -> np.ndarray:
        """Bytes of what enters a stage that begins with each unit, of one micro-batch; shape (units,)."""
        size, devices = self.setting.micro_batch, self.setting.meshes[stage].num_devices
        return np.asarray(size * self.explorer.workload.itemsize / devices * self.explorer.chain.entering[:-1])

    def costs(self, bound: Bound) -> list[np.ndarray]:
        """For every stage the bound's part of every arc, with what crosses behind it; shape (units + 1, units + 1) each."""
        terms, size = self.terms, self.num_units + 1
        prices = bound.prices or (np.zeros(self.num_stages),)
        found = [np.full((size, size), np.inf) for _ in range(self.num_stages)]
        for way in self.ways if any(price.any() for price in prices) else self._cheapest:
            # What does not need its share of memory has a negative part in a bound with a price.
            best = [np.full((size, size), -np.inf) for _ in range(self.num_stages)]
            for price in prices:
                least = self._of_units(way, self._vectors(bound.weights, way, price))
                if least is None:
                    return [np.full((size, size), np.inf) for _ in range(self.num_stages)]
                sums = np.zeros((self.num_stages, size))
                np.cumsum(least, axis=1, out=sums[:, 1:])
                known: dict[bytes, np.ndarray] = {}
                for stage, line in enumerate(sums):
                    key = line.tobytes()
                    if key not in known:
                        known[key] = line[None, :] - line[:, None]
                    cost = known[key]
                    if way == "stage" and price[stage]:
                        cost = cost.copy()
                        cost[:-1] += (price[stage] * self._in_flight[stage] * self._entering(stage))[:, None]
                    best[stage] = np.maximum(best[stage], cost - price[stage] * self.limit / self._shares[stage])
            for stage in range(self.num_stages):
                found[stage] = np.minimum(found[stage], best[stage])
        crossing = bound.weights[terms.transfer_forward] + bound.weights[terms.transfer_backward]
        for stage in range(self.num_stages):
            if stage < self.num_stages - 1:
                found[stage] += crossing[stage] * self._transfers[stage][None, :]
            found[stage][self._closed[stage]] = np.inf
        for (stage, first, stop), arc in self.arcs.items():
            if np.isfinite(found[stage][first, stop]):
                own = self._arc_cost(bound, stage, stop, arc)
                found[stage][first, stop] = max(found[stage][first, stop], own)
        return found

    @cached_property
    def _closed(self) -> list[np.ndarray]:
        """Arcs of every stage that leave no unit for some other one."""
        return [closed_arcs(stage, self.num_stages, self.num_units) for stage in range(self.num_stages)]

    # ------------------------------------------------------------------------------------------------------ finer grades

    @cached_property
    def runs(self) -> UnitRuns:
        """The equal units that follow each other."""
        sizes = np.array([len(list(units)) for _, units in groupby(self.explorer.chain.kinds)])
        first = np.cumsum(sizes) - sizes
        base, slopes = np.zeros(self.num_stages - 1), np.zeros((self.num_stages - 1, len(sizes)))
        for boundary, transfers in enumerate(self._transfers):
            before = 0.0
            for run, unit in enumerate(first.tolist()):
                # Behind any unit of a run as much crosses.  What is more counts as the run fills, what is less as soon as it may
                # have begun: when the one before is complete.  A single unit is there or not.
                behind = float(transfers[unit + 1])
                of = run if behind >= before or sizes[run] == 1 else run - 1
                if run == 0:
                    base[boundary] = behind
                else:
                    slopes[boundary, of] += (behind - before) / sizes[of]
                before = behind
        return UnitRuns(first, sizes, base, slopes)

    def cheapest(self, weights: np.ndarray, price: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """What every unit comes to at least at every stage, at prices of a byte on its workers, and the way to run it: seconds
        forward, backward, recompute, all-reduce, and bytes; shapes (stages, units) and (stages, units, 5).

        None where some layer has no strategy.
        """
        best = np.full((self.num_stages, self.num_units), np.inf)
        found = np.zeros((self.num_stages, self.num_units, 5))
        for way in self.ways:
            vectors = self._vectors(weights, way, price)
            # Of what a stage that is recomputed keeps, and of what else it does, no more than one micro-batch's is alive.
            bytes_of = np.column_stack([self._copies, np.ones(self.num_stages) if way == "stage" else self._in_flight])
            for (number, passes), stages in self._alike.items():
                own, units = vectors[stages], self.stages[number].units
                each = units.vectors(way == "layers", passes.replicas, passes.micro_batch, passes.part, own)
                if each is None:
                    return None
                value = np.einsum("suc,sc->su", each, own)
                again = each[:, :, 0] if way == "stage" else np.zeros_like(value)
                nbytes = np.einsum("suc,sc->su", each[:, :, 3:], bytes_of[stages])
                vector = np.stack([each[:, :, 0], each[:, :, 1], again, each[:, :, 2], nbytes], axis=2)
                less = value < best[stages]
                best[stages] = np.where(less, value, best[stages])
                found[stages] = np.where(less[:, :, None], vector, found[stages])
        return best, found

    def crossing_costs(self, weights: np.ndarray) -> np.ndarray:
        """What crosses every boundary at least in a bound, where the stage behind it begins with a unit; shape (stages - 1, units +
        1)."""
        terms = self.terms
        crossing = (weights[terms.transfer_forward] + weights[terms.transfer_backward])[:, None]
        return np.asarray(crossing * self._transfers)

    def worth_of_limits(self, price: np.ndarray) -> float:
        """Of all workers' bytes, at prices on the workers of each stage [s]."""
        return float((price * self.limit / self._shares).sum())

    def least_of_region(self, bound: Bound, of_units: np.ndarray, ranges: Sequence[tuple[int, int]]) -> float:
        """The least of a bound over the cuts whose boundaries are within ranges, where units come to so much at its price.

        Args:
            of_units: shape (stages, units).
        """
        after = self.crossing_costs(bound.weights)
        for boundary, (first, last) in enumerate(ranges):
            after[boundary, :first] = after[boundary, last + 1 :] = np.inf
        return float(least_of_cuts(of_units, after)) - sum(self.worth_of_limits(price) for price in bound.prices)

    def _arc_cost(self, bound: Bound, stage: int, stop: int, arc: Arc) -> float:
        """A bound's part of an arc whose rows are known, with the least that crosses behind it."""
        terms, weights = self.terms, bound.weights
        after = 0.0
        if stage < self.num_stages - 1:
            crossing = weights[terms.transfer_forward][stage] + weights[terms.transfer_backward][stage]
            after = float(crossing * self._transfers[stage, stop])
        return float(self.row_costs(bound, stage, arc).min(initial=np.inf)) + after

    def work(self, weights: np.ndarray, times: np.ndarray) -> np.ndarray:
        """What each stage's terms come to; shape (stages,)."""
        terms, products = self.terms, weights * times
        parts = terms.of_stages
        return np.asarray(sum(products[part] for part in parts))

    def row_costs(self, bound: Bound, stage: int, arc: Arc) -> np.ndarray:
        """A bound's part of every row of an arc, without what crosses behind it."""
        rows, terms, weights = arc.rows, self.terms, bound.weights
        own = [weights[part][stage] for part in terms.of_stages]
        found = rows.times @ np.array(own)
        if not bound.prices:
            return np.asarray(found)
        at = [price[stage] * (rows.memory - self.limit / self._shares[stage]) for price in bound.prices]
        return np.asarray(found + np.max(at, axis=0))

    def load(
        self, stage: int, first: int, stop: int, wanted: Sequence[RowFilter], limit: float, has_sides: bool
    ) -> None:
        """Work out an arc's rows.

        Args:
            has_sides: with the layouts at both sides; else everything is as if the least crossed there.

        Raises:
            TooManyError
        """
        found, passes, need = self.stages[stage], self.passes[stage], self.need[stage]
        parts: list[StageFront] = []
        for way in self.ways:
            mine = found.rows(first, stop, way, passes, need, wanted, limit, not self.is_alone, has_sides)
            if mine is not None and len(mine):
                parts.append(mine)
        rows = joined(parts) if parts else found_nothing
        any_side = np.full(len(rows), -1)
        entry = exit_ = any_side
        if parts and has_sides:
            entry, exit_ = self.sides(rows)
            if stage == self.num_stages - 1:
                exit_ = any_side  # nothing follows
        self.arcs[stage, first, stop] = Arc(rows, entry, exit_)


_NONE = np.zeros(0)
#: No way to run a stage.
found_nothing = StageFront(np.zeros((0, 4)), _NONE, _NONE, np.zeros((0, 0)), _NONE, _NONE, ())
