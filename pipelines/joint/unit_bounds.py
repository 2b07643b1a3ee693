"""The least that the units of a model take on one rectangle of devices: the basis of all bounds, before any stage is searched.

The *vector* of a stage (:data:`.stage_cost.COMPONENTS`) holds the seconds of the forward and of the backward pass of a micro-batch,
the seconds of the all-reduce of gradients, the bytes of state, and the bytes that a micro-batch keeps.  A *weight* prices each of
these.  Let every layer have the option that is cheapest for a weight, and let redistributions be free.  Then the layers of a unit
sum to a lower bound on the unit's part of any stage, and the units of a stage sum to a lower bound on the stage.  A further
component are the bytes of gradients that the first and the last stage exchange (:mod:`.bounds`), which have a weight of their own.

**Tight bounds** also count the redistributions inside a unit, but not those between units.  The least sum is then that of a table
(:mod:`autoddl.search.fronts`), which takes some ten times as long, and is usually one to three per cent more.

The options of all layers of all kinds of units are columns of one array, so that a few numpy operations minimise over all of them.
For each micro-batch size only options are kept that no other option of the same layer dominates (is at most as large in every
component).

A layer without a strategy on the rectangle has one option, which is much dearer than all others (:data:`_PENALTY`): its unit runs
on another worker, whose rectangle may be different.  A stage with such a unit has no rows, so that any bound on it is valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.strategy import fitting
from autoddl.search.dominance import TooManyError, undominated
from autoddl.search.fronts import VectorTable, least, least_choices

from .configuration import recomputed_inside
from .partition import ENTRY, Chain
from .stage_cost import COMPONENTS, MEMORY, Replicas, StageTables

__all__ = ["ROUNDING", "UnitBounds"]

#: Factor that lowers a bound by more than a sum of floats changes with the order of its terms.
ROUNDING = 1 - 1e-9
#: The components of an option: those of a stage, and the bytes of gradients that a device exchanges with another stage, which holds
#: the same weight.
_NUM_COMPONENTS = len(COMPONENTS) + 1
#: Factor by which a layer without a strategy is dearer than the dearest option of any layer.
_PENALTY = 1000.0


@dataclass(frozen=True, eq=False)
class _Options:
    """The options of all layers of all kinds of units, for any micro-batch size; options of a layer are adjacent.

    The vector of an option is ``fixed + micro_batch * slope``.

    Attributes:
        fixed, slope: Shape (components, options).
        sample_slices: Number of slices into which each option divides the samples (p0), shape (options,).
        ranks_per_sample: :attr:`.Strategy.ranks_per_sample` of each option, shape (options,).
        positions: :attr:`.OptionSet.positions` of each option, shape (options,).
        first_of_layer: Index of the first option of each layer.
        first_of_kind: Index of the first layer of each kind of unit.
    """

    fixed: np.ndarray
    slope: np.ndarray
    sample_slices: np.ndarray
    ranks_per_sample: np.ndarray
    positions: np.ndarray
    first_of_layer: np.ndarray
    first_of_kind: np.ndarray

    @property
    def num_layers(self) -> int:
        return len(self.first_of_layer)

    def for_micro_batch(self, micro_batch: int, part: int) -> _MicroBatchOptions | None:
        """Return the undominated options that divide ``part`` samples of a micro-batch; None if all units lack them for a layer."""
        vectors = np.maximum(self.fixed + micro_batch * self.slope, 0.0)
        layer = np.repeat(np.arange(self.num_layers), np.diff(np.append(self.first_of_layer, vectors.shape[1])))
        if part == micro_batch:
            fits = fitting(part, self.sample_slices, self.ranks_per_sample, self.positions)
        else:
            fits = (part % self.sample_slices == 0) & (self.ranks_per_sample == 1)
        usable = np.flatnonzero(fits & np.isfinite(vectors).all(axis=0))
        selected = usable[undominated(layer[usable], vectors[:, usable].T)]
        sizes = np.bincount(layer[selected], minlength=self.num_layers)
        if not np.minimum.reduceat(sizes, self.first_of_kind).any():
            return None
        left = vectors[:, selected]
        if not sizes.all():
            without = np.flatnonzero(sizes == 0)
            penalties = np.repeat(_PENALTY * left.max(axis=1, keepdims=True), len(without), axis=1)
            order = np.argsort(np.concatenate([layer[selected], without]), kind="stable")
            left, sizes = np.hstack([left, penalties])[:, order], np.maximum(sizes, 1)
        return _MicroBatchOptions(left, sizes, self.first_of_kind)


@dataclass(frozen=True, eq=False)
class _MicroBatchOptions:
    """The undominated options of all layers of all kinds of units at one micro-batch size; options of a layer are adjacent.

    Attributes:
        vectors: Vector of each option, shape (components, options).
        sizes: Number of options of each layer.
        first_of_kind: Index of the first layer of each kind of unit.
    """

    vectors: np.ndarray
    sizes: np.ndarray
    first_of_kind: np.ndarray

    @cached_property
    def first_of_layer(self) -> np.ndarray:
        """Index of the first option of each layer."""
        return np.cumsum(self.sizes) - self.sizes

    def values(self, weights: np.ndarray, exchange: np.ndarray | None) -> np.ndarray:
        """The weighted sum of each option's vector, shape (weights, options); arguments as :meth:`UnitBounds.least`."""
        values = weights @ self.vectors[:-1]
        if exchange is not None:
            values += exchange[:, None] * self.vectors[-1]
        return np.asarray(values)


