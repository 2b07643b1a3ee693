"""Tensors divided among the ranks that would hold copies of them (ZeRO): packing, and the collectives that divide and gather them.

A tensor of n elements is divided into p shards of m = ceil(n / p) elements; the end of the last one is padding. Several tensors
that are divided along the same axes are moved by one collective. Their elements are ordered so that an even division of the
vector gives every rank its shards of all of them:

    tensors   a = a0 a1 a2 a3    b = b0 b1
    vector    a0 a1 b0 | a2 a3 b1

The sources of the formulas are in :mod:`autoddl.costmodel.layerwork`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from autoddl.costmodel.distribution import Axis

from .comm.parameter_layouts import ParameterLayout
from .detaching import detached
from .load import load_oneflow
from .operations import concat_grouped, split_grouped
from .stepping import Ranks

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = [
    "HeldWeight",
    "attach_weights",
    "gather_shards",
    "gather_weights",
    "gradient_shape",
    "lean_product",
    "readable_weights",
    "scatter_sum",
    "shard_length",
    "split_vector",
    "update_shards",
]

Tensor = Any
Shape = Sequence[int]


class HeldWeight(NamedTuple):
    """A whole weight whose gradients are divided (``zero`` = 2): each backward pass leaves every rank its shard of the sum.

    Attributes:
        shard: Autograd leaf, which accumulates this rank's shard of the gradient; its values are not those of the weight.
        value: The whole weight.
    """

    shard: Tensor
    value: Tensor


def attach_weights(weights: Sequence[Any], axes: Sequence[Axis], ranks: Ranks) -> list[Tensor]:
    """Return the weights of a layer as tensors to compute with: of each `HeldWeight` the value, as `gather_weights` returns it.

    Args:
        weights: Tensors and held weights.
        axes: The mesh axes that divide the gradients of held weights.
        ranks: The ranks.
    """
    held = [weight for weight in weights if isinstance(weight, HeldWeight)]
    if not held:
        return list(weights)
    values = [weight.value for weight in held]
    shapes = [value.shape for value in values]
    attached = gather_weights([weight.shard for weight in held], axes, shapes, ranks, known=values)
    of_held = iter([attached] if len(held) == 1 else attached)
    return [next(of_held) if isinstance(weight, HeldWeight) else weight for weight in weights]


def gradient_shape(layout: ParameterLayout) -> tuple[int, ...]:
    """Return the shape in which a rank accumulates the gradient of a weight, before the sum of an update."""
    if layout.zero < 2:
        return layout.local_shape()
    return (layout.shard_length * prod(axis.size for axis in layout.outer),)


def readable_weights(
    leaves: Sequence[Tensor], layouts: Sequence[ParameterLayout | None], ranks: Ranks | None
) -> list[Any]:
    """Return what computations read of weights: autograd leaves that accumulate gradients of `gradient_shape`, or held weights.

    Args:
        leaves: What this rank stores of each weight, as autograd leaves; they remain those of weights that are not divided.
        layouts: Layouts of the weights; None for weights that are not divided.
        ranks: The ranks that divide weights; None if none is divided.
    """
    weights: list[Any] = list(leaves)
    divided: dict[tuple[int, bool, tuple[Axis, ...]], list[int]] = {}
    for i, layout in enumerate(layouts):
        if layout is not None and layout.zero:
            divided.setdefault((layout.zero, layout.hybrid, layout.reduced), []).append(i)
    for members in divided.values():
        of_members = [layout for layout in (layouts[i] for i in members) if layout is not None]
        assert ranks is not None
        for i, weight in zip(members, _gathered_alike([weights[i] for i in members], of_members, ranks)):
            weights[i] = weight
    return weights


def _gathered_alike(shards: Sequence[Tensor], layouts: Sequence[ParameterLayout], ranks: Ranks) -> list[Any]:
    """Return the result of `readable_weights` for weights that are divided in the same way."""
    first = layouts[0]
    with flow.no_grad():
        own = [detached(shard) for shard in shards]
        if first.zero == 1:
            wholes = gather_shards(own, first.reduced, [layout.local_shape() for layout in layouts], ranks)
            return [whole.requires_grad_(True) for whole in wholes]
        inner = gather_shards(own, first.outer, [gradient_shape(layout) for layout in layouts], ranks)
        if first.zero == 2:
            wholes = gather_shards(inner, first.inner, [layout.local_shape() for layout in layouts], ranks)
            leaves = [_gradient_leaf(shard).requires_grad_(own.requires_grad) for shard, own in zip(inner, shards)]
            return [HeldWeight(leaf, whole) for leaf, whole in zip(leaves, wholes)]
    return [shard.requires_grad_(True) for shard in inner] if first.outer else list(shards)


def _gradient_leaf(like: Tensor) -> Tensor:
    """Return a tensor that accumulates gradients of the shape and type of another one; its own elements take no memory."""
    return flow.zeros(1, dtype=like.dtype, device=like.device).expand(*like.shape)


def update_shards(gradients: Sequence[Tensor], layouts: Sequence[ParameterLayout], ranks: Ranks) -> list[Tensor]:
    """Sum accumulated gradients over the ranks for an update, and return this rank's shards.

    Args:
        gradients: Gradients of `gradient_shape`.
        layouts: Layouts of the weights, which are divided in the same way.
        ranks: The ranks that divide them.
    """
    first = layouts[0]
    return scatter_sum(gradients, first.reduced if first.zero == 1 else first.outer, ranks)


def shard_length(num_elements: int, axes: Sequence[Axis]) -> int:
    """Return the number of elements of each shard of a tensor, padding included.

    >>> shard_length(10, [Axis(4, 1)])
    3
    """
    return -(-num_elements // prod(axis.size for axis in axes))


def split_vector(vector: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Divide a vector into consecutive vectors."""
    parts, start = [], 0
    for length in lengths:
        parts.append(flow.narrow(vector, 0, start, length))
        start += length
    return parts


