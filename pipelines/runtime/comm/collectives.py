"""Differentiable collectives along one mesh axis, on local tensors, that send no more bytes than theory requires.

Along an axis of p ranks a logical tensor X is in one of the states S(d) (split along dimension d), B (a copy on each rank) or P (a
summand on each rank), and rank k holds the local tensor x_k. Each function takes x_k and returns the local tensor of another state
of the same X. The backward pass of a function is its adjoint, which is again one of these functions, on the dual states: the
gradient of a copy is a summand and the gradient of a summand is a copy, so S* = S, B* = P, P* = B. The table gives the bytes that
each rank sends, where n is the size of X, or of x_k for the all-to-all:

=====================  ===============  ===============  ===================================  ====================
function               forward          backward         backward function                    bytes sent, each way
=====================  ===============  ===============  ===================================  ====================
`all_gather`           S(d) -> B        P -> S(d)        reduce-scatter                       (p-1)/p n
`reduce_scatter`       P -> S(d)        S(d) -> B        all-gather                           (p-1)/p n
`all_reduce`           P -> B           P -> B           all-reduce                           2 (p-1)/p n
`all_to_all`           S(c) -> S(s)     S(s) -> S(c)     the inverse all-to-all               (p-1)/p n
`take_shard`           B -> S(d)        S(d) -> P        zero padding                         0
`pad_shard`            S(d) -> P        B -> S(d)        taking the shard                     0
=====================  ===============  ===============  ===================================  ====================

A backward pass is the adjoint of the map from the inputs of all ranks to the outputs of all ranks. So an all-reduced loss counts p
times: start its backward pass with a gradient of 1/p on each rank (or of 1 on one rank), not of 1 on all.

**Implementation.** OneFlow sends the ideal bytes if a tensor on a *one-dimensional* placement changes S(0) -> B, P -> S(0), P -> B
or S(0) -> S(1), and several times the bytes otherwise. So the placement of a collective is the group of ranks along the axis, in
ascending order, and the tensor is packed into a matrix of p rows, one for each rank of the group: one local copy moves any tensor
dimension to dimension 0. The local data is written to the storage of an empty global tensor, because ``to_global`` on a local
tensor exchanges shapes and has to be called by every rank of the job. Therefore *only the ranks of the group call*. All groups
along an axis run at once, without waiting for each other. Two ranks have to make the calls that they share in the same order.

The all-to-all of CPU ranks is a tournament: in each of p - 1 rounds (p, if p is odd) the ranks of a group form pairs, and the two
of a pair gather what they have for each other (`swap`). OneFlow's own sends and receives one piece after the other, so that at
most one direction of a link is in use; over four hosts it takes about twice as long. NCCL, on GPUs, does all at once. Two CPU ranks
of different hosts shake hands before they exchange much data (:mod:`.handshake`).

Unexpected details of OneFlow (0.9.0, CPU):

- The ranks of a group need not be neighbours, and need not have made the same calls before: placements such as [1, 3], which ranks
  0 and 2 never use, give correct values, also alternating at random with other placements.
- `oneflow.autograd.Function` accepts tensors only; its base class, which is used here, accepts any pair of callables.
- On CPU ranks, float16 and bfloat16 abort the process in a reduction, and neither they nor uint8 have an all-to-all: they raise
  UserError here. NCCL, which GPUs communicate with, has both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoddl.costmodel.devices import CPU, GPU
from autoddl.costmodel.errors import UserError

from ..backend import is_on_gpu, placement_of, type_name
from ..load import load_oneflow
from .handshake import NO_HANDSHAKE, Handshake
from .mesh import RankAxis, partners_of

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "pad_shard",
    "receive",
    "reduce_scatter",
    "send",
    "shift",
    "sum_over",
    "swap",
    "take_shard",
]

Tensor = Any  # oneflow.Tensor; OneFlow has no type annotations

#: Types that can be sent.
_MOVABLE = (flow.float32, flow.float64, flow.int8, flow.int32, flow.int64, flow.bool)
#: Types that can be summed over ranks.
_SUMMABLE = (flow.float32, flow.float64, flow.int32, flow.int64)
#: Types that can be sent and summed on GPUs only.
_HALVES = (flow.float16, flow.bfloat16)


# ---- Differentiable collectives ---------------------------------------------------------------------------------------


def all_gather(x: Tensor, axis: RankAxis, dim: int) -> Tensor:
    """S(dim) -> B: concatenate the shards of the group's ranks along ``dim``, in rank order.

    Args:
        x: Local tensor, of the same shape on all ranks of the group.
        axis: Mesh axis; every group of ranks along it gathers.
        dim: Dimension along which shards are concatenated; its size in the result is ``x.shape[dim] * axis.size``.

    Raises:
        UserError: ``dim`` is not a dimension of ``x``, or the type of ``x`` cannot be sent.
    """
    _check_call(x, axis, "all-gather", _MOVABLE)
    dim = _non_negative_dim(x, dim, "all-gather")
    return _differentiable(
        "all_gather", lambda t: _all_gather(t, axis, dim), lambda dy: _reduce_scatter(dy, axis, dim), x, axis
    )


def reduce_scatter(x: Tensor, axis: RankAxis, dim: int) -> Tensor:
    """P -> S(dim): sum over the group's ranks, each of which keeps its slice along ``dim``.

    Args:
        x: Local tensor, of the same shape on all ranks of the group.
        axis: Mesh axis; every group of ranks along it sums.
        dim: Dimension to split; its size in the result is ``x.shape[dim] / axis.size``.

    Raises:
        UserError: ``axis.size`` does not divide ``x.shape[dim]``, ``dim`` is not a dimension of ``x``, or the type of ``x`` cannot
            be summed.
    """
    _check_call(x, axis, "reduce-scatter", _SUMMABLE)
    dim = _non_negative_dim(x, dim, "reduce-scatter")
    _check_divides(x, axis, dim, "reduce-scatter")
    return _differentiable(
        "reduce_scatter", lambda t: _reduce_scatter(t, axis, dim), lambda dy: _all_gather(dy, axis, dim), x, axis
    )


def all_reduce(x: Tensor, axis: RankAxis) -> Tensor:
    """P -> B: sum over the group's ranks; each of them gets the sum.

    Raises:
        UserError: The type of ``x`` cannot be summed.
    """
    _check_call(x, axis, "all-reduce", _SUMMABLE)
    return _differentiable("all_reduce", lambda t: _all_reduce(t, axis), lambda dy: _all_reduce(dy, axis), x, axis)


def all_to_all(x: Tensor, axis: RankAxis, split_dim: int, concat_dim: int) -> Tensor:
    """S(concat_dim) -> S(split_dim): exchange pieces between all ranks of the group.

    Each rank splits ``x`` along ``split_dim``, sends piece k to the k-th rank of the group, and concatenates the pieces that it
    receives along ``concat_dim``.

    Raises:
        UserError: ``axis.size`` does not divide ``x.shape[split_dim]``, the dimensions are equal or not dimensions of ``x``, or
            the type of ``x`` cannot be sent.
    """
    _check_call(x, axis, "all-to-all", _MOVABLE)
    split_dim, concat_dim = (_non_negative_dim(x, dim, "all-to-all") for dim in (split_dim, concat_dim))
    if split_dim == concat_dim:
        raise UserError(f"an all-to-all splits and concatenates dimension {split_dim}; the two must differ")
    _check_divides(x, axis, split_dim, "all-to-all")
    return _differentiable(
        "all_to_all",
        lambda t: _all_to_all(t, axis, split_dim, concat_dim),
        lambda dy: _all_to_all(dy, axis, concat_dim, split_dim),
        x,
        axis,
    )


def take_shard(x: Tensor, axis: RankAxis, dim: int) -> Tensor:
    """B -> S(dim): take this rank's slice along ``dim``; nothing is sent.

    Raises:
        UserError: ``axis.size`` does not divide ``x.shape[dim]``, or ``dim`` is not a dimension of ``x``.
    """
    _check_call(x, axis, "slice")
    dim = _non_negative_dim(x, dim, "slice")
    _check_divides(x, axis, dim, "slice")
    return _differentiable(
        "take_shard", lambda t: _take_shard(t, axis, dim), lambda dy: _pad_shard(dy, axis, dim), x, axis
    )


def pad_shard(x: Tensor, axis: RankAxis, dim: int) -> Tensor:
    """S(dim) -> P: put the shard at its position along ``dim`` of a tensor of zeros; nothing is sent.

    Raises:
        UserError: ``dim`` is not a dimension of ``x``.
    """
    _check_call(x, axis, "padding")
    dim = _non_negative_dim(x, dim, "padding")
    return _differentiable(
        "pad_shard", lambda t: _pad_shard(t, axis, dim), lambda dy: _take_shard(dy, axis, dim), x, axis
    )


def sum_over(x: Tensor, ranks: tuple[int, ...], handshake: Handshake = NO_HANDSHAKE) -> Tensor:
    """P -> B: sum a vector over any ranks of the job, in ascending order and including this one; without autograd."""
    if len(ranks) == 1:
        return x
    return _change_state(x, ranks, (x.numel(),), flow.sbp.partial_sum, flow.sbp.broadcast, handshake)


# ---- Point to point -----------------------------------------------------------------------------------------------------


def send(x: Tensor, to_rank: int) -> None:
    """Send a local tensor; the other rank has to call `receive` with its shape and type.

    The function returns at once. OneFlow runs transfers in the order in which they are issued, so two ranks that both send to each
    other before they receive deadlock.

    Raises:
        UserError: The type of ``x`` cannot be sent, or ``to_rank`` is not another rank of the job.
    """
    _check_type(x.dtype, _MOVABLE, "point-to-point transfer", is_on_gpu(x))
    _check_peer(to_rank, "send to")
    flow.comm.send(x.contiguous(), to_rank, send_meta=False)


def receive(shape: tuple[int, ...], dtype: Any, from_rank: int, device: str) -> Tensor:
    """Receive a local tensor that another rank sends with `send`.

    Args:
        shape: Shape of the tensor.
        dtype: Type of the tensor.
        from_rank: Sending rank.
        device: Type of device that the tensor lies on.

    Raises:
        UserError: The type cannot be sent, or ``from_rank`` is not another rank of the job.
    """
    _check_type(dtype, _MOVABLE, "point-to-point transfer", device == GPU)
    _check_peer(from_rank, "receive from")
    return flow.comm.recv(from_rank, shape=flow.Size(shape), dtype=dtype, device=flow.device(device))


def swap(x: Tensor, other: int, handshake: Handshake = NO_HANDSHAKE) -> Tensor:
    """Give a local tensor to another rank, and return its tensor of the same shape and type; without autograd.

    Both directions are in use at once, unlike with `send` and `receive` one after the other.
    """
    pair = sorted((flow.env.get_rank(), other))
    row, shape = x.reshape(1, -1), (2, x.numel())
    both = _change_state(row, tuple(pair), shape, flow.sbp.split(0), flow.sbp.broadcast, handshake)
    return both[pair.index(other)].reshape(tuple(x.shape))


def shift(x: Tensor, axis: RankAxis, backwards: bool = False) -> Tensor:
    """Send a tensor to the next rank of a ring, and return that of the previous one; without autograd.

    Args:
        x: Local tensor, of the same shape on all ranks of the group.
        axis: Mesh axis; every group of ranks along it is a ring, in rank order.
        backwards: Whether the ring is in the opposite order.
    """
    group, place = axis.group(flow.env.get_rank()), axis.index(flow.env.get_rank())
    following, previous = group[(place + 1) % axis.size], group[place - 1]
    if following == previous:
        return swap(x, following, axis.handshake)
    if backwards:
        following, previous = previous, following
    # Every second rank sends first: two ranks that both send before they receive would wait for each other.
    if place % 2 == 0:
        send(x, following)
        return receive(tuple(x.shape), x.dtype, previous, x.device.type)
    arrived = receive(tuple(x.shape), x.dtype, previous, x.device.type)
    send(x, following)
    return arrived


# ---- Local tensors in, local tensors out: no autograd, no checks -------------------------------------------------------


def _all_gather(x: Tensor, axis: RankAxis, dim: int) -> Tensor:
    rows = _exchange(x.reshape(1, -1), axis, (axis.size, x.numel()), flow.sbp.split(0), flow.sbp.broadcast)
    return _join(rows.reshape(axis.size, *x.shape), dim)


def _reduce_scatter(x: Tensor, axis: RankAxis, dim: int) -> Tensor:
    pieces = _cut(x, axis.size, dim)
    row = _exchange(pieces, axis, tuple(pieces.shape), flow.sbp.partial_sum, flow.sbp.split(0))
    return row.reshape(*pieces.shape[1:])


def _all_reduce(x: Tensor, axis: RankAxis) -> Tensor:
    flat = _exchange(x.reshape(-1), axis, (x.numel(),), flow.sbp.partial_sum, flow.sbp.broadcast)
    return flat.reshape(tuple(x.shape))


def _all_to_all(x: Tensor, axis: RankAxis, split_dim: int, concat_dim: int) -> Tensor:
    pieces = _cut(x, axis.size, split_dim)
    if not is_on_gpu(x):
        return _join(_swap_pieces(pieces, axis), concat_dim)
    shape = (axis.size, axis.size, pieces[0].numel())  # (sender, receiver, data)
    got = _exchange(pieces.reshape(1, *shape[1:]), axis, shape, flow.sbp.split(0), flow.sbp.split(1))
    return _join(got.reshape(*pieces.shape), concat_dim)


def _swap_pieces(pieces: Tensor, axis: RankAxis) -> Tensor:
    """Give piece k to the k-th rank of the group; returns the pieces from the ranks of the group, in their order."""
    me, group = axis.index(flow.env.get_rank()), axis.group(flow.env.get_rank())
    arrived = [pieces[me]] * axis.size
    for partner in partners_of(me, axis.size):
        if partner is not None:
            arrived[partner] = swap(pieces[partner], group[partner], axis.handshake)
    return flow.stack(arrived, dim=0)


def _take_shard(x: Tensor, axis: RankAxis, dim: int) -> Tensor:
    length = x.shape[dim] // axis.size
    return flow.narrow(x, dim, axis.index(flow.env.get_rank()) * length, length).contiguous()


def _pad_shard(x: Tensor, axis: RankAxis, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= axis.size
    whole = flow.zeros(*shape, dtype=x.dtype, device=x.device)
    flow.narrow(whole, dim, axis.index(flow.env.get_rank()) * x.shape[dim], x.shape[dim]).copy_(x)
    return whole


def _exchange(x: Tensor, axis: RankAxis, shape: tuple[int, ...], before: Any, after: Any) -> Tensor:
    """As `_change_state`, on the group of this rank along an axis."""
    return _change_state(x, axis.group(flow.env.get_rank()), shape, before, after, axis.handshake)


def _change_state(
    x: Tensor, group: tuple[int, ...], shape: tuple[int, ...], before: Any, after: Any, handshake: Handshake
) -> Tensor:
    """Change the state of a tensor on the group's ranks, and return this rank's new local part.

    Args:
        x: This rank's local part in the old state.
        group: Ranks, in ascending order.
        shape: Logical shape of the tensor.
        before: Old state.
        after: New state.
        handshake: Before which exchanges of two ranks there is a handshake.
    """
    tensor = flow.empty(*shape, dtype=x.dtype, placement=placement_of(x.device.type, group), sbp=before)
    own = tensor.to_local()  # shares the storage
    flow._C.assign_local_tensor(own, x.contiguous())
    # All collectives of two ranks are exchanges of halves of the tensor.
    if x.dtype in _SUMMABLE and handshake.is_due(group, tensor.numel() * x.element_size() / 2) and not is_on_gpu(x):
        _shake_hands(own, *group)
    return tensor.to_global(sbp=after).to_local()


def _shake_hands(x: Tensor, lower: int, higher: int) -> None:
    """Let the exchange of a tensor begin at about the same time on two ranks; see :mod:`.handshake`."""
    if flow.env.get_rank() == lower:
        send(flow.ones(1, device=x.device), higher)
        return
    token = receive((1,), flow.float32, lower, CPU)
    place = (slice(0, 1),) * len(x.shape)
    first = x[place]
    x[place] = flow.where((token > 0).reshape(*first.shape), first, first)


def _cut(x: Tensor, num_pieces: int, dim: int) -> Tensor:
    """Split along ``dim`` into contiguous pieces: (..., n, ...) becomes (num_pieces, ..., n / num_pieces, ...)."""
    shape = tuple(x.shape)
    apart = x.reshape(*shape[:dim], num_pieces, shape[dim] // num_pieces, *shape[dim + 1 :])
    order = [dim, *(i for i in range(len(shape) + 1) if i != dim)]
    return apart.permute(*order).contiguous()


def _join(pieces: Tensor, dim: int) -> Tensor:
    """Concatenate pieces along ``dim``, the inverse of `_cut`: (num_pieces, ..., m, ...) becomes (..., num_pieces * m, ...)."""
    num_pieces, *shape = pieces.shape
    order = [i + 1 for i in range(len(shape))]
    order.insert(dim, 0)
    together = [*shape[:dim], num_pieces * shape[dim], *shape[dim + 1 :]]
    return pieces.permute(*order).contiguous().reshape(*together)


def _differentiable(
    name: str, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor], x: Tensor, axis: RankAxis
) -> Tensor:
    """Return ``forward(x)``, with ``backward`` as its gradient function; on an axis of one rank return ``x``."""
    if axis.size == 1:
        return x
    return _Function.apply(name, lambda ctx, t: forward(t), lambda ctx, dy: backward(dy), x)


# ---- Checks: without them OneFlow would abort the process ---------------------------------------------------------------


def _check_call(x: Tensor, axis: RankAxis, what: str, types: tuple[Any, ...] = ()) -> None:
    """Check that the type is one of ``types`` (if any are given) and that this rank is on the mesh of ``axis``."""
    if types:
        _check_type(x.dtype, types, what, is_on_gpu(x))
    world_size = flow.env.get_world_size()
    if axis.first_rank + axis.num_ranks > world_size:
        last = axis.first_rank + axis.num_ranks - 1
        raise UserError(f"{what} on a mesh of ranks {axis.first_rank} to {last}, but the job has {world_size} ranks")
    axis.index(flow.env.get_rank())


def _non_negative_dim(x: Tensor, dim: int, what: str) -> int:
    """Return ``dim``, which may count from the last dimension as -1, as a non-negative number."""
    num_dims = len(x.shape)
    if not -num_dims <= dim < num_dims:
        raise UserError(
            f"{what} along dimension {dim} of a tensor of shape {tuple(x.shape)}, which has {num_dims} dimensions"
        )
    return dim % num_dims


def _check_type(dtype: Any, types: tuple[Any, ...], what: str, on_gpu: bool) -> None:
    types = (*types, *_HALVES) if on_gpu else types
    if dtype not in types:
        names = ", ".join(type_name(t) for t in types)
        ranks = "GPUs" if on_gpu else "CPU ranks"
        raise UserError(f"{what} of {type_name(dtype)} is not possible on {ranks}; possible are {names}")


def _check_divides(x: Tensor, axis: RankAxis, dim: int, what: str) -> None:
    if x.shape[dim] % axis.size:
        raise UserError(
            f"{what} over {axis.size} ranks of dimension {dim} of a tensor of shape {tuple(x.shape)}: "
            f"{axis.size} does not divide {x.shape[dim]}"
        )


def _check_peer(rank: int, what: str) -> None:
    me, world_size = flow.env.get_rank(), flow.env.get_world_size()
    if not 0 <= rank < world_size or rank == me:
        raise UserError(f"rank {me} cannot {what} rank {rank}; it must be another of the ranks 0 to {world_size - 1}")
