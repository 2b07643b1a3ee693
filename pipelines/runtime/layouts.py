"""Which logical elements of a layer's parameters and activations each rank holds: plain index sets, free of OneFlow.

`Layout` and the functions of it know numbers and names alone, so that exported files have them; those of a `LayerGraph` are below.

Between layers a rank's features are one block of the canonical layout (:func:`autoddl.costmodel.distribution.canonical`).  What a
layer reads and makes inside follows from running its own steps on index sets in place of tensors:

=====================  ====================================================  ===========================================
of a linear layer      is                                                    so that
=====================  ====================================================  ===========================================
input features         the blocks that the all-gather over p1 brings         W's columns are in the order of the input
output features        the blocks that a gather over p2 would bring, since   rank k of the reduce-scatter over p2 is left
                       reduce-scatter is its adjoint                         with its own block
bias                   this rank's block                                     it is added to the evenly split output
=====================  ====================================================  ===========================================

So weights are kept in blocks, permuted; activations are never permuted, and no bytes are sent for it.  An embedding's table is
the transposed matrix of a linear layer: its vocabulary runs over p1, its features over p2.  Summa cuts the gathered input's
features once more, over p0, the way a reduce-scatter would.

**Product order.**  Where a linear layer feeds attention (or a gated epilogue), its features come in groups, one per key-value
head (per pair of gate and up), so that every even split holds whole groups:

    modules hold    q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3
    product order   q0 k0 v0 | q1 k1 v1 | q2 k2 v2 | q3 k3 v3
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis, canonical_axes
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.kind import Splitting
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy, mesh_axes

__all__ = [
    "Layout",
    "ParameterLayout",
    "ProductOrder",
    "are_apart",
    "attention_sections",
    "blocks",
    "common_mesh",
    "feature_layouts",
    "gathered",
    "layout_of",
    "linear_layouts",
    "mesh_between",
    "parameter_layouts",
    "product_order",
    "scattered",
    "split_dims",
    "table_layouts",
    "weight_indices",
    "whole_layouts",
]


class Indices(Sequence[np.ndarray]):
    """For every rank the indices, along one dimension, of what it holds, in the order in which it holds them.

    They are worked out when they are asked for: a rank of thousands wants few of them.
    """

    def __init__(self, num_ranks: int, of_rank: Callable[[int], np.ndarray]):
        self._num_ranks = num_ranks
        self._of_rank = of_rank

    def __len__(self) -> int:
        return self._num_ranks

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < self._num_ranks:
            raise IndexError(rank)
        return self._of_rank(rank)


@dataclass(frozen=True, init=False)
class Layout:
    """How a layer lies on the ranks: its strategy in plain numbers, ``Layout((2, 1, 1), (1, 4, 2))``.

    Attributes:
        splits: (p0, p1, p2) for each network level, outermost first.
        embedding: whether the axes of a level stand in the order p0, p2, p1 (else p0, p1, p2), the last one innermost.
        summa: whether the features of the input are cut over p0 too, and gathered where they are needed.
    """

    splits: tuple[tuple[int, int, int], ...]
    embedding: bool
    summa: bool

    def __init__(self, *splits: tuple[int, int, int], embedding: bool = False, summa: bool = False):
        for name, value in (("splits", splits), ("embedding", embedding), ("summa", summa)):
            object.__setattr__(self, name, value)

    def axes(self, which: int) -> tuple[Axis, ...]:
        """The mesh axes of p0 (0), p1 (1) or p2 (2), one per level where it is longer than 1, outermost first."""
        return mesh_axes(self.splits, self.embedding)[which]

    @cached_property
    def features(self) -> tuple[Axis, ...]:
        """The axes that cut features between layers; samples are cut by those of p0."""
        levels = tuple((p0, p1 * p2) for p0, p1, p2 in self.splits)
        return tuple(axis for axis, of_features in canonical_axes(levels) if of_features)

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return prod(map(prod, self.splits))

    @property
    def num_parts(self) -> int:
        """Into how many blocks features are cut."""
        return prod(axis.size for axis in self.features)

    def blocks(self, length: int) -> Indices:
        """The block of ``length`` features that each rank holds between layers."""
        return blocks(self.features, length, self.num_ranks)

    def samples(self, array: np.ndarray, rank: int) -> np.ndarray:
        """A rank's samples of an array of all of them."""
        parts = prod(axis.size for axis in self.axes(0))
        if len(array) % parts:
            raise UserError(f"{len(array)} samples do not divide over {parts} ranks")
        width = len(array) // parts
        start = place_on(self.axes(0), rank) * width
        return array[start : start + width]


