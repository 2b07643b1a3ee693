"""Which elements of parameters and data a rank holds, and parameters that lie so."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod, sqrt
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from .ranks import RANK, AutogradFunction, Axis, Tensor, all_gather, sum_over_ranks

#: For a rank the indices along one dimension that it holds, in the order in which it holds them.
Held = Callable[[int], np.ndarray]


class Layout:
    """The mesh axes of a strategy (p0, p1, p2), one for each network level, outermost first.

    p0 stands outermost in the ranks of a level and p2 innermost (p1, for an embedding). Between layers samples lie over the axes
    ``p0`` in rank order, and features over ``features``: the others, innermost first, prime by prime.
    """

    def __init__(self, *strategy: tuple[int, int, int], embedding: bool = False):
        self.p0: list[Axis] = []
        self.p1: list[Axis] = []
        self.p2: list[Axis] = []
        self.features: list[Axis] = []
        stride = self.num_ranks = prod(p0 * p1 * p2 for p0, p1, p2 in strategy)
        for p0, p1, p2 in strategy:
            last = stride // (p0 * p1 * p2)
            inner = ((self.p2, p2), (self.p1, p1)) if embedding else ((self.p1, p1), (self.p2, p2))
            for axes, size in ((self.p0, p0), *inner):
                stride //= size
                if size > 1:
                    axes.append(Axis(size, stride))
            for prime in reversed(prime_factors(p1 * p2)):
                self.features.append(Axis(prime, last))
                last *= prime

    def samples(self, array: np.ndarray) -> np.ndarray:
        """This rank's samples."""
        parts = prod(axis.size for axis in self.p0)
        if len(array) % parts:
            raise ValueError(f"{len(array)} samples do not divide over {parts} ranks")
        width = len(array) // parts
        start = block(self.p0, RANK) * width
        return array[start : start + width]

    def block_of(self, length: int) -> Held:
        """The block of features that a rank holds between layers."""
        width = length // prod(axis.size for axis in self.features)
        return lambda rank: np.arange(width) + block(self.features, rank) * width


def prime_factors(number: int) -> list[int]:
    """12 -> [2, 2, 3]."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def block(axes: Sequence[Axis], rank: int) -> int:
    """The number whose digits are the rank's places on the axes."""
    number = 0
    for axis in axes:
        number = number * axis.size + axis.place(rank)
    return number


def everything(length: int) -> Held:
    """All indices, on every rank."""
    return lambda rank: np.arange(length)


def after_gather(held: Held, axes: Sequence[Axis]) -> Held:
    """What ranks hold after all-gathers over the axes."""
    for axis in axes:
        held = _joined(held, axis)
    return held


def _joined(held: Held, axis: Axis) -> Held:
    return lambda rank: np.concatenate([held(other) for other in axis.group(rank)])


def after_scatter(held: Held, axes: Sequence[Axis]) -> Held:
    """What ranks hold after reduce-scatters over the axes."""
    for axis in reversed(axes):
        held = _parted(held, axis)
    return held


def _parted(held: Held, axis: Axis) -> Held:
    return lambda rank: np.split(held(rank), axis.size)[axis.place(rank)]


class Weight:
    """Parameters of the plain model as one global tensor, whose blocks lie on the ranks so that activations never have to.

    Args:
        sources: the plain model's name and number of rows of each, one below the other.
        shape: of them together.
        held: for each dimension what a rank holds.
        cut: for each dimension the axes that cut it.
        placement, sbp: OneFlow's annotation of the same.

    Attributes:
        parameter: the global tensor, for the optimizer.
        leaf: this rank's block of it, sharing its storage; collects gradients that are not summed yet.
        sum_over: the axes that its gradient is summed over, once it has been used.
    """

    def __init__(
        self,
        sources: Mapping[str, int],
        shape: Sequence[int],
        held: Sequence[Held],
        cut: Sequence[Sequence[Axis]],
        placement: Any,
        sbp: Sequence[Any],
    ):
        self.sources, self.shape, self.held, self.cut = dict(sources), tuple(shape), tuple(held), tuple(cut)
        self.placement, self.sbp = placement, list(sbp)
        self.parameter = nn.Parameter(self._empty())
        self.leaf = self.block().requires_grad_(True)
        self.sum_over: tuple[Axis, ...] = ()

    def _empty(self) -> Tensor:
        lengths = [len(held(RANK)) * prod(a.size for a in axes) for held, axes in zip(self.held, self.cut)]
        return flow.empty(*lengths, dtype=flow.float32, placement=self.placement, sbp=self.sbp)

    def block(self) -> Tensor:
        """This rank's block, without history."""
        return self.parameter.to_local().detach()

    def with_gradient(self, own: Tensor) -> Tensor:
        """A global tensor like this one that holds ``own``."""
        gradient = self._empty()
        flow._C.assign_local_tensor(gradient.to_local(), own.contiguous())
        return gradient

    def assign(self, value: np.ndarray) -> None:
        """Take this rank's block of the plain value."""
        own = np.ascontiguousarray(value[np.ix_(*(held(RANK) for held in self.held))])
        flow._C.assign_local_tensor(self.parameter.to_local(), flow.tensor(own))

    def plain(self, tensor: Tensor) -> Iterator[tuple[str, np.ndarray]]:
        """The plain names and values of this parameter (or a tensor like it, its gradient say), on every rank; all ranks call."""
        own, held = tensor.to_local().detach(), self.held
        for dim, axes in enumerate(self.cut):
            for axis in axes:
                own = all_gather(own, axis, dim)
            held = (*held[:dim], after_gather(held[dim], axes), *held[dim + 1 :])
        value = np.empty(self.shape, np.float32)
        value[np.ix_(*(of_dim(RANK) for of_dim in held))] = own.numpy()
        start = 0
        for name, rows in self.sources.items():
            yield name, value[start : start + rows]
            start += rows


