"""Index sets of the logical elements of weights and activations that each rank holds. Needs no OneFlow.

`Layout` and the functions on it use only numbers and names, so that exported files can contain them.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis, canonical_axes, flat_coordinate
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy, copy_axes, expert_axes, layout_levels, mesh_axes

__all__ = [
    "Indices",
    "Layout",
    "all_indices",
    "blocks",
    "gathered",
    "group",
    "layout_of",
    "matrix_indices",
    "mirrored_order",
    "scattered",
    "table_indices",
    "table_rows",
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


# ---- Layouts of layers -----------------------------------------------------------------------------------------------------


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
