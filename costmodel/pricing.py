"""The cost table of a layer graph on a cluster, for any number of micro-batches.

**Variables.**  Tied layers share one variable (:mod:`.variables`).  The cost of a variable is the sum over its layers; the
redistributions between two variables are summed over their edges.

**Affine prices.**  At a fixed strategy every cost is affine in the samples b of a micro-batch: fixed + b * slope (latencies and
kernel launches; bytes and FLOPs).  With M micro-batches of b = batch / M samples, a step takes

    M * fixed + batch * slope + once        (once: the weight gradient's all-reduce, and the optimizer step)

so one :class:`PriceBook` gives the table of any number of micro-batches; recomputation needs another book.

**Redistribution classes.**  Between layers activations are canonical.  So the cost of an edge depends only on (p0, s) per level at
both ends, not on how s is divided into p1 and p2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from .cluster import Cluster
from .collectives import Step
from .distribution import RowsAndFeatures, is_tiled, row_slices
from .errors import UserError
from .graph import Layer, LayerGraph, Place
from .graph_meshes import EAGER
from .layerwork import repeats_redistributions
from .layoutprices import LayoutPrices
from .limits import MAX_BATCH
from .nearest import divisors, nearest_batches, nearest_that_work
from .optionprices import OptionPrices, price_layer
from .overlap import WHOLE, Exposure
from .problem import OBJECTIVES, Coefficients, Objective, OptionSet, PhaseEdge, Phases, Problem, Variable
from .recomputation import word_of
from .redistribution import redistribute, steps
from .strategy import PLAIN, Choices, Strategy, fitting
from .table import ClassCosts, CostTable, Edge
from .variables import Offer, executed_by, no_strategy, variables_of
from .workload import Workload

__all__ = [
    "PriceBook",
    "edge_shape",
    "edge_steps",
    "moved_shape",
    "price_together",
]


@dataclass(frozen=True, eq=False)
class _Column:
    """The options of a variable at one micro-batch.

    Attributes:
        option_set: the strategies that divide the micro-batch.
        cost: seconds per training step.
        memory, buffer: resident and transient bytes.
    """

    option_set: OptionSet
    cost: np.ndarray
    memory: np.ndarray
    buffer: np.ndarray


def edge_shape(producer: Layer, samples: int) -> tuple[int, int]:
    """The shape (samples, features) of the tensor on an edge for redistribution; an image's features are all its elements."""
    features = producer.features if len(producer.output_shape) <= 2 else producer.output_elements
    return (samples, features)