def blocks_of(weights: Sequence[Weight], sum_over: Sequence[Axis], sync: bool) -> tuple[Tensor, ...]:
    """This rank's blocks, to compute with.

    When the gradients of all of them have come back they are summed over the axes ``sum_over``, as one vector. Without
    ``sync`` gradients only collect on this rank, until a pass with it.
    """
    if not sync:
        return tuple(weight.leaf for weight in weights)
    trained = [weight for weight in weights if weight.parameter.requires_grad]
    if not trained or not flow.is_grad_enabled():
        return tuple(weight.block() for weight in weights)

    def forward(ctx: Any, *parameters: Tensor) -> Any:
        return _one_or_all([parameter.to_local() for parameter in parameters])

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own = [_with_collected(weight, gradient) for weight, gradient in zip(trained, gradients)]
        if sum_over:
            flat = [gradient.reshape(-1) for gradient in own]
            total = sum_over_ranks(flow.cat(flat) if len(flat) > 1 else flat[0], sum_over)
            ends = np.cumsum([gradient.numel() for gradient in own]).tolist()
            own = [total[end - g.numel() : end].reshape(*g.shape) for g, end in zip(own, ends)]
        return _one_or_all([weight.with_gradient(gradient) for weight, gradient in zip(trained, own)])

    outputs = AutogradFunction.apply("blocks", forward, backward, *(weight.parameter for weight in trained))
    found = dict(zip(map(id, trained), outputs if len(trained) > 1 else [outputs]))
    return tuple(found[id(weight)] if id(weight) in found else weight.block() for weight in weights)


def _with_collected(weight: Weight, gradient: Tensor) -> Tensor:
    collected, weight.leaf.grad = weight.leaf.grad, None
    return gradient if collected is None else gradient + collected


def _one_or_all(values: Sequence[Any]) -> Any:
    return tuple(values) if len(values) > 1 else values[0]


class Blocked(nn.Module):
    """A module that keeps its parameters in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Weight] = []
        self.biases: list[Weight] = []

    def add(self, name: str, weight: Weight) -> Weight:
        """Make it a parameter of this module."""
        self.register_parameter(name, weight.parameter)
        return weight

    def blocks(self, sum_over: Sequence[Axis], **when: bool) -> tuple[Tensor, ...]:
        """This rank's blocks of weights and biases; see `blocks_of`."""
        return blocks_of(self.weights + self.biases, sum_over, **when)


class Linear(Blocked):
    """The weight (out, in) and the bias of a dense layer, or of several that read the same tensor.

    Rows are those that leave each rank, after the reduce-scatter over p2, with its own block of the output; columns are in
    the order in which the all-gather over p1 brings the input. Rows in ``groups`` (attention's key-value heads, a gate and
    what it is for) are taken from the ``sections`` in turn, q0 k0 v0 q1 k1 v1 ..., so that every split has whole groups.

    Args:
        modules: the plain modules and their output features.
        apart: whether the modules' parameters are tensors of their own; else they are stored as one.
        summa: whether the input's features are cut over p0 too, and gathered where they are needed.
        tied: whether the weight is another module's.
        copy_of: the module whose weight this one is a copy of.
    """

    def __init__(
        self,
        modules: Mapping[str, int],
        in_features: int,
        layout: Layout,
        placement: Any,
        sbp: Sequence[Any],
        bias_sbp: Sequence[Any] = (),
        sections: Sequence[int] = (),
        groups: int = 1,
        apart: bool = False,
        summa: bool = False,
        tied: bool = False,
        copy_of: str = "",
    ):
        super().__init__()
        out_features = sum(modules.values())
        order = product_order(sections or [out_features], groups)
        output = layout.block_of(out_features)
        rows, columns = matrix_held(out_features, in_features, layout, summa)
        row_axes, column_axes = layout.p1, layout.p0 if summa else layout.p2
        bias_axes = layout.p1 if summa else sorted(layout.p1 + layout.p2, key=lambda axis: -axis.stride)
        #: The features of the data that a first layer reads.
        self.columns = (layout.block_of(in_features) if summa else columns)(RANK)
        start = 0
        for part in [{name: width} for name, width in modules.items()] if apart else [dict(modules)]:
            count, name = sum(part.values()), "+".join(module.rpartition(".")[2] for module in part)
            suffix = "" if len(part) == len(modules) else f"_{name}"
            if not tied:
                sources = {f"{copy_of or module}.weight": width for module, width in part.items()}
                held = (part_of(order, rows, start, count), columns)
                weight = Weight(sources, (count, in_features), held, (row_axes, column_axes), placement, sbp)
                self.weights.append(self.add(f"weight{suffix}", weight))
            if bias_sbp:
                sources = {f"{module}.bias": width for module, width in part.items()}
                own = part_of(order, output, start, count)
                bias = Weight(sources, (count,), (own,), (bias_axes,), placement, bias_sbp)
                self.biases.append(self.add(f"bias{suffix}", bias))
            start += count