def place_on(axes: Sequence[Axis], rank: int) -> int:
    """Which of the slices that axes cut is the rank's: its coordinates as the digits of a number."""
    number = 0
    for axis in axes:
        number = number * axis.size + axis.coordinate(rank)
    return number


def blocks(axes: Sequence[Axis], length: int, num_ranks: int) -> Indices:
    """The block of ``length`` indices that each rank holds where ``axes`` cut them."""
    parts = prod(axis.size for axis in axes)
    if length % parts:
        raise UserError(f"length {length} does not divide into {parts} slices")
    width = length // parts
    return Indices(num_ranks, lambda rank: np.arange(width) + place_on(axes, rank) * width)


def group(axis: Axis, rank: int) -> tuple[int, ...]:
    """The ranks that differ from ``rank`` on ``axis`` alone, ascending."""
    first = rank - axis.coordinate(rank) * axis.stride
    return tuple(first + k * axis.stride for k in range(axis.size))


def gathered(held: Sequence[np.ndarray], axes: Sequence[Axis]) -> Sequence[np.ndarray]:
    """What ranks hold after all-gathers over the axes, the outermost first."""
    for axis in axes:
        held = _joined(held, axis)
    return held


def _joined(held: Sequence[np.ndarray], axis: Axis) -> Indices:
    return Indices(len(held), lambda rank: np.concatenate([held[other] for other in group(axis, rank)]))


def scattered(held: Sequence[np.ndarray], axes: Sequence[Axis]) -> Sequence[np.ndarray]:
    """The inverse of :func:`gathered`: what reduce-scatters leave to each rank."""
    for axis in reversed(axes):
        held = _parted(held, axis)
    return held


def _parted(held: Sequence[np.ndarray], axis: Axis) -> Indices:
    return Indices(len(held), lambda rank: np.split(held[rank], axis.size)[axis.coordinate(rank)])


# ---- Weights ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightIndices:
    """What each rank holds of a linear layer or an embedding: rows and columns of its weight with the axes that cut them, and
    the block of its (canonical) output."""

    rows: Sequence[np.ndarray]
    row_axes: tuple[Axis, ...]
    columns: Sequence[np.ndarray]
    column_axes: tuple[Axis, ...]
    output: Sequence[np.ndarray]


def matrix_indices(out_features: int, in_features: int, layout: Layout) -> WeightIndices:
    """Of the weight (out_features, in_features) of a linear layer, before any product order."""
    output = layout.blocks(out_features)
    columns = gathered(layout.blocks(in_features), layout.axes(1))
    if layout.summa:
        return WeightIndices(output, layout.axes(1), scattered(columns, layout.axes(0)), layout.axes(0), output)
    return WeightIndices(gathered(output, layout.axes(2)), layout.axes(1), columns, layout.axes(2), output)


def table_indices(vocabulary: int, features: int, layout: Layout) -> WeightIndices:
    """Of the table (vocabulary, features) of an embedding: like a linear layer's transposed weight."""
    output = layout.blocks(features)
    columns = gathered(output, layout.axes(2))
    return WeightIndices(table_rows(vocabulary, layout), layout.axes(2), columns, layout.axes(1), output)


def table_rows(vocabulary: int, layout: Layout) -> Sequence[np.ndarray]:
    """The rows of an embedding's table that each rank holds."""
    if vocabulary % layout.num_parts == 0:
        return gathered(layout.blocks(vocabulary), layout.axes(1))
    # Too few for the blocks of an output projection: slices in rank order.
    return scattered(everything(vocabulary, layout.num_ranks), layout.axes(2))


def everything(length: int, num_ranks: int) -> Indices:
    """All indices, on every rank."""
    return Indices(num_ranks, lambda rank: np.arange(length))


def product_rows(sections: Sequence[int], num_groups: int) -> np.ndarray:
    """For each feature in product order its row in the sections, one below the other (see the module's docstring)."""
    starts = np.cumsum((0, *sections[:-1]))
    parts = [start + np.arange(width).reshape(num_groups, -1) for start, width in zip(starts, sections)]
    return np.concatenate(parts, axis=1).reshape(-1)


