"""Index sets of the logical elements of parameters and activations that each rank holds. Needs no OneFlow.

`Layout` and the functions on it use only numbers and names, so that exported files can contain them. Functions of a `LayerGraph`
are at the end.

Between layers, each rank holds one block of the features, in the canonical layout
(:func:`autoddl.costmodel.distribution.canonical`). Inside a layer, the indices follow from running the layer's steps on index sets
instead of tensors:

=====================  ====================================================  ===========================================
of a linear layer      each rank holds                                       so that
=====================  ====================================================  ===========================================
input features         the blocks that the all-gather over p1 returns        W's columns are in the order of the input
output features        the blocks that a gather over p2 would return, since  rank k of the reduce-scatter over p2 ends up
                       reduce-scatter is its adjoint                         with its own block
bias                   this rank's block                                     it is added to the evenly split output
=====================  ====================================================  ===========================================

So weights are stored in permuted blocks. Activations are never permuted, since that would send bytes. The table of an embedding is
laid out as the transposed weight of a linear layer: its vocabulary is split over p1, its features over p2. SUMMA splits the
features of the gathered input once more, over p0, as a reduce-scatter would.

**Product order.** If a linear layer feeds attention (or a gated epilogue), its output features are reordered in groups, one for
each key-value head (for each pair of gate and up), so that every even split holds whole groups:

    modules hold    q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3
    product order   q0 k0 v0 | q1 k1 v1 | q2 k2 v2 | q3 k3 v3
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis, canonical_axes, flat_coordinate
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.epilogue import GATES
from autoddl.costmodel.kinds.linear import output_width
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy, copy_axes, expert_axes, layout_levels, mesh_axes, shard_axes

__all__ = [
    "Layout",
    "ParameterLayout",
    "ProductOrder",
    "are_stored_separately",
    "blocks",
    "coarsest_mesh",
    "common_mesh",
    "expert_layouts",
    "feature_layouts",
    "gathered",
    "layout_of",
    "linear_layouts",
    "matrix_indices",
    "mirrored_order",
    "product_order",
    "scattered",
    "split_dims",
    "table_indices",
    "table_layouts",
    "whole_layouts",
]


class Indices(Sequence[np.ndarray]):
    """For every rank, the indices along one dimension that it holds, in the order in which it holds them.

    The indices are computed on demand, since a rank of thousands needs those of few others.

    Args:
        num_ranks: Number of ranks.
        of_rank: Returns the indices of a rank.
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
    """The distribution of a layer over the ranks: its strategy in plain numbers, ``Layout((2, 1, 1), (1, 4, 2))``.

    >>> layout = Layout((2, 1, 2))
    >>> layout.num_ranks, layout.num_parts, [block.tolist() for block in layout.blocks(4)]
    (4, 2, [[0, 1], [2, 3], [0, 1], [2, 3]])

    Attributes:
        splits: (p0, p1, p2) for each network level, outermost level first.
        embedding: Whether the axes of a level are in the order p0, p2, p1 instead of p0, p1, p2, with the last one innermost.
        summa: Whether the features of the input are also split over p0, and gathered when they are needed (SUMMA).
        zero: What the ranks along p0 divide of the parameters, 0 to 3 (:mod:`autoddl.costmodel.strategy`).
        hybrid: Whether they divide gradients and weights inside nodes only.
        experts: For each level, the part of p0 that experts are divided over; empty if they are not divided.
        columns: For each level, the part of p0 that cuts columns of images; empty if none are cut.
    """

    splits: tuple[tuple[int, int, int], ...]
    embedding: bool
    summa: bool
    zero: int
    hybrid: bool
    experts: tuple[int, ...]
    columns: tuple[int, ...]

    def __init__(
        self,
        *splits: tuple[int, int, int],
        embedding: bool = False,
        summa: bool = False,
        zero: int = 0,
        hybrid: bool = False,
        experts: tuple[int, ...] = (),
        columns: tuple[int, ...] = (),
    ):
        for name, value in (
            ("splits", splits),
            ("embedding", embedding),
            ("summa", summa),
            ("zero", zero),
            ("hybrid", hybrid),
            ("experts", experts),
            ("columns", columns),
        ):
            object.__setattr__(self, name, value)

    def axes(self, which: int) -> tuple[Axis, ...]:
        """Return the mesh axes of p0 (0), p1 (1) or p2 (2): one for each level in which it exceeds 1, outermost first."""
        return mesh_axes(self.splits, self.embedding)[which]

    @property
    def expert_axes(self) -> tuple[Axis, ...]:
        """The parts of the axes of p0 that experts are divided over, outermost first."""
        return expert_axes(self.axes(0), self.experts)

    @property
    def copies(self) -> tuple[Axis, ...]:
        """The axes of p0 whose ranks hold the same part of the parameters, outermost first."""
        return copy_axes(self.axes(0), self.experts)

    @cached_property
    def features(self) -> tuple[Axis, ...]:
        """The axes that split the features between layers. (The axes of p0 split the samples.)"""
        return self.tile_cuts[1]

    @property
    def cuts(self) -> tuple[tuple[Axis, ...], ...]:
        """(axes that split the samples, axes that split the features) between layers."""
        return self.axes(0), self.features

    @property
    def tile_cuts(self) -> tuple[tuple[Axis, ...], ...]:
        """(axes that split samples and rows, axes that split channels, axes that split columns) of images between layers."""
        cut = canonical_axes(layout_levels(self.splits, self.columns))
        return tuple(tuple(axis for axis, dim in cut if dim == which) for which in range(3))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return prod(map(prod, self.splits))

    @property
    def num_parts(self) -> int:
        """Number of blocks that features are split into."""
        return prod(axis.size for axis in self.features)

    def blocks(self, length: int) -> Indices:
        """Return the block of ``length`` features that each rank holds between layers."""
        return blocks(self.features, length, self.num_ranks)

    def part_of_rows(self, array: np.ndarray, rank: int, rows: int, is_mirrored: bool = False) -> np.ndarray:
        """Return a rank's part of an array (samples, ...) with ``rows`` rows per sample: (samples, rows, elements of a row).

        Ranks that share the positions of a sample have some of its rows.

        Args:
            array: Samples of all ranks.
            rank: The rank.
            rows: Rows per sample.
            is_mirrored: Whether the rows between layers are in mirrored order.

        Raises:
            UserError: p0 divides neither the samples nor, if they divide p0, their rows.
        """
        parts, samples = prod(axis.size for axis in self.axes(0)), len(array)
        sharing = max(parts // samples, 1) if samples else 0
        if samples % parts and (sharing * samples != parts or rows % sharing):
            raise UserError(f"{samples} samples do not divide over {parts} ranks")
        by_row = array.reshape(samples * rows, -1)
        width = len(by_row) // parts
        start = flat_coordinate(self.axes(0), rank) * width
        if is_mirrored:
            own = np.arange(start, start + width)
            part = by_row[own - own % rows + mirrored_order(rows)[own % rows]]
        else:
            part = by_row[start : start + width]
        return part.reshape(-1, min(rows, width), by_row.shape[1])


def mirrored_order(length: int) -> np.ndarray:
    """Return the positions of a sample in mirrored order (:mod:`autoddl.costmodel.kinds.attention`).

    >>> mirrored_order(6).tolist()
    [0, 5, 1, 4, 2, 3]
    """
    early = np.arange(length // 2)
    return np.stack([early, length - 1 - early], axis=1).reshape(-1)


def blocks(axes: Sequence[Axis], length: int, num_ranks: int) -> Indices:
    """Return the block of ``length`` indices that each rank holds if ``axes`` split them.

    Raises:
        UserError: The axes do not divide ``length``.
    """
    parts = prod(axis.size for axis in axes)
    if length % parts:
        raise UserError(f"length {length} does not divide into {parts} slices")
    width = length // parts
    return Indices(num_ranks, lambda rank: np.arange(width) + flat_coordinate(axes, rank) * width)


def group(axis: Axis, rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` only in their coordinate on ``axis``, in ascending order."""
    first = rank - axis.coordinate(rank) * axis.stride
    return tuple(first + k * axis.stride for k in range(axis.size))


def gathered(held: Sequence[np.ndarray], axes: Sequence[Axis]) -> Sequence[np.ndarray]:
    """Return the indices that ranks hold after all-gathers over the axes, the outermost axis first."""
    for axis in axes:
        held = _gather_along(held, axis)
    return held


def _gather_along(held: Sequence[np.ndarray], axis: Axis) -> Indices:
    return Indices(len(held), lambda rank: np.concatenate([held[other] for other in group(axis, rank)]))


def scattered(held: Sequence[np.ndarray], axes: Sequence[Axis]) -> Sequence[np.ndarray]:
    """Return the indices that ranks hold after reduce-scatters, the innermost axis first: the inverse of :func:`gathered`."""
    for axis in reversed(axes):
        held = _scatter_along(held, axis)
    return held


def _scatter_along(held: Sequence[np.ndarray], axis: Axis) -> Indices:
    return Indices(len(held), lambda rank: np.split(held[rank], axis.size)[axis.coordinate(rank)])


# ---- Weights ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightIndices:
    """Indices of the weight of a linear layer or an embedding.

    Attributes:
        rows: Rows of the weight that each rank holds.
        row_axes: Mesh axes that split the rows.
        columns: Columns of the weight that each rank holds.
        column_axes: Mesh axes that split the columns.
        output: Block of output features, in the canonical layout, that each rank holds.
    """

    rows: Sequence[np.ndarray]
    row_axes: tuple[Axis, ...]
    columns: Sequence[np.ndarray]
    column_axes: tuple[Axis, ...]
    output: Sequence[np.ndarray]


def matrix_indices(out_features: int, in_features: int, layout: Layout) -> WeightIndices:
    """Return the indices of a linear layer's weight (out_features, in_features), without product order."""
    output = layout.blocks(out_features)
    columns = gathered(layout.blocks(in_features), layout.axes(1))
    if layout.summa:
        return WeightIndices(output, layout.axes(1), scattered(columns, layout.axes(0)), layout.axes(0), output)
    return WeightIndices(gathered(output, layout.axes(2)), layout.axes(1), columns, layout.axes(2), output)


def table_indices(vocabulary: int, features: int, layout: Layout) -> WeightIndices:
    """Return the indices of an embedding's table (vocabulary, features), laid out as the transposed weight of a linear layer."""
    output = layout.blocks(features)
    columns = gathered(output, layout.axes(2))
    return WeightIndices(table_rows(vocabulary, layout), layout.axes(2), columns, layout.axes(1), output)


def table_rows(vocabulary: int, layout: Layout) -> Sequence[np.ndarray]:
    """Return the rows of an embedding's table that each rank holds."""
    if vocabulary % layout.num_parts == 0:
        return gathered(layout.blocks(vocabulary), layout.axes(1))
    # The vocabulary does not divide into as many blocks as an output projection has: use slices in rank order.
    return scattered(all_indices(vocabulary, layout.num_ranks), layout.axes(2))


def all_indices(length: int, num_ranks: int) -> Indices:
    """Return the indices of a dimension that every rank holds completely."""
    return Indices(num_ranks, lambda rank: np.arange(length))


def product_rows(sections: Sequence[int], num_groups: int) -> np.ndarray:
    """Return, for each feature in product order, its row in the concatenated sections (see the module's docstring).

    >>> product_rows((4, 2, 2), num_groups=2).tolist()
    [0, 1, 4, 6, 2, 3, 5, 7]
    """
    starts = np.cumsum((0, *sections[:-1]))
    parts = [start + np.arange(width).reshape(num_groups, -1) for start, width in zip(starts, sections)]
    return np.concatenate(parts, axis=1).reshape(-1)


# ---- Parameters ------------------------------------------------------------------------------------------------------------


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


# ---- Layouts of a layer graph ----------------------------------------------------------------------------------------------


def layout_of(layer: Layer, strategy: Strategy) -> Layout:
    """Return the layout of a layer under its strategy."""
    is_lookup = kind_of(layer.kind).is_lookup
    return Layout(
        *strategy.splits,
        embedding=is_lookup,
        summa=strategy.summa,
        zero=strategy.zero,
        hybrid=strategy.hybrid,
        experts=strategy.experts,
        columns=strategy.columns,
    )


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
