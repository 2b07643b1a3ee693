"""Ranks as a mesh, and the collectives along one of its axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import oneflow as flow

Tensor = Any
AutogradFunction = flow._oneflow_internal.autograd.AutogradFunctionBase

RANK = flow.env.get_rank()
NUM_RANKS = flow.env.get_world_size()
S0, S1, S2, S3 = map(flow.sbp.split, range(4))
B = flow.sbp.broadcast


class Axis(NamedTuple):
    """A mesh axis: ``size`` ranks, ``stride`` apart; rank r stands at r // stride % size on it."""

    size: int
    stride: int

    def place(self, rank: int) -> int:
        """Where a rank stands on the axis."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks that differ from this one along the axis only, ascending."""
        first = rank - self.place(rank) * self.stride
        return tuple(first + k * self.stride for k in range(self.size))


def rank_in_job(rank: int) -> int:
    """The number of a rank of the mesh among all ranks."""
    return rank


def mesh(*lengths: int) -> Any:
    """All ranks in their order, on axes of these lengths."""
    return flow.placement("cpu", np.arange(NUM_RANKS).reshape(lengths or (NUM_RANKS,)).tolist())


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """S(dim) -> B along the axis: (p - 1) / p of the output sent by each rank. Backward: reduce-scatter."""
    return differentiable(x, lambda t: gathered(t, axis, dim), lambda dy: reduced(dy, axis, dim))


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """P -> S(dim) along the axis: (p - 1) / p of the input sent by each rank. Backward: all-gather."""
    return differentiable(x, lambda t: reduced(t, axis, dim), lambda dy: gathered(dy, axis, dim))


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """P -> B along the axis: 2 (p - 1) / p of the tensor sent by each rank. Backward: the same."""
    return differentiable(x, lambda t: summed(t, axis), lambda dy: summed(dy, axis))


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """S(concat_dim) -> S(split_dim) along the axis: (p - 1) / p of the tensor sent by each rank. Backward: its inverse."""
    return differentiable(
        x, lambda t: exchanged(t, axis, split_dim, concat_dim), lambda dy: exchanged(dy, axis, concat_dim, split_dim)
    )


def take_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """B -> S(dim) along the axis: nothing is sent. Backward: zeros around the slice."""
    length = x.shape[dim] // axis.size
    start = axis.place(RANK) * length

    def backward(dy: Tensor) -> Tensor:
        shape = list(dy.shape)
        shape[dim] *= axis.size
        whole = flow.zeros(*shape, dtype=dy.dtype)
        flow.narrow(whole, dim, start, length).copy_(dy)
        return whole

    return differentiable(x, lambda t: flow.narrow(t, dim, start, length).contiguous(), backward)