# ---- Parameters ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterLayout:
    """How one stored tensor lies on the ranks.

    Attributes:
        name: under which it is stored: the parameter's path in the module; of several that are stored as one, joined by "+".
        sources: (path, rows) of the module's parameters that it holds, one below the other.
        shape: of the logical tensor.
        axes: for each dimension the mesh axes that cut it.
        indices: for each dimension what every rank holds.
        reduced: the mesh axes over which its gradient is summed.
    """

    name: str
    sources: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    axes: tuple[tuple[Axis, ...], ...]
    indices: tuple[Sequence[np.ndarray], ...]
    reduced: tuple[Axis, ...]

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return len(self.indices[0])

    def local_shape(self) -> tuple[int, ...]:
        """Of what each rank holds."""
        return self._local_shape

    @cached_property
    def _local_shape(self) -> tuple[int, ...]:
        return tuple(len(held[0]) for held in self.indices)

    def take(self, value: np.ndarray, rank: int) -> np.ndarray:
        """What ``rank`` holds of the logical ``value``."""
        return np.ascontiguousarray(value[np.ix_(*(held[rank] for held in self.indices))])

    def put(self, value: np.ndarray, shard: np.ndarray, rank: int) -> None:
        """Write what ``rank`` holds into the logical ``value``."""
        value[np.ix_(*(held[rank] for held in self.indices))] = shard

    def gathered(self) -> ParameterLayout:
        """The layout after every cut dimension was gathered over its axes: the order in which all ranks then hold it."""
        whole = tuple(gathered(held, axes) for held, axes in zip(self.indices, self.axes))
        return ParameterLayout(self.name, self.sources, self.shape, ((),) * len(self.shape), whole, self.reduced)


def linear_layouts(
    weights: Mapping[str, int],
    biases: Mapping[str, int],
    in_features: int,
    layout: Layout,
    sections: Sequence[int] = (),
    num_groups: int = 1,
) -> tuple[ParameterLayout, ...]:
    """The weights (out, in) of modules that read the same tensor, then their biases.

    Several modules keep tensors of their own where every block holds whole groups; else they are stored as one.

    Args:
        weights, biases: the parameters' names with their rows; either may be empty.
        sections, num_groups: of product order, see `product_rows`.
    """
    rows = list((weights or biases).values())
    held = matrix_indices(sum(rows), in_features, layout)
    order = product_rows(sections or [sum(rows)], num_groups)
    apart = modules_apart(len(rows), num_groups, layout.num_parts)
    bias_axes: Sequence[Axis] = layout.axes(1)
    if not layout.summa:  # in rank order of the blocks that they cut, level by level
        bias_axes = sorted(layout.axes(1) + layout.axes(2), key=lambda axis: -axis.stride)
    of_weights = () if layout.summa else layout.axes(0)
    result = []
    for parameters, own, axes, columns, reduced in (
        (weights, held.rows, (held.row_axes, held.column_axes), (held.columns,), of_weights),
        (biases, held.output, (tuple(bias_axes),), (), layout.axes(0)),
    ):
        parts = [(item,) for item in parameters.items()] if apart else [tuple(parameters.items())]
        start = 0
        for sources in parts if parameters else ():
            count = sum(rows for _, rows in sources)
            shape = (count, *([in_features] if columns else []))
            indices = (_rows_between(own, order, start, start + count), *columns)
            name = joined_name([name for name, _ in sources])
            result.append(ParameterLayout(name, sources, shape, axes, indices, reduced))
            start += count
    return tuple(result)


def _rows_between(held: Sequence[np.ndarray], order: np.ndarray, start: int, stop: int) -> Indices:
    """Of the features that ranks hold, in product order, the rows from ``start`` to ``stop``, counted from there."""

    def of_rank(rank: int) -> np.ndarray:
        rows = order[held[rank]]
        return rows[(rows >= start) & (rows < stop)] - start

    return Indices(len(held), of_rank)


