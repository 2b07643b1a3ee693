"""What the units of a model take at least on one mesh, before any stage is searched: the terms of the bounds in :mod:`.bounds`.

At a mesh and a micro-batch every layer, at its own cheapest strategy and with redistributions for nothing, takes at least some time
per micro-batch (``busy``), and at least some time per step with its gradient's all-reduce (``whole`` = N busy + once).  Both add up
over the layers of a stage, whatever its strategies are, with recomputation or without.  Where a stage is gone back through twice,
the backward pass counts twice.

What a stage keeps is at least what its layers keep, each at the strategy that keeps the least, at the best of the ways of
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.layoutprices import MANY, communication_time
from autoddl.costmodel.pricing import PriceBook, Variable
from autoddl.costmodel.strategy import alike

from .cutting import ENTRY, Chain
from .interiors import Interiors

__all__ = ["ROUNDING", "Column", "UnitCosts", "UnitDuals", "UnitMemory"]

#: Bounds are taken down by this, so that sums in another order do not exclude what is equal.
ROUNDING = 1 - 1e-9


@dataclass(frozen=True, eq=False)
class Column:
    """Of one layer's options: seconds = fixed + samples * slope per micro-batch, and once per step."""

    fixed: np.ndarray
    slope: np.ndarray
    once: np.ndarray
    p0: np.ndarray


def unit_columns(interiors: Interiors, unit: int, layers_again: bool) -> list[Column]:
    """Of the layers of a unit, the entry left out."""
    few = interiors.mesh.num_devices
    book = interiors.tables.book(unit, unit + 1, layers_again)
    # Affine in samples and micro-batches: three points tell all (see autoddl.costmodel.pricing).
    one, two, larger = (
        book.problem(batch, micro).table.cost for batch, micro in ((few, few), (2 * few, few), (2 * few, 2 * few))
    )
    columns = []
    for variable, a, b, c in zip(book.variables, one, two, larger):
        if variable.layers == (ENTRY,):
            continue
        each, slope = b - a, (c - a) / few
        p0 = np.array([strategy.p0 for strategy in variable.options])
        columns.append(Column(each - few * slope, slope, np.maximum(a - each, 0.0), p0))
    return columns


