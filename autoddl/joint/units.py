"""What the units of a model take at least on one mesh, before any stage is searched: the terms of the bounds in :mod:`.bounds`.

At a mesh and a micro-batch every layer, at its own cheapest strategy and with redistributions for nothing, takes at least some time
per micro-batch (``busy``), and at least some time per step with its gradient's all-reduce (``whole`` = N busy + once).  Both add up
over the layers of a stage, whatever its strategies are, with recomputation or without.  Where a stage is gone back through twice,
the backward pass counts twice.

What a stage keeps is at least what its layers keep, each at the strategy that keeps the least, at the best of the ways of
recomputation.  With a price of a byte, seconds and bytes have a least value together.

The options of all layers of all kinds of units stand behind each other in one array, so that a least value is few operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.layoutprices import MANY, communication_time
from autoddl.costmodel.pricing import PriceBook, Variable
from autoddl.costmodel.strategy import alike

from .cutting import ENTRY, Chain
from .interiors import Interiors
from .stagetables import OptionBytes

__all__ = ["ROUNDING", "Units"]

#: Bounds are taken down by this, so that sums in another order do not exclude what is equal.
ROUNDING = 1 - 1e-9


@dataclass(frozen=True, eq=False)
class _Column:
    """Of one layer's options: seconds = fixed + samples * slope per micro-batch, and once per step."""

    fixed: np.ndarray
    slope: np.ndarray
    once: np.ndarray
    p0: np.ndarray


def _columns(interiors: Interiors, unit: int, layers_again: bool) -> list[_Column]:
    """Of the layers of a unit, the entry left out."""
    few = interiors.mesh.num_devices
    book = interiors.tables.book(unit, unit + 1, layers_again)
    # Affine in samples and micro-batches: three points tell all (see autoddl.costmodel.pricing).
    one, two, larger = (
        book.problem(batch, micro).alone.cost for batch, micro in ((few, few), (2 * few, few), (2 * few, 2 * few))
    )
    columns = []
    for variable, a, b, c in zip(book.variables, one, two, larger):
        if variable.layers == (ENTRY,):
            continue
        each, slope = b - a, (c - a) / few
        p0 = np.array([strategy.p0 for strategy in variable.options])
        columns.append(_Column(each - few * slope, slope, np.maximum(a - each, 0.0), p0))
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


@dataclass(frozen=True, eq=False)
class _Options:
    """The options of all layers of all kinds of units, one behind the other.

    Attributes:
        fixed, slope, once, p0: see :class:`_Column`.
        state, kept: bytes, and bytes of a sample.
        layers: where the options of each layer begin.
        kinds: where the layers of each kind begin.
    """

    fixed: np.ndarray
    slope: np.ndarray
    once: np.ndarray
    p0: np.ndarray
    state: np.ndarray
    kept: np.ndarray
    layers: np.ndarray
    kinds: np.ndarray

    def least(self, values: np.ndarray, micro_batch: int) -> np.ndarray:
        """Per kind of unit the least sum over its layers; infinite where one has no option at this micro-batch."""
        offered = np.where(micro_batch % self.p0 == 0, values, np.inf)
        return np.asarray(np.add.reduceat(np.minimum.reduceat(offered, self.layers), self.kinds))