def table_layouts(name: str, vocabulary: int, features: int, layout: Layout) -> tuple[ParameterLayout, ...]:
    """The table (vocabulary, features) of an embedding."""
    held, shape = table_indices(vocabulary, features, layout), (vocabulary, features)
    axes = (held.row_axes, held.column_axes)
    return (ParameterLayout(name, ((name, vocabulary),), shape, axes, (held.rows, held.columns), layout.axes(0)),)


def feature_layouts(shapes: Mapping[str, Sequence[int]], layout: Layout) -> tuple[ParameterLayout, ...]:
    """Parameters whose last dimension is the features of the activations: those of norms, tables of positions."""
    result = []
    for name, shape in shapes.items():
        others = tuple(everything(length, layout.num_ranks) for length in shape[:-1])
        indices = (*others, layout.blocks(shape[-1]))
        axes = (*(() for _ in others), layout.axes(1))
        result.append(ParameterLayout(name, ((name, shape[0]),), tuple(shape), axes, indices, layout.axes(0)))
    return tuple(result)


def whole_layouts(shapes: Mapping[str, Sequence[int]], layout: Layout) -> tuple[ParameterLayout, ...]:
    """Parameters that every rank has whole: those of convolutions, and of modules that are run as they are."""
    result = []
    for name, shape in shapes.items():
        indices = tuple(everything(length, layout.num_ranks) for length in shape)
        axes = ((),) * len(shape)
        result.append(ParameterLayout(name, ((name, shape[0]),), tuple(shape), axes, indices, layout.axes(0)))
    return tuple(result)


def modules_apart(num_modules: int, num_groups: int, num_parts: int) -> bool:
    """Whether the modules of a linear layer keep tensors of their own: every block holds as much of each of them.

    Else (four heads on eight ranks, say) they are stored as one, as Megatron does, and part in the ``state_dict``.
    """
    return num_modules > 1 and num_groups > 1 and num_groups % num_parts == 0


def joined_name(names: Sequence[str]) -> str:
    """["a.q.weight", "a.k.weight"] -> "a.q+k.weight"."""
    if len(names) == 1:
        return names[0]
    modules = [name.rpartition(".")[0] for name in names]
    parents = {module.rpartition(".")[0] for module in modules}
    own = "+".join(module.rpartition(".")[2] for module in modules)
    parent = f"{parents.pop()}." if len(parents) == 1 else ""
    return f"{parent}{own}.{names[0].rpartition('.')[2]}".lstrip(".")


# ---- Meshes of parameters --------------------------------------------------------------------------------------------------


def common_mesh(strategies: Iterable[Strategy], num_ranks: int) -> tuple[Axis, ...] | None:
    """The mesh, outermost axis first, that all axes of all strategies can be put together from; None where there is none.

    On one mesh parameters can be used together, as ``clip_grad_norm_`` does.
    """
    axes = [
        axis
        for strategy in set(strategies)
        for is_embedding in (False, True)
        for which in range(3)
        for axis in strategy.axes(which, is_embedding)
    ]
    return mesh_between(axes, num_ranks)


