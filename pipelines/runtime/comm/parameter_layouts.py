"""Parameters as ranks hold them: the layout of each stored tensor, by the index sets of its layer. Needs no OneFlow.

`ParameterLayout` and the functions on it use only numbers and names, so that exported files can contain them. Functions of a
`LayerGraph` are at the end. How the features of a layer are distributed: :mod:`.layouts`.

**Product order.** If a linear layer feeds attention (or a gated epilogue), its output features are reordered in groups, one for
each key-value head (for each pair of gate and up), so that every even split holds whole groups:

    modules hold    q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3
    product order   q0 k0 v0 | q1 k1 v1 | q2 k2 v2 | q3 k3 v3
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.epilogue import GATES
from autoddl.costmodel.kinds.linear import output_width
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy, shard_axes

from .layouts import Indices, Layout, all_indices, blocks, gathered, matrix_indices, scattered, table_indices

__all__ = [
    "ParameterLayout",
    "ProductOrder",
    "are_stored_separately",
    "coarsest_mesh",
    "common_mesh",
    "expert_layouts",
    "feature_layouts",
    "linear_layouts",
    "product_order",
    "split_dims",
    "table_layouts",
    "whole_layouts",
]


@dataclass(frozen=True)
class ParameterLayout:
    """The distribution of one stored tensor over the ranks: of a parameter, or of several concatenated along their rows.

    Attributes:
        name: The parameter's path in the module. For several parameters: a path with the names of their modules joined by "+".
        sources: (path, number of rows) of each of the module's parameters in the tensor.
        shape: Shape of the logical tensor.
        axes: For each dimension, the mesh axes that split it.
        indices: For each dimension, the indices that each rank holds.
        reduced: Mesh axes over which the gradient is summed.
        zero: What the ranks along these axes divide of the tensor, 0 to 3 (:mod:`autoddl.costmodel.strategy`).
        hybrid: Whether they divide gradients and weights inside nodes only.
        is_transposed: Whether the module's parameters are the transposed parts of the tensor.
    """

    name: str
    sources: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    axes: tuple[tuple[Axis, ...], ...]
    indices: tuple[Sequence[np.ndarray], ...]
    reduced: tuple[Axis, ...]
    zero: int = 0
    hybrid: bool = False
    is_transposed: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.indices[0])

    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of each rank's part."""
        return self._local_shape

    @cached_property
    def _local_shape(self) -> tuple[int, ...]:
        return tuple(len(of_ranks[0]) for of_ranks in self.indices)

    @property
    def inner(self) -> tuple[Axis, ...]:
        """The axes along which gradients and weights are divided inside a training step, if ``zero`` is 2 or 3."""
        return shard_axes(self.reduced, self.hybrid)[0]

    @property
    def outer(self) -> tuple[Axis, ...]:
        """The other axes of ``reduced``."""
        return shard_axes(self.reduced, self.hybrid)[1]

    @property
    def shard_length(self) -> int:
        """Number of elements that each rank updates, if ``zero`` is at least 1; the last ones of a tensor may be padding."""
        return -(-prod(self.local_shape()) // prod(axis.size for axis in self.reduced))

    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of what each rank stores between training steps: its part, or its shard of the part."""
        return (self.shard_length,) if self.zero else self.local_shape()

    @property
    def stored_axes(self) -> tuple[tuple[Axis, ...], ...]:
        """For each dimension of what ranks store, the mesh axes that split it: shards of all ranks are one vector."""
        return ((Axis(self.num_ranks, 1),),) if self.zero else self.axes

    def stored(self, value: np.ndarray, rank: int) -> np.ndarray:
        """Return what ``rank`` stores of the logical ``value``."""
        own = self.take(value, rank)
        if not self.zero:
            return own
        held = own.reshape(-1)[self.shard(rank)]
        padded = np.zeros(self.shard_length, own.dtype)
        padded[: held.size] = held
        return padded

    def shard(self, rank: int) -> slice:
        """Return the elements of its part, as a vector, that ``rank`` stores: all, or those of its shard without padding."""
        size = prod(self.local_shape())
        if not self.zero:
            return slice(0, size)
        num_shards = prod(axis.size for axis in self.reduced)
        (number,) = scattered(all_indices(num_shards, self.num_ranks), self.reduced)[rank].tolist()
        return slice(min(number * self.shard_length, size), min((number + 1) * self.shard_length, size))

    def take(self, value: np.ndarray, rank: int) -> np.ndarray:
        """Return the part of the logical ``value`` that ``rank`` holds."""
        return np.ascontiguousarray(value[self._selection(rank)])

    def put(self, value: np.ndarray, shard: np.ndarray, rank: int) -> None:
        """Write the part ``shard`` that ``rank`` holds into the logical ``value``."""
        value[self._selection(rank)] = shard

    def _selection(self, rank: int) -> tuple[np.ndarray, ...]:
        """Return the index by which numpy selects a rank's part of the logical tensor."""
        return np.ix_(*(of_ranks[rank] for of_ranks in self.indices))

    def joined(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the logical value, given those of the module's parameters by name."""
        return np.concatenate([self._turned(values[name]) for name, _ in self.sources])

    def parts(self, value: np.ndarray) -> dict[str, np.ndarray]:
        """Divide the logical ``value`` into the module's parameters, by name."""
        ends = np.cumsum([rows for _, rows in self.sources])
        return {name: self._turned(value[end - rows : end]) for (name, rows), end in zip(self.sources, ends)}

    def source_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of a module's parameter of so many rows."""
        shape = (rows, *self.shape[1:])
        return shape[::-1] if self.is_transposed else shape

    def _turned(self, value: np.ndarray) -> np.ndarray:
        """Turn a part of the tensor into the module's parameter, or back."""
        return np.ascontiguousarray(value.T) if self.is_transposed else value

    def gathered(self) -> ParameterLayout:
        """Return the layout after an all-gather of every split dimension: the order in which all ranks then hold the elements."""
        whole = tuple(gathered(held, axes) for held, axes in zip(self.indices, self.axes))
        axes = ((),) * len(self.shape)
        return replace(self, axes=axes, indices=whole, zero=0, hybrid=False)


def linear_layouts(
    weights: Mapping[str, int],
    biases: Mapping[str, int],
    in_features: int,
    layout: Layout,
    sections: Sequence[int] = (),
    num_groups: int = 1,
    window: Sequence[int] = (),
    is_transposed: bool = False,
) -> tuple[ParameterLayout, ...]:
    """Return the layouts of the weights (out, in) of modules that read the same tensor, and then those of their biases.

    Each module has tensors of its own if every block holds the same share of all modules (`stores_modules_separately`). Otherwise
    the weights of all modules are stored as one tensor, and so are their biases.

    Args:
        weights: Names and numbers of rows of the weights; may be empty.
        biases: Names and numbers of rows of the biases; may be empty.
        in_features: Number of columns of the weights.
        layout: Layout of the layer.
        sections: Widths of the sections of the product order; see `product_rows`. Default: one section.
        num_groups: Number of groups of the product order.
        window: Further dimensions of the weights, which every rank holds completely: those of a convolution's kernel.
        is_transposed: Whether the modules have the weights as (in, out).
    """
    rows = list((weights or biases).values())
    matrix = matrix_indices(sum(rows), in_features, layout)
    order = product_rows(sections or [sum(rows)], num_groups)
    separate = stores_modules_separately(len(rows), num_groups, layout.num_parts)
    bias_axes: Sequence[Axis] = layout.axes(1)
    if not layout.summa:  # in the rank order of the blocks that they split, level by level
        bias_axes = sorted(layout.axes(1) + layout.axes(2), key=lambda axis: -axis.stride)
    weights_reduced = () if layout.summa else layout.axes(0)
    result = []
    # The features of the product are the rows of the weights, which have columns too, and the elements of the biases.
    for parameters, features, axes, columns, reduced in (
        (weights, matrix.rows, (matrix.row_axes, matrix.column_axes), (matrix.columns,), weights_reduced),
        (biases, matrix.output, (tuple(bias_axes),), (), layout.axes(0)),
    ):
        if not parameters:
            continue
        tensors = [(item,) for item in parameters.items()] if separate else [tuple(parameters.items())]
        start = 0
        for sources in tensors:
            num_rows = sum(rows for _, rows in sources)
            others = tuple(window) if columns else ()
            shape = (num_rows, in_features, *others) if columns else (num_rows,)
            whole = tuple(all_indices(length, layout.num_ranks) for length in others)
            indices = (_rows_between(features, order, start, start + num_rows), *columns, *whole)
            name = joined_name([name for name, _ in sources])
            is_turned = is_transposed and len(shape) == 2
            every_axes = (*axes, *((),) * len(others))
            result.append(ParameterLayout(name, sources, shape, every_axes, indices, reduced, is_transposed=is_turned))
            start += num_rows
    return _sharded(result, layout)


def _rows_between(features: Sequence[np.ndarray], order: np.ndarray, start: int, stop: int) -> Indices:
    """Return the rows from ``start`` to ``stop``, relative to ``start``, of the features that each rank holds in product order."""

    def of_rank(rank: int) -> np.ndarray:
        rows = order[features[rank]]
        return rows[(rows >= start) & (rows < stop)] - start

    return Indices(len(features), of_rank)


def table_layouts(name: str, vocabulary: int, features: int, layout: Layout) -> tuple[ParameterLayout, ...]:
    """Return the layout of the table (vocabulary, features) of an embedding."""
    table, shape = table_indices(vocabulary, features, layout), (vocabulary, features)
    axes = (table.row_axes, table.column_axes)
    whole = ParameterLayout(name, ((name, vocabulary),), shape, axes, (table.rows, table.columns), layout.axes(0))
    return _sharded([whole], layout)


def feature_layouts(shapes: Mapping[str, Sequence[int]], layout: Layout) -> tuple[ParameterLayout, ...]:
    """Return layouts of parameters whose last dimension is the features of activations: those of norms, and position tables."""
    result = []
    for name, shape in shapes.items():
        others = tuple(all_indices(length, layout.num_ranks) for length in shape[:-1])
        indices = (*others, layout.blocks(shape[-1]))
        axes = (*(() for _ in others), layout.axes(1))
        result.append(ParameterLayout(name, ((name, shape[0]),), tuple(shape), axes, indices, layout.axes(0)))
    return _sharded(result, layout)


def expert_layouts(
    shapes: Mapping[str, Sequence[int]], inner: Mapping[str, int], layout: Layout
) -> tuple[ParameterLayout, ...]:
    """Return layouts of the matrices of experts, (experts, rows, columns).

    Args:
        shapes: Shape of each parameter, by name.
        inner: The dimension of each parameter that p1 splits: the features inside the experts.
        layout: Layout of the layer.
    """
    result = []
    for name, shape in shapes.items():
        axes = [layout.expert_axes, *(layout.axes(1) if dim == inner[name] else () for dim in range(1, len(shape)))]
        indices = tuple(blocks(of_dim, length, layout.num_ranks) for of_dim, length in zip(axes, shape))
        result.append(ParameterLayout(name, ((name, shape[0]),), tuple(shape), tuple(axes), indices, layout.copies))
    return _sharded(result, layout)


def whole_layouts(shapes: Mapping[str, Sequence[int]], layout: Layout) -> tuple[ParameterLayout, ...]:
    """Return layouts of parameters that every rank holds completely: those of convolutions and of opaque modules."""
    result = []
    for name, shape in shapes.items():
        indices = tuple(all_indices(length, layout.num_ranks) for length in shape)
        axes = ((),) * len(shape)
        result.append(ParameterLayout(name, ((name, shape[0]),), tuple(shape), axes, indices, layout.axes(0)))
    return _sharded(result, layout)


def _sharded(layouts: Sequence[ParameterLayout], layout: Layout) -> tuple[ParameterLayout, ...]:
    """Return the layouts with the sharding of their layer; vectors are never divided inside a training step."""
    return tuple(
        replace(each, zero=min(layout.zero, 3 if len(each.shape) > 1 else 2), hybrid=layout.hybrid)
        if each.reduced and layout.zero
        else each
        for each in layouts
    )


def stores_modules_separately(num_modules: int, num_groups: int, num_parts: int) -> bool:
    """Return whether the modules of a linear layer (q, k and v, for example) have tensors of their own.

    They do if every block of features holds the same share of each module. Otherwise (with four heads on eight ranks, for example)
    they are stored as one tensor, as in Megatron-LM, and separated in the ``state_dict``.

    Args:
        num_modules: Number of modules.
        num_groups: Number of groups of the product order.
        num_parts: Number of blocks that the features are split into.
    """
    return num_modules > 1 and num_groups > 1 and num_groups % num_parts == 0


def joined_name(names: Sequence[str]) -> str:
    """Return the name of a tensor that holds several parameters.

    >>> joined_name(["a.q.weight", "a.k.weight"])
    'a.q+k.weight'
    """
    if len(names) == 1:
        return names[0]
    modules = [name.rpartition(".")[0] for name in names]
    parents = {module.rpartition(".")[0] for module in modules}
    own = "+".join(module.rpartition(".")[2] for module in modules)
    parent = f"{parents.pop()}." if len(parents) == 1 else ""
    return f"{parent}{own}.{names[0].rpartition('.')[2]}".lstrip(".")


# ---- Meshes of parameters --------------------------------------------------------------------------------------------------


def common_mesh(strategies: Iterable[Strategy], num_ranks: int) -> tuple[Axis, ...] | None:
    """Return the coarsest mesh from which all axes of all strategies can be composed, outermost axis first; None if there is none.

    Parameters on one mesh can be used together, for example by ``clip_grad_norm_``.
    """
    axes = [
        axis
        for strategy in set(strategies)
        for is_embedding in (False, True)
        for which in range(3)
        for axis in (*strategy.axes(which, is_embedding), *strategy.expert_axes())
    ]
    return coarsest_mesh(axes, num_ranks)


def coarsest_mesh(axes: Iterable[Axis], num_ranks: int) -> tuple[Axis, ...] | None:
    """Return the coarsest mesh of all ranks from which the axes can be composed, outermost axis first; None if there is none.

    >>> [axis.size for axis in coarsest_mesh([Axis(4, 1), Axis(2, 2)], 8)]
    [2, 2, 2]
    """
    cuts = sorted({1, num_ranks} | {cut for axis in axes for cut in (axis.stride, axis.stride * axis.size)})
    if any(larger % smaller for smaller, larger in zip(cuts, cuts[1:])):
        return None
    return tuple(Axis(end // stride, stride) for stride, end in reversed(list(zip(cuts, cuts[1:]))))


def split_dims(axes: Sequence[Sequence[Axis]], mesh: Sequence[Axis]) -> list[int | None]:
    """Return the dimension that each mesh axis splits, or None, for a tensor whose dimensions are split by ``axes``."""
    states: list[int | None] = []
    for part in mesh:
        dims = [
            dim
            for dim, splitting in enumerate(axes)
            for axis in splitting
            if axis.stride <= part.stride < axis.stride * axis.size
        ]
        states.append(dims[0] if dims else None)
    return states


# ---- Product order ---------------------------------------------------------------------------------------------------------


def product_rows(sections: Sequence[int], num_groups: int) -> np.ndarray:
    """Return, for each feature in product order, its row in the concatenated sections (see the module's docstring).

    >>> product_rows((4, 2, 2), num_groups=2).tolist()
    [0, 1, 4, 6, 2, 3, 5, 7]
    """
    starts = np.cumsum((0, *sections[:-1]))
    parts = [start + np.arange(width).reshape(num_groups, -1) for start, width in zip(starts, sections)]
    return np.concatenate(parts, axis=1).reshape(-1)


@dataclass(frozen=True)
class ProductOrder:
    """The order of a linear layer's output features (see the module's docstring).

    Attributes:
        widths: Number of features of each module of the layer.
        num_groups: Number of groups; 1 if the features are in the order of the modules.
        section_widths: Number of features of each section that is interleaved with the others (q, k and v, for example).  A layer
            without groups has one section; one group has as many as several groups have.
    """

    widths: tuple[int, ...]
    num_groups: int
    section_widths: tuple[int, ...]

    @property
    def rows(self) -> np.ndarray:
        """For each output feature, its row in the modules' concatenated weights."""
        return product_rows(self.section_widths, self.num_groups)


def product_order(graph: LayerGraph, layer: Layer) -> ProductOrder:
    """Return the order of a linear layer's output features (see the module's docstring).

    Raises:
        UserError: The layer's modules are not the sections of the attention or gate that reads them.
    """
    out_features = layer.attributes["out_features"]
    widths = tuple(output_width(layer, p) for p in layer.parameters if len(p.shape) == 2)
    if sum(widths) != out_features:
        raise UserError(f"{layer.describe()}: its weights have {sum(widths)} rows, should have {out_features}")
    num_groups = 1
    sections: tuple[int, ...] = (out_features,)
    readers = [graph[target] for source, target in graph.edges if source == layer.name]
    groups = [(reader, kind_of(reader.kind).input_groups(reader)) for reader in readers]
    grouped = [(reader, found) for reader, found in groups if found is not None]
    if GATES & set(layer.epilogue):
        num_groups, sections = out_features // 2, (out_features // 2,) * 2
    elif grouped and len(graph.inputs(grouped[0][0].name)) == 1:
        if len(readers) > 1:
            raise UserError(f"{layer.describe()}: {grouped[0][0].kind} and {len(readers) - 1} other layers read it")
        if not grouped[0][0].attributes.get("interleaved"):  # otherwise the weight has the order of groups
            num_groups, sections = grouped[0][1]
    if sum(sections) != out_features or (len(widths) > 1 and num_groups > 1 and widths != sections):
        raise UserError(f"{layer.describe()}: its modules are {widths} wide, should be {sections}")
    return ProductOrder(widths, num_groups, sections)


def are_stored_separately(order: ProductOrder, strategy: Strategy) -> bool:
    """Return `stores_modules_separately` for a linear layer under its strategy."""
    return stores_modules_separately(len(order.widths), order.num_groups, strategy.p1 * strategy.p2)