class Units:
    """The least that every unit takes and keeps on one mesh."""

    def __init__(self, chain: Chain, interiors: Interiors):
        self.chain, self.interiors = chain, interiors
        layers, workload = chain.graph.layers, interiors.workload
        entries = [0.0] + [layers[start - 1].output_elements * workload.itemsize for start in chain.starts[1:-1]]
        #: Bytes of one sample, on each device, of what enters a stage that begins with a unit.
        self.entering = np.array(entries) / interiors.mesh.num_devices
        self._extra = workload.itemsize / workload.bytes_per_parameter
        self._first = [chain.kinds.index(kind) for kind in range(max(chain.kinds) + 1)]
        self._kinds = np.array(chain.kinds)
        self._options: dict[bool, _Options] = {}
        self._costs: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray] | None] = {}
        self._bytes: dict[tuple[int, float, int, bool], np.ndarray] = {}

    def _of(self, layers_again: bool) -> _Options:
        if layers_again not in self._options:
            tables = self.interiors.tables
            rows: list[tuple[_Column, OptionBytes]] = []
            kinds = []
            for unit in self._first:
                book = tables.book(unit, unit + 1, layers_again)
                every = zip(book.variables, tables.bytes_of(unit, unit + 1, layers_again))
                nbytes = [column for variable, column in every if variable.layers != (ENTRY,)]
                kinds.append(len(rows))
                rows += list(zip(_columns(self.interiors, unit, layers_again), nbytes))
            sizes = [len(times.fixed) for times, _ in rows]
            self._options[layers_again] = _Options(
                fixed=np.concatenate([times.fixed for times, _ in rows]),
                slope=np.concatenate([times.slope for times, _ in rows]),
                once=np.concatenate([times.once for times, _ in rows]),
                p0=np.concatenate([times.p0 for times, _ in rows]),
                state=np.concatenate([nbytes.state for _, nbytes in rows]),
                kept=np.concatenate([nbytes.kept for _, nbytes in rows]),
                layers=np.cumsum([0, *sizes[:-1]]),
                kinds=np.array(kinds),
            )
        return self._options[layers_again]

    @cached_property
    def _backward(self) -> tuple[np.ndarray, np.ndarray]:
        """(fixed, slope) of one backward pass of every option."""
        columns = [column for unit in self._first for column in _backward_columns(self.interiors, unit)]
        fixed, slope = (np.concatenate(part) for part in zip(*columns))
        return fixed, slope

    def _each(self, options: _Options, micro_batch: int, passes: int) -> np.ndarray:
        """Seconds of a micro-batch of every option, gone back through so often."""
        each = options.fixed + micro_batch * options.slope
        if passes > 1:
            fixed, slope = self._backward
            each = each + (passes - 1) * (fixed + micro_batch * slope)
        return each

    def costs(self, micro_batch: int, count: int, passes: int = 1) -> tuple[np.ndarray, np.ndarray] | None:
        """(busy per micro-batch, whole of ``count`` of them) of every unit; None where one does not divide over some layer.

        Args:
            passes: how often the unit is gone back through.
        """
        key = (micro_batch, count, passes)
        if key not in self._costs:
            options = self._of(False)
            each = self._each(options, micro_batch, passes)
            busy = np.maximum(options.least(each, micro_batch), 0.0)
            whole = np.maximum(options.least(count * each + options.once, micro_batch), 0.0)
            found = (busy[self._kinds], whole[self._kinds])
            self._costs[key] = found if np.isfinite(busy).all() else None
        return self._costs[key]

    def priced(
        self, micro_batch: int, count: int, passes: int, need: tuple[float, int], price: float, recompute: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Least seconds and priced bytes together, (without, with the all-reduce), of every unit, for ``count`` micro-batches.

        Args:
            passes: how often a unit is gone back through.
            need: micro-batches in flight, weight versions.
            price: seconds per byte.
        """
        times, kept = self._of(recompute != "none"), self._of(recompute == "layers")
        alive = 1.0 if recompute == "stage" else need[0]
        seconds = count * self._each(times, micro_batch, passes) + price * self._nbytes(
            kept, micro_batch, alive, need[1]
        )
        plain, whole = times.least(seconds, micro_batch), times.least(seconds + times.once, micro_batch)
        return plain[self._kinds], whole[self._kinds]

    def _nbytes(self, options: _Options, micro_batch: int, alive: float, versions: int) -> np.ndarray:
        return options.state * (1 + (versions - 1) * self._extra) + alive * micro_batch * options.kept

    def memory(
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
            sums = self._byte_sums(micro_batch, alive, versions, recompute == "layers")
            needed = sums[stops] - sums[starts]
            if recompute == "stage":
                needed = needed + in_flight * micro_batch * self.entering[starts]
            least = np.minimum(least, needed)
        return least * ROUNDING

    def _byte_sums(self, micro_batch: int, alive: float, versions: int, layers_again: bool) -> np.ndarray:
        """The least bytes of the units before each."""
        key = (micro_batch, alive, versions, layers_again)
        if key not in self._bytes:
            options = self._of(layers_again)
            of_kind = options.least(self._nbytes(options, micro_batch, alive, versions), micro_batch)
            self._bytes[key] = np.concatenate([[0.0], np.cumsum(of_kind[self._kinds])])
        return self._bytes[key]