def mesh_between(axes: Iterable[Axis], num_ranks: int) -> tuple[Axis, ...] | None:
    """The coarsest mesh of all ranks that these axes can be put together from; None where there is none."""
    cuts = sorted({1, num_ranks} | {cut for axis in axes for cut in (axis.stride, axis.stride * axis.size)})
    if any(larger % smaller for smaller, larger in zip(cuts, cuts[1:])):
        return None
    return tuple(Axis(end // stride, stride) for stride, end in reversed(list(zip(cuts, cuts[1:]))))


def split_dims(axes: Sequence[Sequence[Axis]], mesh: Sequence[Axis]) -> list[int | None]:
    """The SBP signature on a mesh of a tensor whose dimensions ``axes`` cut: which dimension each mesh axis splits, or None."""
    states: list[int | None] = []
    for part in mesh:
        dims = [dim for dim, cut in enumerate(axes) for a in cut if a.stride <= part.stride < a.stride * a.size]
        states.append(dims[0] if dims else None)
    return states


# ---- Of a layer graph ------------------------------------------------------------------------------------------------------


def layout_of(layer: Layer, strategy: Strategy) -> Layout:
    """A layer at its strategy."""
    return Layout(*strategy.splits, embedding=kind_of(layer.kind).is_lookup, summa=strategy.summa)


@dataclass(frozen=True)
class ProductOrder:
    """Where the features of a product come from.

    Attributes:
        widths: features of each module that the layer stands for.
        num_groups: groups in product order; 1 where features are as the modules have them.
        section_widths: of the sections that a group takes its members from (q, k and v, say); their sum is all features.
    """

    widths: tuple[int, ...]
    num_groups: int
    section_widths: tuple[int, ...]

    @property
    def rows(self) -> np.ndarray:
        """For each feature of the product its row in the modules' weights, one below the other."""
        return product_rows(self.section_widths, self.num_groups)

    @property
    def group_width(self) -> int:
        """Features of a group."""
        return sum(self.section_widths) // self.num_groups


def product_order(graph: LayerGraph, layer: Layer) -> ProductOrder:
    """The order of a linear layer's features (see the module's docstring).

    Raises:
        UserError: its modules are not what attention, or its gate, take apart.
    """
    out_features = layer.attributes["out_features"]
    widths = tuple(p.shape[0] for p in layer.parameters if len(p.shape) == 2)
    if sum(widths) != out_features:
        raise UserError(f"{layer.describe()}: its weights have {sum(widths)} rows, should have {out_features}")
    num_groups = 1
    sections: tuple[int, ...] = (out_features,)
    readers = [graph[target] for source, target in graph.edges if source == layer.name]
    heads = [reader for reader in readers if reader.kind == "attention"]
    if "mul" in layer.epilogue:
        num_groups, sections = out_features // 2, (out_features // 2,) * 2
    elif heads and len(graph.inputs(heads[0].name)) == 1:
        if len(readers) > 1:
            raise UserError(f"{layer.describe()}: attention and {len(readers) - 1} other layers read it")
        num_groups, sections = attention_sections(heads[0])
    if sum(sections) != out_features or (len(widths) > 1 and num_groups > 1 and widths != sections):
        raise UserError(f"{layer.describe()}: its modules are {widths} wide, should be {sections}")
    return ProductOrder(widths, num_groups, sections)


def attention_sections(layer: Layer) -> tuple[int, tuple[int, int, int]]:
    """Groups (key-value heads) of an attention layer, and the features of all of q, k and v."""
    attributes = layer.attributes
    keys = attributes["kv_heads"] * attributes["head_dim"]
    return attributes["kv_heads"], (attributes["heads"] * attributes["head_dim"], keys, keys)


def are_apart(order: ProductOrder, strategy: Strategy) -> bool:
    """`modules_apart` of a linear layer."""
    return modules_apart(len(order.widths), order.num_groups, strategy.p1 * strategy.p2)


def weight_indices(layer: Layer, strategy: Strategy) -> WeightIndices:
    """Rows (out_features, vocabulary) and columns (in_features, features) before any product order."""
    layout, attributes = layout_of(layer, strategy), layer.attributes
    if layer.kind == "embedding":
        return table_indices(attributes["vocabulary"], attributes["features"], layout)
    return matrix_indices(attributes["out_features"], attributes["in_features"], layout)


def parameter_layouts(graph: LayerGraph, layer: Layer, strategy: Strategy) -> tuple[ParameterLayout, ...]:
    """The layouts of a layer's parameters, in the order of the layer; tied ones as if they were its own."""
    layout, attributes = layout_of(layer, strategy), layer.attributes
    if not layer.parameters:
        return ()
    if layer.kind == "linear":
        order = product_order(graph, layer)
        weights = {p.name: p.shape[0] for p in layer.parameters if len(p.shape) == 2}
        biases = {p.name: p.shape[0] for p in layer.parameters if len(p.shape) == 1}
        if biases and len(biases) != len(weights):
            raise UserError(f"{layer.describe()}: some of its modules have a bias and some do not; all or none should")
        sections, num_groups = order.section_widths, order.num_groups
        return linear_layouts(weights, biases, attributes["in_features"], layout, sections, num_groups)
    if layer.kind == "embedding":
        (table,) = layer.parameters
        return table_layouts(table.name, attributes["vocabulary"], attributes["features"], layout)
    shapes = {parameter.name: parameter.shape for parameter in layer.parameters}
    is_whole = kind_of(layer.kind).splitting is Splitting.SAMPLES
    return whole_layouts(shapes, layout) if is_whole else feature_layouts(shapes, layout)
