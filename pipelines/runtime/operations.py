"""The functions that the statements of layers call (:mod:`statements`). Their arguments are local tensors, numbers and the `Ranks`.

Activations are (samples, rows, features), and images (samples, 1, all elements). Exported files contain these definitions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import pi, prod, sqrt
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError

from .comm.layouts import Layout, gathered, table_rows
from .detaching import detached
from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()
functional = flow.nn.functional
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = [
    "checkpoint",
    "concat_grouped",
    "concat_heads",
    "data",
    "elu",
    "lookup",
    "matmul",
    "positions",
    "quick_gelu",
    "run_module",
    "split_gate",
    "split_grouped",
    "summa_product",
    "tanh_gelu",
]

Tensor = Any


def data(
    array: np.ndarray, layout: Layout, ranks: Ranks, rows: int, is_gathered: bool = False, is_mirrored: bool = False
) -> Tensor:
    """Return this rank's part of an input of the model: (samples, rows, features).

    Args:
        array: Samples of all ranks.
        layout: Distribution of the samples and features.
        ranks: The ranks.
        rows: Rows per sample.
        is_gathered: Whether to return the features that an all-gather over p1 would return, not only the rank's block.
        is_mirrored: Whether rows are in mirrored order.
    """
    own = layout.part_of_rows(array, ranks.rank, rows, is_mirrored)
    columns = _data_columns(layout, own.shape[-1], is_gathered, ranks.rank)
    return ranks.backend.activation(np.ascontiguousarray(own[..., columns]))


@functools.cache
def _data_columns(layout: Layout, features: int, is_gathered: bool, rank: int) -> np.ndarray:
    return gathered(layout.blocks(features), layout.axes(1) if is_gathered else ())[rank]


# ---- Products --------------------------------------------------------------------------------------------------------------


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by the transposed weight: x (..., in), weight (out, in), result (..., out)."""
    return flow.matmul(x, weight, transpose_b=True)


