"""Which logical elements of a layer's parameters and activations each rank holds: plain index sets, free of OneFlow.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoddl.costmodel.collectives import gather_steps
from autoddl.costmodel.distribution import Axis, Distribution
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph, Parameter
from autoddl.costmodel.strategy import Strategy

__all__ = [
    "ParameterLayout",
    "ProductOrder",
    "blocks",
    "gathered",
    "parameter_layouts",
    "product_order",
    "scattered",
    "weight_indices",
]

#: For every rank the indices, along one dimension, of what it holds, in the order in which it holds them.
Indices = tuple[np.ndarray, ...]


def blocks(distribution: Distribution, dim: int, length: int) -> Indices:
    """The indices along ``dim`` of a tensor with ``length`` of them there."""
    parts = distribution.split_sizes(dim + 1)[dim]
    if length % parts:
        raise UserError(f"length {length} does not divide into the {parts} slices of {distribution}")
    width = length // parts
    return tuple(
        np.arange(width) + distribution.block(rank, dim + 1)[dim] * width for rank in range(distribution.num_ranks)
    )


def group(axis: Axis, rank: int) -> tuple[int, ...]:
    """The ranks that differ from ``rank`` on ``axis`` alone, ascending."""
    first = rank - axis.coordinate(rank) * axis.stride
    return tuple(first + k * axis.stride for k in range(axis.size))


def gathered(held: Indices, axes: Sequence[Axis]) -> Indices:
    """What ranks hold after the all-gathers of :func:`autoddl.costmodel.layerwork.gather_steps`."""
    for step in gather_steps(axes, 0.0):
        held = tuple(np.concatenate([held[other] for other in group(step.axis, rank)]) for rank in range(len(held)))
    return held


def scattered(held: Indices, axes: Sequence[Axis]) -> Indices:
    """The inverse of :func:`gathered`: what reduce-scatters leave to each rank."""
    for step in reversed(gather_steps(axes, 0.0)):
        held = tuple(np.split(indices, step.axis.size)[step.axis.coordinate(rank)] for rank, indices in enumerate(held))
    return held


# ---- Product order ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductOrder:
    """Where the features of a product come from.

    Attributes:
        widths: features of each module that the layer stands for.
        num_groups: groups in product order; 1 where features are as the modules have them.
        section_widths: of the sections that a group takes its members from (q, k and v, say); their sum is all features.
        rows: for each feature of the product its row in the modules' weights, one below the other.
    """

    widths: tuple[int, ...]
    num_groups: int
    section_widths: tuple[int, ...]
    rows: np.ndarray

    @property
    def group_width(self) -> int:
        """Features of a group."""
        return len(self.rows) // self.num_groups


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
    starts = np.cumsum((0, *sections[:-1]))
    parts = [
        start + np.arange(width).reshape(num_groups, width // num_groups) for start, width in zip(starts, sections)
    ]
    return ProductOrder(widths, num_groups, sections, np.concatenate(parts, axis=1).reshape(-1))


def attention_sections(layer: Layer) -> tuple[int, tuple[int, int, int]]:
    """Groups (key-value heads) of an attention layer, and the features of all of q, k and v."""
    attributes = layer.attributes
    keys = attributes["kv_heads"] * attributes["head_dim"]
    return attributes["kv_heads"], (attributes["heads"] * attributes["head_dim"], keys, keys)


# ---- Parameters --------------------------------------------------------------------------------------------------------------


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
    indices: tuple[Indices, ...]
    reduced: tuple[Axis, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.indices[0])

    def local_shape(self) -> tuple[int, ...]:
        """Of what each rank holds."""
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


@dataclass(frozen=True)
class WeightIndices:
    """What each rank holds of a linear layer or an embedding: rows and columns of its weight with the axes that cut them, and
    the block of its (canonical) output."""

    rows: Indices
    row_axes: tuple[Axis, ...]
    columns: Indices
    column_axes: tuple[Axis, ...]
    output: Indices


def weight_indices(layer: Layer, strategy: Strategy) -> WeightIndices:
    """Rows (out_features, vocabulary) and columns (in_features, features) before any product order."""
    lying = strategy.activations
    if layer.kind == "embedding":
        p1, p2 = strategy.axes(1, embedding=True), strategy.axes(2, embedding=True)
        vocabulary = layer.attributes["vocabulary"]
        output = blocks(lying, 1, layer.attributes["features"])
        if vocabulary % (strategy.p1 * strategy.p2) == 0:
            rows = gathered(blocks(lying, 1, vocabulary), p1)
        else:  # too few for the blocks of an output projection: slices in rank order
            rows = scattered(tuple(np.arange(vocabulary) for _ in range(lying.num_ranks)), p2)
        return WeightIndices(rows, p2, gathered(output, p2), p1, output)
    p1, p2 = strategy.axes(1), strategy.axes(2)
    output = blocks(lying, 1, layer.attributes["out_features"])
    columns = gathered(blocks(lying, 1, layer.attributes["in_features"]), p1)
    if strategy.summa:
        rows_of_mesh = strategy.axes(0)
        return WeightIndices(output, p1, scattered(columns, rows_of_mesh), rows_of_mesh, output)
    return WeightIndices(gathered(output, p2), p1, columns, p2, output)


def parameter_layouts(graph: LayerGraph, layer: Layer, strategy: Strategy) -> tuple[ParameterLayout, ...]:
    """The layouts of a layer's parameters, in the order of the layer; tied ones as if they were its own."""
    reduced = strategy.axes(0, layer.kind == "embedding")
    if layer.kind in ("conv2d", "opaque") or not layer.parameters:
        return tuple(_replicated(parameter, strategy, reduced) for parameter in layer.parameters)
    if layer.kind == "linear":
        return _dense_layouts(graph, layer, strategy, reduced)
    axes: tuple[tuple[Axis, ...], ...]
    indices: tuple[Indices, ...]
    result = []
    for parameter in layer.parameters:
        if layer.kind == "embedding":
            held = weight_indices(layer, strategy)
            axes, indices = (held.row_axes, held.column_axes), (held.rows, held.columns)
        else:
            # Norms and positions: features as the activations have them, all positions on every rank.
            *others, features = parameter.shape
            axes = (*(() for _ in others), strategy.axes(1))
            whole = (_everything(length, strategy.num_devices) for length in others)
            indices = (*whole, blocks(strategy.activations, 1, features))
        result.append(ParameterLayout(parameter.name, _itself(parameter), parameter.shape, axes, indices, reduced))
    return tuple(result)