def sum_over_ranks(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """All-reduce of a vector over an axis of each network level, outermost first; only 1/inner of it crosses the outermost."""
    if not axes:
        return x
    length, inner = x.shape[0], axes[1:]
    padding = -length % prod(axis.size for axis in inner)
    if padding:
        x = flow.cat([x, flow.zeros(padding, dtype=x.dtype)])
    for axis in reversed(inner):
        x = reduce_scatter(x, axis, dim=0)
    x = all_reduce(x, axes[0])
    for axis in inner:
        x = all_gather(x, axis, dim=0)
    return x[:length] if padding else x


def differentiable(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """``forward(x)``, whose gradient goes back through ``backward``."""
    return AutogradFunction.apply("collective", lambda ctx, t: forward(t), lambda ctx, dy: backward(dy), x)


def gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The shards of the axis joined along ``dim``."""
    rows = transferred(x.reshape(1, -1), axis, (axis.size, x.numel()), flow.sbp.split(0), flow.sbp.broadcast)
    return joined(rows.reshape(axis.size, *x.shape), dim)


def reduced(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice along ``dim`` of the sum."""
    pieces = cut(x, axis.size, dim)
    row = transferred(pieces, axis, tuple(pieces.shape), flow.sbp.partial_sum, flow.sbp.split(0))
    return row.reshape(*pieces.shape[1:])


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum."""
    flat = transferred(x.reshape(-1), axis, (x.numel(),), flow.sbp.partial_sum, flow.sbp.broadcast)
    return flat.reshape(tuple(x.shape))


def exchanged(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Piece k along ``split_dim`` goes to the k-th rank; what comes is joined along ``concat_dim``."""
    pieces = cut(x, axis.size, split_dim)
    shape = (axis.size, axis.size, pieces[0].numel())  # (sender, receiver, data)
    got = transferred(pieces.reshape(1, *shape[1:]), axis, shape, flow.sbp.split(0), flow.sbp.split(1))
    return joined(got.reshape(*pieces.shape), concat_dim)


def transferred(x: Tensor, axis: Axis, shape: tuple[int, ...], before: Any, after: Any) -> Tensor:
    """The local part of a tensor of ``shape`` in state ``after``, from that in ``before``.

    OneFlow sends no byte too many on the one-dimensional placement of a group alone, tensor dimension 0 split. The data enters
    through the storage of an empty global tensor: `to_global` of a local one would have to be called by all ranks of the job.
    """
    whole = flow.empty(*shape, dtype=x.dtype, placement=placement_of(axis.group(RANK)), sbp=before)
    flow._C.assign_local_tensor(whole.to_local(), x.contiguous())
    return whole.to_global(sbp=after).to_local()


@functools.cache
def placement_of(group: tuple[int, ...]) -> Any:
    """Some ranks in a row; they have to ascend."""
    return flow.placement("cpu", list(group))


def cut(x: Tensor, num_pieces: int, dim: int) -> Tensor:
    """(..., n, ...) as (num_pieces, ..., n / num_pieces, ...), the pieces contiguous."""
    shape = tuple(x.shape)
    apart = x.reshape(*shape[:dim], num_pieces, shape[dim] // num_pieces, *shape[dim + 1 :])
    return apart.permute(dim, *(i for i in range(len(shape) + 1) if i != dim)).contiguous()


def joined(pieces: Tensor, dim: int) -> Tensor:
    """The inverse of `cut`."""
    num_pieces, *shape = pieces.shape
    order = [i + 1 for i in range(len(shape))]
    order.insert(dim, 0)
    return pieces.permute(*order).contiguous().reshape(*shape[:dim], num_pieces * shape[dim], *shape[dim + 1 :])


def exchange_digits(
    x: Tensor, axis: Axis, view: Sequence[int], split: Sequence[int], concat: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """An all-to-all that cuts or joins parts of the dimensions of ``x``: digits; an all-gather where it cuts none. Flat.

    Args:
        view: the lengths of the digits that the dimensions of ``x`` consist of; -1 for what is left of the samples.
        split: the digits to be cut, as places in ``view``, that of the axis's slowest ranks first.
        concat: those to become whole; they have length 1 here and ``sizes`` afterwards.
    """
    lengths = [x.numel() // -prod(view) if length == -1 else length for length in view]
    order = [*split, *concat, *(i for i in range(len(view)) if i not in (*split, *concat))]
    x = permuted(x, lengths, order)
    if split:
        x = all_to_all(x.reshape(axis.size, 1, -1), axis, split_dim=0, concat_dim=1)
    else:
        x = all_gather(x.reshape(1, -1), axis, dim=0)
    for digit in split:
        lengths[digit] = 1
    for digit, size in zip(concat, sizes):
        lengths[digit] = size
    return permuted(x, [lengths[i] for i in order], [order.index(i) for i in range(len(order))])


def permuted(x: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """``x.reshape(lengths).permute(order)``, flat, for any number of dimensions (OneFlow's kernels end at eight)."""
    places = list(range(len(lengths)))
    for digit in reversed(order):
        start = places.index(digit)
        before = prod(lengths[i] for i in places[:start])
        if before > 1 and lengths[digit] > 1:
            x = x.reshape(before, lengths[digit], -1).permute(1, 0, 2)
        places = [digit, *places[:start], *places[start + 1 :]]
    return x.reshape(-1)