class UnitBounds:
    """Lower bounds on what each unit of a model adds to a stage on one rectangle of devices.

    Args:
        chain: The units of the model.
        tables: Tables of stages on the rectangle.
    """

    def __init__(self, chain: Chain, tables: StageTables):
        chain = chain.without_inner_ties
        if chain is not tables.chain:
            tables = StageTables(chain, tables.mesh, tables.cluster, tables.workload, tables.pricing)
        self.chain, self.tables = chain, tables
        self._first_units = [chain.kinds.index(kind) for kind in range(max(chain.kinds) + 1)]
        self._kinds = np.array(chain.kinds)
        self._options: dict[tuple[str, Replicas], _Options | None] = {}
        self._unit_tables: dict[tuple[str, Replicas, int, int], tuple[tuple[int, VectorTable], ...]] = {}
        self._micro_batch_options: dict[tuple[str, Replicas, int, int], _MicroBatchOptions | None] = {}

    def _options_of(self, recompute: str, replicas: Replicas) -> _Options | None:
        """Return the options for any micro-batch size; None if every unit has a layer without a strategy on so many devices."""
        key = (recompute, replicas)
        if key not in self._options:
            self._options[key] = self._collect_options(recompute, replicas)
        return self._options[key]

    def book(self, unit: int, recompute: str, runs_whole_passes: bool) -> PriceBook | None:
        """The prices of a unit alone; None if a layer of it has no strategy on the rectangle.

        Args:
            unit: The unit.
            recompute: What the passes recompute.
            runs_whole_passes: As of :class:`.stage_cost.Replicas`.
        """
        try:
            return self.tables.book(unit, unit + 1, recompute, runs_whole_passes)
        except UserError:
            return None

    def books(self, recompute: str, runs_whole_passes: bool) -> Iterator[PriceBook]:
        """The prices of one unit of every kind; arguments as :meth:`book`."""
        for unit in self._first_units:
            book = self.book(unit, recompute, runs_whole_passes)
            if book is not None:
                yield book

    def _collect_options(self, recompute: str, replicas: Replicas) -> _Options | None:
        fixed: list[np.ndarray] = []
        slope: list[np.ndarray] = []
        slices: list[np.ndarray] = []  # p0, ranks that share a sample, positions
        first_of_kind: list[int] = []
        for unit in self._first_units:
            first_of_kind.append(len(fixed))
            book = self.book(unit, recompute, replicas.runs_whole_passes)
            plain_book = self.book(unit, "none", replicas.runs_whole_passes)
            if book is None or plain_book is None:
                fixed.append(np.zeros((_NUM_COMPONENTS, 0)))
                slope.append(np.zeros((_NUM_COMPONENTS, 0)))
                slices.append(np.zeros((3, 0), dtype=np.int64))
                continue
            stage = self.tables.graph(unit, unit + 1)
            # A stage recomputes one of its blocks at a time, so that the units of a stage add up neither their activations nor
            # the gathered weights that a recomputed block holds (ZeRO 3).
            objective = self.tables.pricing.objective
            of_plain = plain_book.coefficients(objective)
            for variable, each, plain in zip(book.variables, book.coefficients(objective), of_plain):
                if variable.layers == (ENTRY,):
                    continue
                none = np.zeros(len(each.state))
                gradient = (
                    each.gradient
                    if replicas.count == 1
                    else self.tables.replicated(stage, variable, replicas, each.gradient)
                )
                once = self.tables.workload.exposed_gradient_part * gradient + each.update
                exchanged = np.sum([none, *self.tables.shared_bytes(stage, variable)], axis=0)
                fixed.append(np.stack([each.forward[0], each.backward[0], once, plain.state, none, none, exchanged]))
                slope.append(np.stack([each.forward[1], each.backward[1], none, none, each.kept, none, none]))
                of_set = each.option_set
                slices.append(np.stack([of_set.p0, of_set.ranks_per_sample, np.full(len(of_set.p0), of_set.positions)]))
        if not any(one.shape[1] for one in slices):
            return None
        # Drop options that another option of the layer with as many slices dominates in both parts: it does so for every
        # micro-batch size.  Options with negative or infinite coefficients are not compared.
        layer, num_slices = np.repeat(np.arange(len(slices)), [one.shape[1] for one in slices]), np.hstack(slices)
        both = np.concatenate([np.concatenate(fixed, axis=1), np.concatenate(slope, axis=1)])
        comparable = np.flatnonzero(np.isfinite(both).all(axis=0) & (both >= 0).all(axis=0))
        others = np.setdiff1d(np.arange(len(layer)), comparable)
        group = np.unique(np.column_stack([layer, num_slices.T]), axis=0, return_inverse=True)[1].ravel()
        best = comparable[undominated(group[comparable], both[:, comparable].T)]
        selected = np.sort(np.concatenate([best, others]))
        sizes = np.bincount(layer[selected], minlength=len(slices))
        return _Options(
            fixed=both[:_NUM_COMPONENTS, selected],
            slope=both[_NUM_COMPONENTS:, selected],
            sample_slices=num_slices[0, selected],
            ranks_per_sample=num_slices[1, selected],
            positions=num_slices[2, selected],
            first_of_layer=np.cumsum(sizes) - sizes,
            first_of_kind=np.array(first_of_kind),
        )

    def least(
        self,
        recompute: str,
        replicas: Replicas,
        micro_batch: int,
        part: int,
        weights: np.ndarray,
        is_tight: bool | np.ndarray = False,
        exchange: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Return the least weighted sum of each unit's vector, for each weight.

        Args:
            recompute: What the passes recompute (:func:`.configuration.recomputed_inside`).
            replicas: The workers that hold the stage's weights.
            micro_batch: Samples of a micro-batch.
            part: Samples of the smallest pass, which strategies must divide.
            weights: Shape (weights, components).
            is_tight: Whether redistributions inside the units count: for all, or for each weight and unit, shape (weights, units).
            exchange: For each weight that of a byte of the gradients that a device exchanges with another stage, which holds the
                same weight of the model; shape (weights,).  None: they have no weight.

        Returns:
            Shape (weights, units); None if every unit has a layer without a strategy that divides ``part`` samples.
        """
        options = self._options_at(recompute, replicas, micro_batch, part)
        if options is None:
            return None
        of_layers = np.minimum.reduceat(options.values(weights, exchange), options.first_of_layer, axis=1)
        of_kinds = np.add.reduceat(of_layers, options.first_of_kind, axis=1)
        tables = self._tables_at(recompute, replicas, micro_batch, part) if is_tight is not False else ()
        for kind, table, rows in self._with_rows(tables, is_tight, len(weights)):
            tight, rough = _least(table, _with_exchange(weights, exchange)[rows]), of_kinds[rows, kind]
            of_kinds[rows, kind] = np.where(np.isfinite(tight), np.maximum(tight, rough), rough)
        return np.asarray(of_kinds[:, self._kinds])

    def least_vectors(
        self,
        recompute: str,
        replicas: Replicas,
        micro_batch: int,
        part: int,
        weights: np.ndarray,
        is_tight: bool | np.ndarray = False,
        exchange: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Return a vector of each unit that has the least weighted sum, for each weight; arguments as :meth:`least`.

        Returns:
            Shape (weights, units, components + 1), the last component being the bytes that are exchanged; None if every unit has a
            layer without a strategy that divides ``part`` samples.
        """
        options = self._options_at(recompute, replicas, micro_batch, part)
        if options is None:
            return None
        values = options.values(weights, exchange)
        lowest = np.repeat(np.minimum.reduceat(values, options.first_of_layer, axis=1), options.sizes, axis=1)
        # The first option of each layer that has the least value.
        indices = np.where(values <= lowest, np.arange(values.shape[1]), values.shape[1])
        chosen = np.minimum.reduceat(indices, options.first_of_layer, axis=1)
        of_kinds = np.add.reduceat(options.vectors[:, chosen], options.first_of_kind, axis=2)
        tables = self._tables_at(recompute, replicas, micro_batch, part) if is_tight is not False else ()
        for kind, table, rows in self._with_rows(tables, is_tight, len(weights)):
            choices = least_choices(table, _with_exchange(weights, exchange)[rows])
            if len(choices):
                of_kinds[:, rows, kind] = table.evaluate(choices)[0].T
        return np.asarray(np.moveaxis(of_kinds[:, :, self._kinds], 0, 2))

    def cheapest_ways(
        self,
        replicas: Replicas,
        micro_batch: int,
        part: int,
        weights: dict[str, np.ndarray],
        factors: dict[str, np.ndarray],
        is_tight: bool | np.ndarray,
        exchange: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what each unit costs at least with any way of recomputation, and how it is run then.

        Args:
            replicas, micro_batch, part, is_tight, exchange: As :meth:`least`.
            weights: For each way of recomputation weights of the components, shape (rows, components).
            factors: For each way the factors of the bytes (:data:`.stage_cost.MEMORY`), shape (rows, 3).

        Returns:
            The costs, shape (rows, units), and the seconds forward, backward, of recomputation and of all-reduce, the bytes, and
            the bytes that are exchanged, shape (rows, units, 6); None if every unit has a layer without a strategy.
        """
        size = replicas, micro_batch, part
        rough: dict[str, np.ndarray] = {}
        for way, rows in weights.items():
            lowest = self.least(recomputed_inside(way), *size, rows, exchange=exchange)
            if lowest is None:
                return None
            rough[way] = lowest
        costs = np.full_like(next(iter(rough.values())), np.inf)
        ways = np.zeros((*costs.shape, 6))
        # The ways that seem cheap first: then many others need not be looked at closely.
        for way in sorted(rough, key=lambda way: float(rough[way].sum())):
            wanted = np.flatnonzero((rough[way] < costs).any(axis=1))
            if not len(wanted):
                continue
            of_exchange = None if exchange is None else exchange[wanted]
            is_tight_there = is_tight if isinstance(is_tight, bool) else is_tight[wanted]
            each = self.least_vectors(recomputed_inside(way), *size, weights[way][wanted], is_tight_there, of_exchange)
            assert each is not None
            value = np.einsum("ruc,rc->ru", each, _with_exchange(weights[way][wanted], of_exchange))
            recompute_s = each[..., 0] if way == "stage" else np.zeros_like(value)
            nbytes = np.einsum("ruc,rc->ru", each[..., MEMORY], factors[way][wanted])
            found = np.stack([each[..., 0], each[..., 1], recompute_s, each[..., 2], nbytes, each[..., -1]], axis=-1)
            is_less = value < costs[wanted]
            costs[wanted] = np.where(is_less, value, costs[wanted])
            ways[wanted] = np.where(is_less[..., None], found, ways[wanted])
        return costs, ways

    def _with_rows(
        self, tables: Iterable[tuple[int, VectorTable]], is_tight: bool | np.ndarray, num_weights: int
    ) -> Iterator[tuple[int, VectorTable, np.ndarray]]:
        """Iterate over tables of kinds of units, each with the numbers of the weights for which redistributions inside these units
        count (``is_tight`` of :meth:`least`); tables without such weights are left out."""
        for kind, table in tables:
            rows = np.arange(num_weights)
            if not isinstance(is_tight, bool):
                rows = np.flatnonzero(is_tight[:, self._kinds == kind].any(axis=1))
            if len(rows):
                yield kind, table, rows

    def _tables_at(
        self, recompute: str, replicas: Replicas, micro_batch: int, part: int
    ) -> tuple[tuple[int, VectorTable], ...]:
        """The kinds of units that have redistributions inside, each with the table of its vectors."""
        key = (recompute, replicas, micro_batch, part)
        if key not in self._unit_tables:
            tables = []
            for kind, unit in enumerate(self._first_units):
                table = self._unit_table(unit, *key)
                if table is not None:
                    tables.append((kind, table))
            self._unit_tables[key] = tuple(tables)
        return self._unit_tables[key]

    def _unit_table(
        self, unit: int, recompute: str, replicas: Replicas, micro_batch: int, part: int
    ) -> VectorTable | None:
        """The table of a unit's vectors; None if redistributions inside the unit cost nothing, or cannot be searched."""
        own, plain = (
            self.tables.table(unit, unit + 1, way, micro_batch, part, replicas) for way in (recompute, "none")
        )
        if own is None or plain is None or not own.table.edges:
            return None
        # As in :meth:`_collect_options`, the units of a stage do not add up what one block needs at a time.
        state, recomputed = COMPONENTS.index("state"), COMPONENTS.index("recomputed")
        num = len(COMPONENTS)
        sums = tuple(np.column_stack([one[:, :num], one[:, num:].sum(axis=1)]) for one in own.table.sums)
        for one, without in zip(sums, plain.table.sums):
            one[:, state], one[:, recomputed] = without[:, state], 0.0
        table = VectorTable(sums, tuple(np.zeros(len(one)) for one in sums), own.table.edges)
        try:
            least(table, np.zeros((1, _NUM_COMPONENTS)))
        except TooManyError:
            return None
        return table

    def _options_at(self, recompute: str, replicas: Replicas, micro_batch: int, part: int) -> _MicroBatchOptions | None:
        key = (recompute, replicas, micro_batch, part)
        if key not in self._micro_batch_options:
            options = self._options_of(recompute, replicas)
            self._micro_batch_options[key] = None if options is None else options.for_micro_batch(micro_batch, part)
        return self._micro_batch_options[key]


def _with_exchange(weights: np.ndarray, exchange: np.ndarray | None) -> np.ndarray:
    """Weights of the components of an option, from those of a stage's; arguments as :meth:`UnitBounds.least`."""
    return np.column_stack([weights, np.zeros(len(weights)) if exchange is None else exchange])


def _least(table: VectorTable, weights: np.ndarray) -> np.ndarray:
    """The least weighted sum of a table's vectors, for each weight; shape (weights, components) -> (weights,).

    A path passes many stages as often forward as backward.  So weights that differ by a factor alone are looked up once.
    """
    scale = weights.sum(axis=1)
    scale = np.where(scale > 0, scale, 1.0)
    directions, numbers = np.unique(weights / scale[:, None], axis=0, return_inverse=True)
    return np.asarray(least(table, directions)[numbers.ravel()] * scale)