def _itself(parameter: Parameter) -> tuple[tuple[str, int], ...]:
    return ((parameter.name, parameter.shape[0]),)


def _everything(length: int, num_ranks: int) -> Indices:
    return (np.arange(length),) * num_ranks


def _replicated(parameter: Parameter, strategy: Strategy, reduced: tuple[Axis, ...]) -> ParameterLayout:
    indices = tuple(_everything(length, strategy.num_devices) for length in parameter.shape)
    return ParameterLayout(
        parameter.name, _itself(parameter), parameter.shape, ((),) * len(parameter.shape), indices, reduced
    )


def _dense_layouts(
    graph: LayerGraph, layer: Layer, strategy: Strategy, reduced: tuple[Axis, ...]
) -> tuple[ParameterLayout, ...]:
    """Weights, then biases.  Several modules keep tensors of their own where every block holds whole groups."""
    order = product_order(graph, layer)
    held = weight_indices(layer, strategy)
    weights = [p for p in layer.parameters if len(p.shape) == 2]
    biases = [p for p in layer.parameters if len(p.shape) == 1]
    if biases and len(biases) != len(weights):
        raise UserError(f"{layer.describe()}: some of its modules have a bias and some do not; all or none should")
    no_axes: tuple[Axis, ...] = ()
    if strategy.summa:
        bias_axes, of_weights, of_biases = strategy.axes(1), no_axes, reduced
    else:
        # In rank order of the blocks that they cut, level by level.
        bias_axes = tuple(sorted(strategy.axes(1) + strategy.axes(2), key=lambda axis: -axis.stride))
        of_weights = of_biases = reduced
    apart = are_apart(order, strategy)
    rows = tuple(order.rows[held_rows] for held_rows in held.rows)
    result = [
        _part(part, start, rows, (held.row_axes, held.column_axes), (held.columns,), of_weights)
        for part, start in _stored_parts(weights, apart)
    ]
    rows = tuple(order.rows[block] for block in held.output)
    result += [_part(part, start, rows, (bias_axes,), (), of_biases) for part, start in _stored_parts(biases, apart)]
    return tuple(result)


def _stored_parts(parameters: list[Parameter], apart: bool) -> Iterator[tuple[list[Parameter], int]]:
    """What is stored as one tensor, and where it begins in all parameters, one below the other."""
    if parameters and not apart:
        yield parameters, 0
        return
    start = 0
    for parameter in parameters:
        yield [parameter], start
        start += parameter.shape[0]


def _part(
    sources: list[Parameter],
    start: int,
    rows: Indices,
    axes: tuple[tuple[Axis, ...], ...],
    columns: tuple[Indices, ...],
    reduced: tuple[Axis, ...],
) -> ParameterLayout:
    """The layout of parameters stored as one, which begin at ``start`` of ``rows``."""
    count = sum(parameter.shape[0] for parameter in sources)
    own = tuple(held[(held >= start) & (held < start + count)] - start for held in rows)
    return ParameterLayout(
        _joined([parameter.name for parameter in sources]),
        tuple((parameter.name, parameter.shape[0]) for parameter in sources),
        (count, *sources[0].shape[1:]),
        axes,
        (own, *columns),
        reduced,
    )


def are_apart(order: ProductOrder, strategy: Strategy) -> bool:
    """Whether the modules of a layer keep tensors of their own: every block holds as much of each of them.

    Else (four heads on eight ranks, say) they are stored as one, as Megatron does, and part in the ``state_dict``.
    """
    parts = prod(p1 * p2 for _, p1, p2 in strategy.splits)
    return len(order.widths) > 1 and order.num_groups % parts == 0 and order.num_groups > 1


def _joined(names: Sequence[str]) -> str:
    """["a.q.weight", "a.k.weight"] -> "a.q+k.weight"."""
    if len(names) == 1:
        return names[0]
    modules = [name.rpartition(".")[0] for name in names]
    parents = {module.rpartition(".")[0] for module in modules}
    own = "+".join(module.rpartition(".")[2] for module in modules)
    parent = f"{parents.pop()}." if len(parents) == 1 else ""
    return f"{parent}{own}.{names[0].rpartition('.')[2]}".lstrip(".")