def scatter_sum(tensors: Sequence[Tensor], axes: Sequence[Axis], ranks: Ranks) -> list[Tensor]:
    """Sum tensors over the ranks along axes, and return this rank's shard of each sum, a vector."""
    if not axes:
        return [tensor.reshape(-1) for tensor in tensors]
    count = prod(axis.size for axis in axes)
    lengths = [shard_length(tensor.numel(), axes) for tensor in tensors]
    rows = []
    for tensor, length in zip(tensors, lengths):
        vector = tensor.reshape(-1)
        if (missing := count * length - vector.shape[0]) > 0:
            vector = flow.cat([vector, flow.zeros(missing, dtype=vector.dtype, device=vector.device)], dim=0)
        rows.append(vector.reshape(count, length))
    packed = (flow.cat(rows, dim=1) if len(rows) > 1 else rows[0]).reshape(-1)
    communication = ranks.backend.communication
    return split_vector(ranks.scatter(packed.to(communication), axes, 0).to(packed.dtype), lengths)


def gather_shards(
    shards: Sequence[Tensor], axes: Sequence[Axis], shapes: Sequence[Shape], ranks: Ranks
) -> list[Tensor]:
    """Return the tensors of the given shapes, of which each rank along the axes has a shard."""
    if not axes:
        return [shard[: prod(shape)].reshape(*shape) for shard, shape in zip(shards, shapes)]
    lengths = [shard.shape[0] for shard in shards]
    packed = flow.cat(list(shards), dim=0) if len(shards) > 1 else shards[0]
    rows = ranks.gather(packed, axes, 0).reshape(-1, sum(lengths))
    tensors, start = [], 0
    for length, shape in zip(lengths, shapes):
        vector = flow.narrow(rows, 1, start, length).reshape(-1)
        size = prod(shape)
        tensors.append((vector if vector.shape[0] == size else vector[:size]).reshape(*shape))
        start += length
    return tensors


def gather_weights(
    shards: Sequence[Tensor], axes: Sequence[Axis], shapes: Sequence[Shape], ranks: Ranks, known: Sequence[Tensor] = ()
) -> Any:
    """Return whole weights, a tensor if there is one and otherwise a tuple.

    The backward pass sums their gradients over the ranks, and leaves each rank its shard of the sums.

    Args:
        shards: This rank's shards, vectors.
        axes: The mesh axes that divide the weights.
        shapes: The shapes of the whole weights, as far as this rank computes with them.
        ranks: The ranks.
        known: The whole weights if they have been gathered already.
    """

    def forward(ctx: Any, *own: Tensor) -> Any:
        wholes = [detached(one) for one in known] or gather_shards([detached(one) for one in own], axes, shapes, ranks)
        return tuple(wholes) if len(wholes) > 1 else wholes[0]

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sums = scatter_sum(gradients, axes, ranks)
        return tuple(sums) if len(sums) > 1 else sums[0]

    if not any(shard.requires_grad for shard in shards) or not flow.is_grad_enabled():
        return forward(None, *shards)
    return _Function.apply("gather_weights", forward, backward, *shards)


def lean_product(
    x: Tensor,
    weights: Sequence[Tensor],
    ranks: Ranks,
    columns: Sequence[Axis] = (),
    shards: Sequence[Axis] = (),
    shapes: Sequence[Shape] = (),
    widths: Sequence[int] = (),
    regathers: bool = False,
    is_first: bool = False,
) -> Tensor:
    """Multiply by a transposed weight, and keep little for the backward pass: it gathers again what is not kept.

    Args:
        x: This rank's part of the input, (samples, rows, features).
        weights: The weight (out, in), or several of which the weight is composed; vectors of shards if ``shards`` are given.
        ranks: The ranks.
        columns: Mesh axes along which the input is gathered.
        shards: Mesh axes that divide the weights.
        shapes: Shapes of the weights, if they are divided.
        widths: Number of rows of each of several weights in a group (:func:`.operations.concat_grouped`).
        regathers: Whether the backward pass gathers the input again, in place of keeping it.
        is_first: Whether the input is data, which is not gathered and needs no gradient.
    """

    def whole_weight() -> tuple[list[Tensor], Tensor]:
        """Return the parts of the weight, and the weight."""
        own = [detached(weight) for weight in weights]
        parts = gather_shards(own, shards, shapes, ranks) if shards else own
        return parts, concat_grouped(parts, widths) if len(parts) > 1 else parts[0]

    def gathered_input() -> Tensor:
        return detached(x) if is_first else ranks.gather(detached(x), columns, 2)

    kept: list[Tensor] = []

    def forward(ctx: Any, *_: Tensor) -> Tensor:
        weight = whole_weight()[1]
        whole = gathered_input()
        if not regathers:
            kept.append(whole)
        return flow.matmul(whole, weight, transpose_b=True)

    def backward(ctx: Any, dy: Tensor) -> Any:
        parts, weight = whole_weight()
        whole = gathered_input() if regathers else kept.pop()
        result: list[Tensor] = [] if is_first else [ranks.scatter(flow.matmul(dy, weight), columns, 2)]
        outer = flow.matmul(dy.reshape(-1, dy.shape[-1]), whole.reshape(-1, whole.shape[-1]), transpose_a=True)
        of_parts = split_grouped(outer, [part.shape[0] for part in parts], widths) if len(parts) > 1 else [outer]
        result += scatter_sum(of_parts, shards, ranks) if shards else of_parts
        return tuple(result) if len(result) > 1 else result[0]

    return _Function.apply("lean_product", forward, backward, *([] if is_first else [x]), *weights)