def _backward_columns(interiors: Interiors, unit: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each layer of a unit: (fixed, slope) of one backward pass, nothing recomputed, for every option."""
    book = interiors.tables.book(unit, unit + 1, False)
    return [_backward(book, variable) for variable in book.variables if variable.layers != (ENTRY,)]


def _backward(book: PriceBook, variable: Variable) -> tuple[np.ndarray, np.ndarray]:
    fixed, slope = np.zeros(len(variable.options)), np.zeros(len(variable.options))
    for name in variable.layers:
        strategies = [variable.strategy(name, option) for option in range(len(variable.options))]
        for group in alike(strategies, book.cluster.sized_levels):
            is_first = not book.graph.inputs(name)
            two_points = np.array([[0.0], [MANY]])
            work = layer_work(book.graph[name], group, book.cluster, book.workload, two_points, is_first)
            seconds = communication_time(book.cluster, work.backward) + work.backward_s
            none, many = np.broadcast_to(seconds, (2, len(group.indices)))
            fixed[group.indices] += none
            slope[group.indices] += (many - none) / MANY
    return fixed, slope


class UnitCosts:
    """The least that every unit takes on one mesh, for any micro-batch."""

    def __init__(self, chain: Chain, interiors: Interiors):
        self.chain, self.interiors = chain, interiors
        first = {kind: unit for unit, kind in reversed(list(enumerate(chain.kinds)))}
        self._columns = {kind: unit_columns(interiors, unit, False) for kind, unit in first.items()}
        self._first = first
        self._again: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._known: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray] | None] = {}

    def backward(self, kind: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of the layers of a kind of unit, (fixed, slope) of one backward pass."""
        if kind not in self._again:
            self._again[kind] = _backward_columns(self.interiors, self._first[kind])
        return self._again[kind]

    def at(self, micro_batch: int, count: int, passes: int = 1) -> tuple[np.ndarray, np.ndarray] | None:
        """(busy per micro-batch, whole of ``count`` of them) of every unit; None where one does not divide over some layer.

        Args:
            passes: how often the unit is gone back through.
        """
        key = (micro_batch, count, passes)
        if key not in self._known:
            self._known[key] = self._at(*key)
        return self._known[key]

    def _at(self, micro_batch: int, count: int, passes: int) -> tuple[np.ndarray, np.ndarray] | None:
        of_kind: dict[int, tuple[float, float]] = {}
        for kind, columns in self._columns.items():
            busy = whole = 0.0
            for place, column in enumerate(columns):
                offered = micro_batch % column.p0 == 0
                if not offered.any():
                    return None
                each = column.fixed + micro_batch * column.slope
                if passes > 1:
                    fixed, slope = self.backward(kind)[place]
                    each = each + (passes - 1) * (fixed + micro_batch * slope)
                busy += float(each[offered].min())
                whole += float((count * each + column.once)[offered].min())
            of_kind[kind] = (max(busy, 0.0), max(whole, 0.0))
        rows = np.array([of_kind[kind] for kind in self.chain.kinds])
        return rows[:, 0], rows[:, 1]


class UnitMemory:
    """The least bytes per device that every unit needs on one mesh."""

    def __init__(self, chain: Chain, interiors: Interiors):
        self.chain, self.interiors = chain, interiors
        layers = chain.graph.layers
        itemsize, devices = interiors.workload.itemsize, interiors.mesh.num_devices
        entries = [0.0] + [layers[start - 1].output_elements * itemsize / devices for start in chain.starts[1:-1]]
        #: Of one sample of what enters a stage that begins with a unit.
        self.entering = np.array(entries)
        workload = interiors.workload
        self._extra = workload.itemsize / workload.bytes_per_parameter
        self._known: dict[object, np.ndarray] = {}

    def _of_units(self, micro_batch: int, alive: float, versions: int, layers_again: bool) -> np.ndarray:
        key = (micro_batch, alive, versions, layers_again)
        if key not in self._known:
            of_kind: dict[int, float] = {}
            for unit, kind in enumerate(self.chain.kinds):
                if kind not in of_kind:
                    total = 0.0
                    for column in self.interiors.tables.bytes_of(unit, unit + 1, layers_again):
                        offered = micro_batch % column.p0 == 0
                        state = column.state * (1 + (versions - 1) * self._extra)
                        total += float((state + alive * micro_batch * column.kept)[offered].min(initial=np.inf))
                    of_kind[kind] = total
            self._known[key] = np.array([of_kind[kind] for kind in self.chain.kinds])
        return self._known[key]

    def of_stage(
        self,
        starts: np.ndarray,
        stops: np.ndarray,
        micro_batch: int,
        in_flight: float,
        versions: int,
        recomputations: Sequence[str],
    ) -> np.ndarray:
        """The least bytes of stages of units ``starts`` to ``stops``."""
        least = np.full(len(starts), np.inf)
        for recompute in recomputations:
            alive = 1.0 if recompute == "stage" else in_flight
            units = self._of_units(micro_batch, alive, versions, recompute == "layers")
            sums = np.concatenate([[0.0], np.cumsum(units)])
            needed = sums[stops] - sums[starts]
            if recompute == "stage":
                needed = needed + in_flight * micro_batch * self.entering[starts]
            least = np.minimum(least, needed)
        return least * ROUNDING


class UnitDuals:
    """Seconds and priced bytes together of every unit of one mesh: the least over strategies of seconds + price * bytes."""

    def __init__(self, chain: Chain, costs: UnitCosts):
        self.chain, self.costs, self.interiors = chain, costs, costs.interiors
        workload = self.interiors.workload
        self._extra = workload.itemsize / workload.bytes_per_parameter
        self._first = {kind: unit for unit, kind in reversed(list(enumerate(chain.kinds)))}
        self._known: dict[tuple[int, bool], list[tuple[Column, np.ndarray, np.ndarray]]] = {}

    def _columns(self, kind: int, layers_again: bool) -> list[tuple[Column, np.ndarray, np.ndarray]]:
        """Per layer its times, its state and what it keeps of a sample."""
        if (kind, layers_again) not in self._known:
            unit, tables = self._first[kind], self.interiors.tables
            book = tables.book(unit, unit + 1, layers_again)
            every = zip(book.variables, tables.bytes_of(unit, unit + 1, layers_again))
            kept = [column for variable, column in every if variable.layers != (ENTRY,)]
            times = unit_columns(self.interiors, unit, layers_again)
            self._known[kind, layers_again] = [(a, b.state, b.kept) for a, b in zip(times, kept)]
        return self._known[kind, layers_again]

    def of_units(
        self, micro_batch: int, count: int, passes: int, need: tuple[float, int], price: float, recompute: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(without, with the all-reduce) of every unit, for ``count`` micro-batches.

        Args:
            passes: how often a unit is gone back through.
            need: micro-batches in flight, weight versions.
            price: seconds per byte.
        """
        found: dict[int, tuple[float, float]] = {}
        in_flight, versions = need
        alive = 1.0 if recompute == "stage" else in_flight
        for kind in self._first:
            plain = whole = 0.0
            times = self._columns(kind, recompute != "none")
            kept = self._columns(kind, recompute == "layers")
            for place, ((column, _, _), (_, state, each_kept)) in enumerate(zip(times, kept)):
                offered = micro_batch % column.p0 == 0
                nbytes = state * (1 + (versions - 1) * self._extra) + alive * micro_batch * each_kept
                each = column.fixed + micro_batch * column.slope
                if passes > 1:
                    fixed, slope = self.costs.backward(kind)[place]
                    each = each + (passes - 1) * (fixed + micro_batch * slope)
                seconds = count * each + price * nbytes
                plain += float(seconds[offered].min(initial=np.inf))
                whole += float((seconds + column.once)[offered].min(initial=np.inf))
            found[kind] = (plain, whole)
        rows = np.array([found[kind] for kind in self.chain.kinds])
        return rows[:, 0], rows[:, 1]