def concat_grouped(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Concatenate the rows of several weights (or biases), interleaved in groups of ``widths[i]`` rows of part i."""
    others = parts[0].shape[1:]
    grouped = [part.reshape(part.shape[0] // width, width, *others) for part, width in zip(parts, widths)]
    return flow.cat(grouped, dim=1).reshape(-1, *others)


def split_grouped(whole: Tensor, lengths: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """Divide the rows of a tensor into those of several parts of the given lengths: the inverse of `concat_grouped`."""
    others, num_groups = whole.shape[1:], lengths[0] // widths[0]
    grouped = whole.reshape(num_groups, sum(widths), *others)
    parts, start = [], 0
    for length, width in zip(lengths, widths):
        parts.append(flow.narrow(grouped, 1, start, width).reshape(length, *others))
        start += width
    return parts


def summa_product(
    x: Tensor, weight: Tensor, rows: Sequence[Axis], columns: Sequence[Axis], ranks: Ranks, is_first: bool
) -> Tensor:
    """Multiply by the transposed weight after all-gathering both operands (SUMMA). The backward pass gathers their shards again.

    Args:
        x: This rank's shard of the input.
        weight: This rank's shard of the weight.
        rows: Mesh axes over which the weight is gathered.
        columns: Mesh axes over which the input is gathered.
        ranks: The ranks.
        is_first: Whether the input is data, which needs no gradient.
    """

    def forward(ctx: Any, *_: Tensor) -> Tensor:
        whole = ranks.gather(detached(x), columns, 2)
        return matmul(whole, ranks.gather(detached(weight), rows, 1))

    def backward(ctx: Any, dy: Tensor) -> Any:
        result = []
        if not is_first:
            whole_weight = ranks.gather(detached(weight), rows, 1)
            result.append(ranks.scatter(flow.matmul(dy, whole_weight), columns, 2))
        whole = ranks.gather(detached(x), columns, 2)
        outer = flow.matmul(dy.reshape(-1, dy.shape[-1]), whole.reshape(-1, whole.shape[-1]), transpose_a=True)
        result.append(ranks.scatter(outer, rows, 1))
        return tuple(result) if len(result) > 1 else result[0]

    return _Function.apply("summa", forward, backward, *([] if is_first else [x]), weight)


def lookup(
    tokens: np.ndarray,
    table: Tensor,
    layout: Layout,
    ranks: Ranks,
    vocabulary: int,
    rows: int,
    is_mirrored: bool = False,
) -> Tensor:
    """Return the rows of an embedding table for this rank's tokens; zeros for rows that other ranks hold.

    Args:
        tokens: Tokens of all ranks.
        table: This rank's part of the table.
        layout: Distribution of the table.
        ranks: The ranks.
        vocabulary: Number of rows of the whole table.
        rows: Tokens per sample.
        is_mirrored: Whether rows are in mirrored order.

    Raises:
        UserError: A token is not a row of the table.
    """
    own = layout.part_of_rows(tokens, ranks.rank, rows, is_mirrored)[:, :, 0]
    if own.size and not 0 <= own.min() <= own.max() < vocabulary:
        wrong = own.min() if own.min() < 0 else own.max()
        raise UserError(f"token {wrong} should be from 0 to {vocabulary - 1}")
    local = _token_places(layout, vocabulary, ranks.rank)[own]
    x = functional.embedding(ranks.backend.tensor(np.maximum(local, 0)), table)
    if table.shape[0] < vocabulary:
        x = x * ranks.backend.tensor(local >= 0, table.dtype).unsqueeze(-1)
    return x


@functools.cache
def _token_places(layout: Layout, vocabulary: int, rank: int) -> np.ndarray:
    """Return the row of each token in a rank's part of the table, or -1 if another rank holds it."""
    held = table_rows(vocabulary, layout)[rank]
    places = np.full(vocabulary, -1, dtype=np.int64)
    places[held] = np.arange(len(held))
    return places


# ---- On the canonical layout -----------------------------------------------------------------------------------------------


def positions(
    table: Tensor, num_samples: int, layout: Layout, ranks: Ranks, rows: int, is_mirrored: bool = False
) -> Tensor:
    """Return the rows of the position table for this rank's positions, repeated for each of its samples.

    Args:
        table: This rank's part of the table.
        num_samples: Samples of all ranks.
        layout: Distribution of the samples and features.
        ranks: The ranks.
        rows: Positions per sample.
        is_mirrored: Whether rows are in mirrored order.
    """
    table = table.reshape(-1, table.shape[-1])[:rows]
    parts = prod(axis.size for axis in layout.axes(0))
    own = np.arange(rows)[None, :, None].repeat(num_samples, axis=0)
    if is_mirrored or parts > num_samples:
        order = layout.part_of_rows(own, ranks.rank, rows, is_mirrored)[0, :, 0]
        table = functional.embedding(ranks.backend.tensor(order), table)
    return table.unsqueeze(0).expand(max(num_samples // parts, 1), *table.shape)


def concat_heads(parts: Sequence[Tensor], groups: int) -> Tensor:
    """Concatenate q, k and v within each group of heads, in the order that attention expects."""
    x = flow.cat([part.reshape(*part.shape[:2], groups, -1) for part in parts], dim=3)
    return x.reshape(*x.shape[:2], -1)


# ---- On whole samples ------------------------------------------------------------------------------------------------------


def run_module(
    own: Any, inputs: Sequence[Tensor], shapes: Sequence[Sequence[int]], weights: Sequence[Tensor], training: bool
) -> Tensor:
    """Run one of the user's modules (`facts.OwnModule`) on whole samples.

    Args:
        own: The module.
        inputs: Inputs of the module.
        shapes: Shape of a sample of each input, as the module expects it.
        weights: Values of the module's parameters.
        training: Whether the module runs in training mode.

    Raises:
        UserError: The module does not return one tensor.
    """
    own.place(inputs[0])
    own.module.train(training)
    for (owner, name), weight in zip(own.places, weights):
        # Plain tensors replace parameters: gradients flow to the tensors that the weights are computed from.
        owner._parameters.pop(name, None)
        object.__setattr__(owner, name, weight)
    y = own.module(*(x.reshape(x.shape[0], *shape) for x, shape in zip(inputs, shapes)))
    if not isinstance(y, flow.Tensor):
        raise UserError(f"it returns {type(y).__name__}, should return one tensor")
    shape = tuple(y.shape[1:])
    return y.reshape(y.shape[0], *((prod(shape[:-1]), shape[-1]) if 0 < len(shape) <= 2 else (1, prod(shape))))


# ---- Activations -----------------------------------------------------------------------------------------------------------


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU with the tanh approximation."""
    return 0.5 * x * (1.0 + flow.tanh(sqrt(2.0 / pi) * (x + 0.044715 * x * x * x)))


def elu(x: Tensor) -> Tensor:
    """x if x > 0, else exp(x) - 1. (OneFlow's function has no default of the factor.)"""
    return functional.elu(x, 1.0)


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return x * flow.sigmoid(1.702 * x)


def split_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves of the product of a gated unit, which alternate along the features."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return pairs[..., 0], pairs[..., 1]


def checkpoint(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return ``function(*tensors)`` and keep only the tensors. The backward pass runs the function again."""
    needed = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if not needed or not flow.is_grad_enabled():
        return function(*tensors)
    kept = [detached(tensor) for tensor in tensors]

    def forward(ctx: Any, *_: Tensor) -> Tensor:
        return function(*kept)

    def backward(ctx: Any, dy: Tensor) -> Any:
        with flow.enable_grad():
            leaves = [tensor.detach().requires_grad_(i in needed) for i, tensor in enumerate(kept)]
            y = function(*leaves)
        gradients = flow.autograd.grad([y], [leaves[i] for i in needed], [dy])
        return tuple(gradients) if len(gradients) > 1 else gradients[0]

    return _Function.apply("checkpoint", forward, backward, *(tensors[i] for i in needed))
