"""From a layer graph, a cluster and a workload to the cost table of the searches.

**Variables.**  Layers that are tied share one variable: the same layer of every repetition of a block (unless ``untied``), and
layers that share a weight.  Where an embedding and a linear layer share one, the strategy of the one is the transpose of the
other's.  The cost of a variable is the sum over its layers; redistributions between two variables are summed over their edges.

**Affine prices.**  At a fixed strategy every cost is affine in the samples b of a micro-batch: fixed + b * slope (latencies and
kernel launches; bytes and FLOPs).  With M micro-batches of b = batch / M samples, a step takes

    M * fixed + batch * slope + once        (once: the weight gradient's all-reduce)

so one :class:`PriceBook` gives the table of any number of micro-batches, recomputation apart.

**Redistribution classes.**  Between layers activations are canonical: what an edge costs depends on (p0, s) per level at both
ends alone, not on how s is divided into p1 and p2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from .cluster import Cluster
from .collectives import Step
from .errors import UserError
from .graph import Layer, LayerGraph
from .layerwork import layer_work
from .layoutprices import MANY, Layout, LayoutPrices, communication_time
from .redistribution import redistribute, steps
from .strategy import Strategy, alike, enumerate_strategies, transposed
from .table import ByClass, CostTable, Edge
from .workload import Workload

__all__ = ["Objective", "Offer", "PriceBook", "Problem", "Variable", "edge_shape", "edge_steps"]

#: (fixed, slope, once) of communication or of compute, one entry per option.
Affine = tuple[np.ndarray, np.ndarray, np.ndarray]
Objective = str
#: What a search minimises: the time of a step, or (as the paper does) of its communication alone.
OBJECTIVES = ("step", "communication")


@dataclass(frozen=True, eq=False)
class Offer:
    """The strategies that a variable's layers choose from; equal variables share one object."""

    options: tuple[Strategy, ...]

    @cached_property
    def index(self) -> dict[Strategy, int]:
        """Where each option stands."""
        return {strategy: i for i, strategy in enumerate(self.options)}

    @cached_property
    def p0(self) -> np.ndarray:
        """Into how many slices each option cuts the samples."""
        return np.array([strategy.p0 for strategy in self.options])

    @cached_property
    def summa(self) -> np.ndarray:
        """Which options are Summa meshes."""
        return np.array([strategy.summa for strategy in self.options])

    @cached_property
    def layouts(self) -> tuple[tuple[Layout, ...], np.ndarray]:
        """The distinct canonical layouts of the options, and which of them each option has."""
        number: dict[Layout, int] = {}
        of_option = [number.setdefault(strategy.rows_and_features, len(number)) for strategy in self.options]
        return tuple(number), np.array(of_option)


@dataclass(frozen=True)
class Variable:
    """Layers that share one choice.

    Attributes:
        name: of the block and role, or of the first layer.
        layers: names, in the order of the graph.
        offer: the strategies of the first layer.
        swapped: which of the layers take the transposed strategy.
    """

    name: str
    layers: tuple[str, ...]
    offer: Offer
    swapped: frozenset[str] = frozenset()

    @property
    def options(self) -> tuple[Strategy, ...]:
        """The strategies of the first layer."""
        return self.offer.options

    def strategy(self, layer: str, option: int) -> Strategy:
        """The strategy of one of the layers."""
        strategy = self.options[option]
        return transposed(strategy) if layer in self.swapped else strategy


@dataclass(frozen=True, eq=False)
class _Column:
    """What is on offer for a variable at one micro-batch, with costs, memory and buffers."""

    offer: Offer
    cost: np.ndarray
    memory: np.ndarray
    buffer: np.ndarray


@dataclass(frozen=True, eq=False)
class Problem:
    """A cost table together with what its numbers stand for.

    Attributes:
        graph, cluster, workload, objective: what it is the table of.
        variables: of the table, with the options on offer.
        alone: the table with redistributions for nothing: what the layers cost by themselves.
        edges: works out the redistributions.
    """

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    objective: Objective
    variables: tuple[Variable, ...]
    alone: CostTable
    edges: Callable[[], tuple[Edge, ...]] = field(repr=False)

    @cached_property
    def table(self) -> CostTable:
        """The layers and the redistributions between them.  These are worked out when they are first asked for: of most numbers of
        micro-batches nobody does, because what the layers cost by themselves is too much already."""
        return replace(self.alone, edges=self.edges())

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """The strategy of every layer, in the order of the graph."""
        found = {
            layer: variable.strategy(layer, option)
            for variable, option in zip(self.variables, choice)
            for layer in variable.layers
        }
        return {layer.name: found[layer.name] for layer in self.graph.layers}

    def choice(self, strategies: Mapping[str, Strategy]) -> tuple[int, ...]:
        """The options that give every layer, by name, its strategy.

        Raises:
            UserError: a layer cannot have it.
        """
        choice = []
        for variable in self.variables:
            first = variable.layers[0]
            wanted = strategies[first]
            if self.workload.micro_batch % wanted.p0:
                raise UserError(
                    f"a micro-batch of {self.workload.micro_batch} {self.graph.sample}s does not divide over the {wanted.p0} "
                    f"slices of {wanted}"
                )
            option = variable.offer.index.get(wanted)
            if option is None:
                raise UserError(f"{self.graph[first].describe()} does not divide by {wanted}")
            for name in variable.layers[1:]:
                mine = strategies[name]
                same = mine is wanted and name not in variable.swapped
                if not same and mine != variable.strategy(name, option):
                    raise UserError(f"{name} is tied to {first}: {mine} is not {variable.strategy(name, option)}")
            choice.append(option)
        return tuple(choice)