def matrix_held(out_features: int, in_features: int, layout: Layout, summa: bool = False) -> tuple[Held, Held]:
    """Which rows and columns of a dense layer's weight a rank holds."""
    output = layout.block_of(out_features)
    columns = after_gather(layout.block_of(in_features), layout.p1)
    return (output, after_scatter(columns, layout.p0)) if summa else (after_gather(output, layout.p2), columns)


def product_order(sections: Sequence[int], groups: int) -> np.ndarray:
    """For each feature of the product its row in the plain weights, one below the other."""
    starts = np.cumsum((0, *sections[:-1]))
    parts = [start + np.arange(width).reshape(groups, -1) for start, width in zip(starts, sections)]
    return np.concatenate(parts, axis=1).reshape(-1)


def part_of(order: np.ndarray, held: Held, start: int, count: int) -> Held:
    """Of the features that a rank holds the rows from ``start`` to ``start + count``."""

    def rows(rank: int) -> np.ndarray:
        own = order[held(rank)]
        return own[(own >= start) & (own < start + count)] - start

    return rows


class Embedding(Blocked):
    """A table (vocabulary, features), cut like a linear layer's transposed matrix: vocabulary over p2, features over p1."""

    def __init__(self, module: str, vocabulary: int, features: int, layout: Layout, placement: Any, sbp: Sequence[Any]):
        super().__init__()
        rows, columns = table_held(vocabulary, features, layout)
        held, cut = (rows, columns), (layout.p2, layout.p1)
        table = Weight({f"{module}.weight": vocabulary}, (vocabulary, features), held, cut, placement, sbp)
        self.weights.append(self.add("weight", table))
        #: The row of each token in this rank's part of the table; -1 where another rank has it.
        self.places = np.full(vocabulary, -1, dtype=np.int64)
        self.places[rows(RANK)] = np.arange(len(rows(RANK)))


def table_held(vocabulary: int, features: int, layout: Layout) -> tuple[Held, Held]:
    """Which rows and columns of an embedding's table a rank holds."""
    columns = after_gather(layout.block_of(features), layout.p2)
    if vocabulary % prod(axis.size for axis in layout.features):
        return after_scatter(everything(vocabulary), layout.p2), columns
    return after_gather(layout.block_of(vocabulary), layout.p1), columns


class PerFeature(Blocked):
    """Parameters whose last dimension is the activations' features: those of norms, tables of positions."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], layout: Layout, placement: Any, sbp: Sequence[Any]):
        super().__init__()
        for name, shape in shapes.items():
            held = (*(everything(length) for length in shape[:-1]), layout.block_of(shape[-1]))
            cut = (*([] for _ in shape[:-1]), layout.p1)
            weight = Weight({name: shape[0]}, shape, held, cut, placement, sbp)
            self.weights.append(self.add(name.rpartition(".")[2], weight))


class Whole(Blocked):
    """Parameters that every rank has whole: those of convolutions, and of modules that are run as they are."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], placement: Any, sbp: Sequence[Any]):
        super().__init__()
        for name, shape in shapes.items():
            held, cut = tuple(map(everything, shape)), ((),) * len(shape)
            weight = Weight({name: shape[0]}, shape, held, cut, placement, sbp)
            self.weights.append(self.add(name.replace(".", "_"), weight))


def all_weights(model: Any) -> list[Weight]:
    """Of a model and its parts, each once."""
    parts = [part for part in model.modules() if isinstance(part, Blocked)]
    return [weight for part in parts for weight in (*part.weights, *part.biases)]


def initial_value(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """What the plain model begins with, from the parameter's name alone: matrices normal with deviation 0.02 or, where that is
    less than 1/sqrt(fan-in), that; vectors 0, scales of norms 1."""
    if len(shape) > 1:
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        deviation = max(0.02, 1 / sqrt(prod(shape[1:])))
        return generator.standard_normal(tuple(shape), dtype=np.float32) * np.float32(deviation)
    return np.full(tuple(shape), 0.0 if name.endswith("bias") else 1.0, dtype=np.float32)