def moved_shape(producer: Layer, ends: Sequence[RowsAndFeatures], samples: int) -> tuple[int, ...]:
    """The shape in which a tensor of ``samples`` samples is redistributed: that of :func:`edge_shape`, or its rows and features.

    Ranks that share the positions of a sample hold rows, not whole samples.  The rows of an image are its pixels, and their
    features its channels.  If one of the ends has tiles of images, the shape is (rows of pixels, channels, columns).

    Args:
        producer: the layer whose output it is.
        ends: its layouts before and after.
        samples: samples of the tensor.
    """
    if max(map(row_slices, ends)) <= samples:
        return edge_shape(producer, samples)
    features = row_features(producer)
    rows = samples * (producer.output_elements // features)
    if not is_tiled(*ends):
        return rows, features
    width = row_width(producer)
    return rows // width, features, width


def row_features(producer: Layer) -> int:
    """The features of a row of the tensor on an edge; those of a pixel of an image are its channels."""
    return producer.features if len(producer.output_shape) <= 2 else producer.output_shape[0]


def row_width(producer: Layer) -> int:
    """The pixels of a row of the images on an edge; 1 if they are no images."""
    return 1 if len(producer.output_shape) <= 2 else producer.output_shape[2]


def edge_steps(
    producer: Layer, source: Strategy, target: Strategy, workload: Workload, samples: float
) -> tuple[Step, ...]:
    """The forward steps that redistribute a layer's output for a consumer; the backward pass sends as many bytes.

    Args:
        producer: the layer whose output it is.
        source, target: the strategies of the producer and of the consumer.
        workload: its micro-batch decides which route divides.
        samples: samples per micro-batch that the bytes are counted for.

    Raises:
        UserError: the tensor does not divide.
    """
    if source.rows_and_features == target.rows_and_features:
        return ()
    shape = moved_shape(producer, (source.rows_and_features, target.rows_and_features), workload.micro_batch)
    route = redistribute(source.activations, target.activations, shape)
    return steps(route, samples * producer.output_elements * workload.itemsize)


class _LayerKey(NamedTuple):
    """What the prices of a layer at the options of its variable depend on, besides the cluster."""

    signature: Hashable
    place: Place
    is_swapped: bool
    workload: Workload
    option_set: OptionSet


class PriceBook:
    """Costs of a graph on a cluster, for every number of micro-batches.

    Args:
        graph, cluster: the model and the machine.
        workload: precision, optimizer and recomputation; :meth:`problem` replaces its batch and micro-batch.
        untied: give every repetition of a block its own choice.
        summa: offer Summa meshes to linear layers.
        share_with: another book of the same cluster, whose option sets and cached prices this one shares.
        allowed: the allowed strategies, without sharding and regathering (:attr:`.Strategy.plain`); None allows all.
        executor: one of :data:`.graph_meshes.EXECUTORS`, or a restricted one; layers have only strategies that it can execute.
        exposure: the part of the gradients' all-reduces that the costs of problems count.
        choices: what layers are offered besides splits.

    Raises:
        UserError: the device has no speed for the precision, or a layer has no strategy on this cluster.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        workload: Workload,
        untied: bool = False,
        summa: bool = False,
        share_with: PriceBook | None = None,
        allowed: frozenset[Strategy] | None = None,
        executor: str = EAGER,
        exposure: Exposure = WHOLE,
        choices: Choices = PLAIN,
    ):
        cluster.device.peak(workload.precision)
        self.graph = graph
        self.cluster = cluster
        self.workload = workload
        self.untied = untied
        self.summa = summa
        self.executor = executor
        self.exposure = exposure
        self.offer = Offer(summa, allowed, executor, choices)
        twin = (
            share_with
            if share_with
            and share_with.graph is graph
            and (share_with.untied, share_with.offer) == (untied, self.offer)
            else None
        )
        self._option_sets: dict[Offer, dict[object, OptionSet]] = share_with._option_sets if share_with else {}
        known = self._option_sets.setdefault(self.offer, {})
        self.variables: tuple[Variable, ...] = (
            twin.variables if twin else variables_of(graph, cluster, untied, self.offer, known)
        )
        self._prices: dict[object, OptionPrices] = {}
        self._growing: dict[tuple[int, int], bool] = {}
        self._narrowed: dict[tuple[OptionSet, bytes], OptionSet] = share_with._narrowed if share_with else {}
        self._working: dict[int, list[int]] = twin._working if twin else {}  # valid micro-batches of each batch
        # These prices do not depend on ties or recomputation: books that share prices (`share_with`) have them in common.
        self._moves: LayoutPrices = share_with._moves if share_with else LayoutPrices(cluster)
        self._layer_prices: dict[_LayerKey, OptionPrices] = share_with._layer_prices if share_with else {}

    @property
    def may_shrink(self) -> bool:
        """Whether a redistribution priced so far may become cheaper with smaller micro-batches."""
        return self._moves.may_shrink

    def grows_from(self, larger: int, smaller: int) -> bool:
        """Whether a micro-batch of ``smaller`` samples offers nothing cheaper than one of ``larger`` samples, a multiple of them.

        So it is if no ranks share samples of the smaller micro-batch: then its strategies are a subset, and latencies count more
        often.  Otherwise each strategy needs a counterpart at the larger micro-batch, with the same splits and at most the same
        cost, and redistributions may not depend on what divides, as for powers of two.  Redistributions that may become cheaper
        for other reasons are those of :attr:`may_shrink`.
        """
        key = larger, smaller
        if key not in self._growing:
            different = {(v.option_set, prices): None for v, prices in zip(self.variables, self._variable_prices)}
            self._growing[key] = all(self._has_counterparts(*pair, larger, smaller) for pair in different)
        return self._growing[key]

    def _has_counterparts(self, option_set: OptionSet, prices: OptionPrices, larger: int, smaller: int) -> bool:
        fits = option_set.fits(smaller)
        if not (fits & (smaller % option_set.p0 != 0)).any():
            return True
        num_devices = self.cluster.num_devices
        if num_devices & (num_devices - 1):
            return False
        group = option_set.alike
        for objective in OBJECTIVES:
            small, large = (prices.cost(larger // size, larger, objective, WHOLE) for size in (smaller, larger))
            least = np.full(group.max() + 1, np.inf)
            np.minimum.at(least, group, np.where(option_set.fits(larger), large, np.inf))
            if (least[group[fits]] > small[fits] * (1 + 1e-12)).any():
                return False
        return True

    @cached_property
    def _variable_prices(self) -> tuple[OptionPrices, ...]:
        return tuple(self._price(variable) for variable in self.variables)

    def _price(self, variable: Variable) -> OptionPrices:
        """Sum the prices of a variable's layers.  Equal layers are priced once; equal variables share their arrays."""
        counts: dict[object, int] = {}
        first: dict[object, Layer] = {}
        for name in variable.layers:
            layer = self.graph[name]
            key = (layer.signature(), self.graph.place(name, self.workload.recompute), name in variable.swapped)
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, layer)
        whole = (tuple(counts.items()), variable.option_set)
        if whole not in self._prices:
            parts = [self._price_layer(first[key], variable).scaled(count) for key, count in counts.items()]
            total = parts[0]
            for part in parts[1:]:
                total = total.plus(part)
            self._prices[whole] = total
        return self._prices[whole]

    def _price_layer(self, layer: Layer, variable: Variable) -> OptionPrices:
        key = self._key(layer, variable)
        if key not in self._layer_prices:
            strategies = variable.strategies(layer.name)
            self._layer_prices[key] = price_layer(layer, strategies, self.cluster, self.workload, key.place)
        prices = self._layer_prices[key]
        repetitions = self.graph.place(layer.name, self.workload.recompute).repetitions
        return prices if repetitions < 2 else prices.of_one_block(repetitions)

    def _key(self, layer: Layer, variable: Variable) -> _LayerKey:
        place = self.graph.place(layer.name, self.workload.recompute)
        # The place says what ``blocks:K`` recomputes.  The number of repetitions only divides the bytes of one block.
        alone = replace(place, repetitions=min(place.repetitions, 1))
        return _LayerKey(
            layer.signature(), alone, layer.name in variable.swapped, self._workload_of_key, variable.option_set
        )

    @cached_property
    def _workload_of_key(self) -> Workload:
        """The workload without what the prices of a layer do not depend on."""
        return replace(self.workload, batch=1, micro_batch=1, recompute=word_of(self.workload.recompute))

    def _unpriced(self) -> Iterator[tuple[_LayerKey, Layer, Variable]]:
        """The layers that have no prices yet, each with its variable."""
        for variable in self.variables:
            for name in variable.layers:
                layer = self.graph[name]
                key = self._key(layer, variable)
                if key not in self._layer_prices:
                    yield key, layer, variable

    def space_size(self, micro_batch: int) -> int:
        """The number of assignments of strategies that divide a micro-batch, with those of Summa if the book has them."""
        return math.prod(int(np.sum(variable.option_set.fits(micro_batch))) for variable in self.variables)

    def problem(
        self, batch: int, micro_batch: int, objective: Objective = "step", summa: bool | None = None
    ) -> Problem:
        """The search problem of one batch and micro-batch.

        Args:
            batch, micro_batch: samples per training step and per pass, over all devices.
            objective: what to minimise, ``step`` or ``communication``.
            summa: whether to offer the book's Summa meshes; by default they are offered if the book has any.

        Raises:
            UserError: the micro-batch does not divide the batch, or no strategy of some layer divides the micro-batch.
        """
        if 0 < micro_batch <= MAX_BATCH and batch % micro_batch:
            fault = f"micro-batch {micro_batch} does not divide the batch of {batch}"
            raise UserError(f"{fault}; {self._nearest(batch, micro_batch)}")
        workload = replace(self.workload, batch=batch, micro_batch=micro_batch)
        num = workload.num_micro_batches
        # Equal variables share options and arrays.  This is fast for deep models, and searches recognise equality by identity.
        shared: dict[object, _Column] = {}
        columns = []
        for variable, prices in zip(self.variables, self._variable_prices):
            key = (prices, variable.option_set)
            if key not in shared:
                kept = self._kept(variable, workload, self.summa if summa is None else summa)
                shared[key] = _Column(
                    self._narrow(variable.option_set, kept),
                    prices.cost(num, batch, objective, self.exposure)[kept],
                    prices.memory(micro_batch)[kept],
                    prices.buffer(micro_batch)[kept],
                )
            columns.append(shared[key])
        variables = tuple(
            Variable(variable.name, variable.layers, column.option_set, variable.swapped)
            for variable, column in zip(self.variables, columns)
        )
        alone = CostTable(
            names=tuple(variable.name for variable in variables),
            cost=tuple(column.cost for column in columns),
            memory=tuple(column.memory for column in columns),
            buffer=tuple(column.buffer for column in columns),
            edges=(),
        )
        edges = partial(self._edges, columns, workload)
        return Problem(self.graph, self.cluster, workload, objective, variables, alone, edges)

    def phases(self, micro_batch: int, objective: Objective = "step", part: int | None = None) -> Phases:
        """Cost and memory of the passes of one micro-batch.

        Args:
            micro_batch: samples per pass, over all devices.
            objective: ``step``, or ``communication`` to leave out computation.
            part: samples that every strategy must divide, without sharing a sample, if passes have fewer than a micro-batch.

        Raises:
            UserError: no strategy of some layer divides the samples.
        """
        workload = replace(self.workload, micro_batch=micro_batch)
        shared: dict[object, tuple[OptionSet, tuple[np.ndarray, ...]]] = {}
        option_sets, columns, variables = [], [], []
        for variable, prices in zip(self.variables, self._variable_prices):
            key = (prices, variable.option_set)
            if key not in shared:
                kept = self._kept(variable, workload, self.summa, part)
                each = prices.coefficients(variable.option_set, objective)
                of_one = (
                    each.forward[0] + micro_batch * each.forward[1],
                    each.backward[0] + micro_batch * each.backward[1],
                    each.gradient,
                    each.update,
                    each.state,
                    micro_batch * each.kept,
                    micro_batch * each.recomputed,
                    (prices.buffer_fixed + micro_batch * prices.buffer_slope).max(axis=0),
                )
                shared[key] = self._narrow(variable.option_set, kept), tuple(column[kept] for column in of_one)
            option_sets.append(shared[key][0])
            columns.append(shared[key][1])
            variables.append(Variable(variable.name, variable.layers, option_sets[-1], variable.swapped))
        edges = self._phase_edges(option_sets, workload)
        names = ("forward", "backward", "gradient", "update", "state", "kept", "recomputed", "buffer")
        return Phases(tuple(variables), edges=edges, **dict(zip(names, zip(*columns))))

    def coefficients(self, objective: Objective = "step") -> tuple[Coefficients, ...]:
        """For each variable, the coefficients of its options' costs as functions of the number of samples."""
        return tuple(
            prices.coefficients(v.option_set, objective) for v, prices in zip(self.variables, self._variable_prices)
        )

    def _phase_edges(self, option_sets: Sequence[OptionSet], workload: Workload) -> tuple[PhaseEdge, ...]:
        known: dict[object, tuple[ClassCosts, ClassCosts]] = {}
        edges = []
        for (i, j), tensors in self._variable_edges.items():
            key = (tensors, option_sets[i], option_sets[j])
            if key not in known:
                (sources, rows), (targets, cols) = option_sets[i].layouts, option_sets[j].layouts
                ways = [
                    (count, repeated, self._moves.phases(tensor, sources, targets, workload))
                    for (*tensor, repeated), count in tensors
                ]
                forward = sum(count * there for count, _, (there, _) in ways)
                backward = sum(count * (back + there if again else back) for count, again, (there, back) in ways)
                known[key] = ClassCosts(np.asarray(forward), rows, cols), ClassCosts(np.asarray(backward), rows, cols)
            edges.append(PhaseEdge(i, j, *known[key]))
        return tuple(edges)

    def _kept(self, variable: Variable, workload: Workload, summa: bool, part: int | None = None) -> np.ndarray:
        """The indices of the options that divide the micro-batch; only its whole samples if passes have ``part`` of them.

        Raises:
            UserError: there are none.
        """
        micro_batch = workload.micro_batch
        kept = np.flatnonzero(variable.option_set.fits(micro_batch, part) & (~variable.option_set.summa | summa))
        if len(kept) == 0:
            why = f"whose samples divide a micro-batch of {part or micro_batch} {self.graph.sample}s{executed_by(self.executor)}"
            fault = no_strategy(self.graph[variable.layers[0]], self.cluster, why)
            raise UserError(f"{fault}; {self._nearest(workload.batch, micro_batch)}")
        return kept

    @cached_property
    def _slices(self) -> tuple[tuple[np.ndarray, np.ndarray, int], ...]:
        """Of each different option set the distinct (p0, ranks that share a sample) of its options, and its positions.

        Sets are left out that have an option with p0 = 1, which divides every number.
        """
        found = {id(variable.option_set): variable.option_set for variable in self.variables}
        slices = {(tuple(np.unique([s.p0, s.ranks_per_sample], axis=1).ravel()), s.positions) for s in found.values()}
        return tuple(
            (*np.array(numbers).reshape(2, -1), positions) for numbers, positions in sorted(slices) if numbers[0] > 1
        )

    def _divides(self, samples: int) -> bool:
        """Whether every layer has a strategy that divides ``samples``; then they are a valid micro-batch."""
        return all(fitting(samples, *numbers).any() for numbers in self._slices)

    def _nearest(self, batch: int, micro_batch: int) -> str:
        """The end of a message: the nearest valid micro-batches of the batch; if it has none, the nearest valid batches."""
        if batch not in self._working:
            self._working[batch] = [size for size in divisors(batch) if self._divides(size)]
        if self._working[batch]:
            return nearest_that_work("micro-batch", micro_batch, self._working[batch])
        given = micro_batch if self._divides(micro_batch) else 1

        def works(other: int) -> bool:
            # Samples that ranks share divide the ranks, so that a batch may only work in smaller micro-batches.
            return any(self._divides(size) for size in divisors(other))

        batches = nearest_batches(batch, works, self.cluster.num_devices, given)
        return nearest_that_work("batch", batch, batches)

    def _narrow(self, option_set: OptionSet, kept: np.ndarray) -> OptionSet:
        """The options at the indices ``kept``; micro-batches that keep the same options share one object."""
        key = (option_set, kept.tobytes())
        if key not in self._narrowed:
            self._narrowed[key] = replace(option_set, options=tuple(option_set.options[i] for i in kept))
        return self._narrowed[key]

    # ------------------------------------------------------------------------------------------------------------- edges

    @cached_property
    def _variable_edges(self) -> dict[tuple[int, int], tuple[tuple[tuple[int, int, int, int, bool], int], ...]]:
        """For each ordered pair of variables, their edges' tensors and the count of each.

        A tensor is (features of a sample's only row, or of each row; features of a row; pixels of a row of images; elements per
        sample; whether recomputation redistributes it again).

        Edges inside one variable cost nothing: both ends have the same layout (a transposed strategy has the same p0).
        """
        owner = {name: i for i, variable in enumerate(self.variables) for name in variable.layers}
        edges: dict[tuple[int, int], Counter[tuple[int, int, int, int, bool]]] = {}
        for source, target in self.graph.edges:
            if owner[source] != owner[target]:
                layer = self.graph[source]
                is_repeated = repeats_redistributions(self.workload, self.graph.place(target, self.workload.recompute))
                features = edge_shape(layer, 1)[1], row_features(layer)
                tensor = (*features, row_width(layer), layer.output_elements, is_repeated)
                edges.setdefault((owner[source], owner[target]), Counter())[tensor] += 1
        return {pair: tuple(sorted(tensors.items())) for pair, tensors in edges.items()}

    def _edges(self, columns: Sequence[_Column], workload: Workload) -> tuple[Edge, ...]:
        known: dict[object, ClassCosts] = {}
        edges = []
        for (i, j), tensors in self._variable_edges.items():
            key = (tensors, columns[i], columns[j])
            if key not in known:
                (sources, rows), (targets, cols) = columns[i].option_set.layouts, columns[j].option_set.layouts
                between = sum(
                    count * self._moves.costs(tensor, sources, targets, workload, is_repeated, self.exposure.backward)
                    for (*tensor, is_repeated), count in tensors
                )
                known[key] = ClassCosts(np.asarray(between), rows, cols)
            edges.append(Edge(i, j, known[key]))
        return tuple(edges)


def price_together(books: Iterable[PriceBook], check: Callable[[], None]) -> None:
    """Compute the prices of the layers of several books, those of equal layers at once.

    Numpy operations on the strategies of a layer on many rectangles of devices take little longer than on one rectangle.

    Args:
        books: books for clusters with the same links and devices, which may differ in their sizes.
        check: called before each layer; what it raises ends the computation, and the prices known by then are kept.
    """
    # Equal layers on the same network levels, by their options.
    wanted: dict[object, dict[OptionSet, tuple[PriceBook, _LayerKey, Layer, Variable]]] = {}
    for book in books:
        levels = tuple(level.name for level in book.cluster.levels)
        for key, layer, variable in book._unpriced():
            wanted.setdefault((levels, key[:-1]), {})[key.option_set] = book, key, layer, variable
    for equal in wanted.values():
        check()
        strategies = [variable.strategies(layer.name) for _, _, layer, variable in equal.values()]
        book, key, layer, _ = next(iter(equal.values()))
        prices = price_layer(layer, list(chain(*strategies)), book.cluster, book.workload, key.place)
        first = 0
        for (book, key, _, _), own in zip(equal.values(), strategies):
            book._layer_prices[key] = prices.of_options(slice(first, first + len(own)))
            first += len(own)