def edge_shape(producer: Layer, samples: int) -> tuple[int, int]:
    """The tensor on an edge as redistributions see it: samples by features (images: all elements of one)."""
    features = producer.features if len(producer.output_shape) <= 2 else producer.output_elements
    return (samples, features)


def edge_steps(
    producer: Layer, source: Strategy, target: Strategy, workload: Workload, samples: float
) -> tuple[Step, ...]:
    """The forward steps that bring a layer's output to where a consumer wants it; the backward pass sends as much.

    Raises:
        UserError: the tensor does not divide.
    """
    if source.rows_and_features == target.rows_and_features:
        return ()
    route = redistribute(source.activations, target.activations, edge_shape(producer, workload.micro_batch))
    return steps(route, samples * producer.output_elements * workload.itemsize)


class PriceBook:
    """Everything that a graph costs on a cluster, for every number of micro-batches.

    Args:
        graph, cluster: what to price.
        workload: its batch and micro-batch are replaced by :meth:`problem`; precision, optimizer and recomputation count.
        untied: give every repetition of a block its own choice.
        summa: offer Summa meshes to linear layers.
        like: another book of the same graph and cluster, whose prices this one may share.

    Raises:
        UserError: the device has no speed for the precision, or a layer has no strategy at all on this cluster.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        workload: Workload,
        untied: bool = False,
        summa: bool = False,
        like: PriceBook | None = None,
    ):
        if workload.precision not in cluster.device.peak_flops:
            known = ", ".join(cluster.device.peak_flops)
            raise UserError(
                f"precision {workload.precision!r} is not one that {cluster.device.name} is described for ({known})"
            )
        self.graph = graph
        self.cluster = cluster
        self.workload = workload
        self.untied = untied
        self.summa = summa
        twin = like if like and like.graph is graph and (like.untied, like.summa) == (untied, summa) else None
        self.variables: tuple[Variable, ...] = twin.variables if twin else _variables(graph, cluster, untied, summa)
        self._prices: dict[object, _Prices] = {}
        self._narrowed: dict[tuple[Offer, bytes], Offer] = twin._narrowed if twin else {}
        # What does not depend on how layers are tied, or on recomputation, is worked out once for all books of a family.
        self._moves: LayoutPrices = like._moves if like else LayoutPrices(cluster)
        self._layer_prices: dict[object, _Prices] = like._layer_prices if like else {}

    @property
    def may_shrink(self) -> bool:
        """Whether, of the redistributions priced so far, some may become cheaper with smaller micro-batches."""
        return self._moves.may_shrink

    @cached_property
    def _variable_prices(self) -> tuple[_Prices, ...]:
        return tuple(self._price(variable) for variable in self.variables)

    def _price(self, variable: Variable) -> _Prices:
        """The sum over the variable's layers; equal layers are priced once, and equal variables share their arrays."""
        counts: dict[object, int] = {}
        first: dict[object, Layer] = {}
        for name in variable.layers:
            layer = self.graph[name]
            key = (layer.signature(), not self.graph.inputs(name), name in variable.swapped)
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, layer)
        whole = (tuple(counts.items()), variable.offer)
        if whole not in self._prices:
            parts = [self._price_layer(first[key], key, variable).scaled(count) for key, count in counts.items()]
            total = parts[0]
            for part in parts[1:]:
                total = total.plus(part)
            self._prices[whole] = total
        return self._prices[whole]

    def _price_layer(self, layer: Layer, key: object, variable: Variable) -> _Prices:
        whole = (key, variable.options, replace(self.workload, batch=1, micro_batch=1))
        if whole not in self._layer_prices:
            self._layer_prices[whole] = _price_layer(self, layer, variable)
        return self._layer_prices[whole]

    def problem(
        self, batch: int, micro_batch: int, objective: Objective = "step", summa: bool | None = None
    ) -> Problem:
        """The cost table of one batch and micro-batch, with or without the book's Summa meshes (with, where it has any).

        Raises:
            UserError: the samples of a micro-batch do not divide over any strategy of some layer.
        """
        workload = replace(self.workload, batch=batch, micro_batch=micro_batch)
        num = workload.num_micro_batches
        # Equal variables share their options and arrays: a deep model is put together in no time, and searches recognise
        # what is equal by identity.
        shared: dict[object, _Column] = {}
        columns = []
        for variable, prices in zip(self.variables, self._variable_prices):
            key = (prices, variable.offer)
            if key not in shared:
                kept = self._kept(variable, micro_batch, self.summa if summa is None else summa)
                shared[key] = _Column(
                    self._narrow(variable.offer, kept),
                    prices.cost(num, batch, objective)[kept],
                    prices.memory(micro_batch)[kept],
                    prices.buffer(micro_batch)[kept],
                )
            columns.append(shared[key])
        variables = tuple(
            Variable(variable.name, variable.layers, column.offer, variable.swapped)
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

    def _kept(self, variable: Variable, micro_batch: int, summa: bool) -> np.ndarray:
        """Which options divide the samples of a micro-batch."""
        kept = np.flatnonzero((micro_batch % variable.offer.p0 == 0) & (~variable.offer.summa | summa))
        if len(kept) == 0:
            layer = self.graph[variable.layers[0]]
            raise no_strategy(
                layer, self.cluster, f"whose samples divide a micro-batch of {micro_batch} {self.graph.sample}s"
            )
        return kept

    def _narrow(self, offer: Offer, kept: np.ndarray) -> Offer:
        """Some of the options; micro-batches that keep the same ones share one object."""
        key = (offer, kept.tobytes())
        if key not in self._narrowed:
            self._narrowed[key] = Offer(tuple(offer.options[i] for i in kept))
        return self._narrowed[key]

    # ------------------------------------------------------------------------------------------------------------- edges

    @cached_property
    def _variable_edges(self) -> dict[tuple[int, int], tuple[tuple[tuple[int, int], int], ...]]:
        """For each ordered pair of variables the tensors on their edges: (features, elements per sample), and how many.

        Edges inside one variable cost nothing: both ends lie alike (a transposed strategy has the same p0).
        """
        owner = {name: i for i, variable in enumerate(self.variables) for name in variable.layers}
        edges: dict[tuple[int, int], Counter[tuple[int, int]]] = {}
        for source, target in self.graph.edges:
            if owner[source] != owner[target]:
                layer = self.graph[source]
                tensor = (edge_shape(layer, 1)[1], layer.output_elements)
                edges.setdefault((owner[source], owner[target]), Counter())[tensor] += 1
        return {pair: tuple(sorted(tensors.items())) for pair, tensors in edges.items()}

    def _edges(self, columns: Sequence[_Column], workload: Workload) -> tuple[Edge, ...]:
        known: dict[object, ByClass] = {}
        edges = []
        for (i, j), tensors in self._variable_edges.items():
            key = (tensors, columns[i], columns[j])
            if key not in known:
                (sources, rows), (targets, cols) = columns[i].offer.layouts, columns[j].offer.layouts
                between = sum(
                    count * self._moves.costs(tensor, sources, targets, workload) for tensor, count in tensors
                )
                known[key] = ByClass(np.asarray(between), rows, cols)
            edges.append(Edge(i, j, known[key]))
        return tuple(edges)


def no_strategy(layer: Layer, cluster: Cluster, why: str) -> UserError:
    """The error where a layer is left without a strategy: layer, shape and device count."""
    shape = " x ".join(map(str, cluster.level_sizes))
    devices = f"{cluster.num_devices} devices" + (f" ({shape})" if len(cluster.level_sizes) > 1 else "")
    return UserError(
        f"{layer.describe()} has no strategy on {devices} {why}; try another number of devices or another batch"
    )


# --------------------------------------------------------------------------------------------------------------- variables


def _variables(graph: LayerGraph, cluster: Cluster, untied: bool, summa: bool) -> tuple[Variable, ...]:
    """Group the layers; see the module's docstring."""
    groups: dict[object, list[str]] = {}
    key_of: dict[str, object] = {}
    for layer in graph.layers:
        tied_to = next((p.tied_to for p in layer.parameters if p.tied_to), None)
        if tied_to in key_of:
            key = key_of[tied_to]
        elif layer.block and not untied:
            key = (layer.block, layer.role, layer.signature(), not graph.inputs(layer.name))
        else:
            key = layer.name
        key_of[layer.name] = key
        groups.setdefault(key, []).append(layer.name)
    known: dict[object, Offer] = {}
    return tuple(_variable(graph, tuple(names), cluster, summa, known) for names in groups.values())


def _variable(
    graph: LayerGraph, names: tuple[str, ...], cluster: Cluster, summa: bool, known: dict[object, Offer]
) -> Variable:
    first = graph[names[0]]
    swapped = frozenset(n for n in names if (graph[n].kind == "embedding") != (first.kind == "embedding"))
    key = tuple({(graph[name].signature(), name in swapped): None for name in names})
    if key not in known:
        members = {graph[name].signature(): graph[name] for name in names}
        known[key] = Offer(_common_options(list(members.values()), swapped, cluster, summa))
    if not known[key].options:
        raise no_strategy(first, cluster, "that divides its shape")
    if len(names) == 1:
        name = names[0]
    elif first.block:
        name = f"{first.block}.*.{first.role}"
    else:
        name = " = ".join(names)
    return Variable(name, names, known[key], swapped)


def _common_options(
    members: list[Layer], swapped: frozenset[str], cluster: Cluster, summa: bool
) -> tuple[Strategy, ...]:
    options = list(enumerate_strategies(members[0], cluster.level_sizes, summa and len(members) == 1))
    for layer in members[1:]:
        offered = set(enumerate_strategies(layer, cluster.level_sizes))
        options = [s for s in options if (transposed(s) if layer.name in swapped else s) in offered]
    return tuple(options)


# ------------------------------------------------------------------------------------------------------------------ prices


@dataclass(frozen=True, eq=False)
class _Prices:
    """Affine prices of a variable's options (arrays of one entry per option)."""

    communication: Affine
    compute: Affine
    state_bytes: np.ndarray
    kept_bytes: np.ndarray
    #: One row per different layer: the largest of affine functions is not affine.
    buffer_fixed: np.ndarray
    buffer_slope: np.ndarray

    def scaled(self, count: int) -> _Prices:
        """Of ``count`` equal layers: buffers are transient, so they are not added up."""

        def times(affine: Affine) -> Affine:
            return (affine[0] * count, affine[1] * count, affine[2] * count)

        return _Prices(
            times(self.communication),
            times(self.compute),
            self.state_bytes * count,
            self.kept_bytes * count,
            self.buffer_fixed,
            self.buffer_slope,
        )

    def plus(self, other: _Prices) -> _Prices:
        """Of two layers that share the choice."""

        def both(a: Affine, b: Affine) -> Affine:
            return (a[0] + b[0], a[1] + b[1], a[2] + b[2])

        return _Prices(
            both(self.communication, other.communication),
            both(self.compute, other.compute),
            self.state_bytes + other.state_bytes,
            self.kept_bytes + other.kept_bytes,
            np.concatenate((self.buffer_fixed, other.buffer_fixed)),
            np.concatenate((self.buffer_slope, other.buffer_slope)),
        )

    def cost(self, num_micro_batches: int, batch: int, objective: Objective) -> np.ndarray:
        parts = [self.communication] if objective == "communication" else [self.communication, self.compute]
        return sum(num_micro_batches * fixed + batch * slope + once for fixed, slope, once in parts)  # type: ignore[return-value]

    def memory(self, micro_batch: int) -> np.ndarray:
        return np.ceil(self.state_bytes + micro_batch * self.kept_bytes)

    def buffer(self, micro_batch: int) -> np.ndarray:
        return np.ceil(self.buffer_fixed + micro_batch * self.buffer_slope).max(axis=0)


#: The samples that affine prices are read off at.
_TWO_POINTS = np.array([[0.0], [MANY]])


def _price_layer(book: PriceBook, layer: Layer, variable: Variable) -> _Prices:
    is_first = not book.graph.inputs(layer.name)
    strategies = [variable.strategy(layer.name, option) for option in range(len(variable.options))]
    columns = np.zeros((10, len(strategies)))
    for group in alike(strategies, book.cluster.sized_levels):
        work = layer_work(layer, group, book.cluster, book.workload, _TWO_POINTS, is_first)
        at = (2, len(group.indices))

        def affine(value: Any, at: tuple[int, int] = at) -> tuple[Any, Any]:
            fixed, many = np.broadcast_to(value, at)
            return fixed, (many - fixed) / MANY

        columns[0:2, group.indices] = affine(communication_time(book.cluster, (*work.forward, *work.backward)))
        columns[2, group.indices] = communication_time(book.cluster, work.gradient)
        columns[3:5, group.indices] = affine(work.forward_s + work.backward_s)
        columns[6, group.indices] = work.state_bytes
        columns[7, group.indices] = affine(work.kept_bytes)[1]
        columns[8:10, group.indices] = affine(work.buffer_bytes)
    return _Prices(
        communication=(columns[0], columns[1], columns[2]),
        compute=(columns[3], columns[4], columns[5]),
        state_bytes=columns[6],
        kept_bytes=columns[7],
        buffer_fixed=columns[8:9],
        buffer_slope=columns[9:10],
    )
