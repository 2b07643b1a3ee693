"""Execution of exchanges: sends the pieces of :mod:`autoddl.costmodel.exchange` from rank to rank.

The gradient is exchanged from the target to the source. This is the adjoint, since every element is on exactly one rank at
either end.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from autoddl.costmodel.crossing import Cuts, Piece, cuts_of, held_by, moving_pieces
from autoddl.costmodel.exchange import Exchange

from .collectives import receive, send
from .load import load_oneflow
from .stepping import Ranks, Stepper, num_bytes

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["exchange", "exchange_tensor", "send_pieces"]

Tensor = Any


def exchange_tensor(x: Tensor, priced: Exchange, stepper: Stepper, dims: Sequence[int]) -> Tensor:
    """This rank's part of a tensor after an exchange; differentiable.

    Args:
        x: its part before.
        exchange: source and target distributions.
        stepper: the ranks; all of them call.
        dims: the dimension of ``x`` for each dimension of the distributions, ascending; the others are never split.
    """
    for step in priced.steps(num_bytes(x) * priced.source.num_ranks):
        x = stepper.logged(x, step)
    ends = cuts_of(priced.source, len(dims)), cuts_of(priced.target, len(dims))
    return exchange(x, stepper, *ends, tuple(dims))


def exchange(x: Tensor, ranks: Ranks, source: Cuts, target: Cuts, dims: Sequence[int] = (0, 2)) -> Tensor:
    """A tensor from one even split to another one: each rank sends what others want of it. Backward: the way back."""
    return _Function.apply(
        "exchange",
        lambda ctx, t: _exchanged(t, ranks, source, target, dims),
        lambda ctx, dy: _exchanged(dy, ranks, target, source, dims),
        x,
    )


def _exchanged(x: Tensor, ranks: Ranks, source: Cuts, target: Cuts, dims: Sequence[int]) -> Tensor:
    shape = tuple(x.shape[dim] * prod(axis.size for axis in axes) for dim, axes in zip(dims, source))
    pieces = moving_pieces(source, target, shape)
    mine, wanted = (held_by(end, ranks.rank, shape) for end in (source, target))
    stays = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(mine, wanted))
    blocks = [(stays, _block(x, stays, mine, dims))] if all(stays) else []
    blocks += [(piece.block, data) for piece, data in send_pieces(x, pieces, ranks, mine, dims)]
    return _join_blocks(blocks, dims)


def send_pieces(
    x: Tensor, pieces: Sequence[Piece], ranks: Ranks, mine: Sequence[range], dims: Sequence[int]
) -> list[tuple[Piece, Tensor]]:
    """Send this rank's pieces and receive those for it, in the order of ``pieces``, which is the same on all ranks.

    Args:
        x: this rank's part.
        pieces: all pieces of the exchange.
        ranks: the ranks.
        mine: the indices of ``x`` in each dimension of the distributions.
        dims: the dimension of ``x`` for each dimension of the distributions.

    Returns:
        The received pieces.
    """
    arrived = []
    for piece in pieces:
        if piece.source == ranks.rank:
            send(_block(x, piece.block, mine, dims), ranks.first_rank + piece.destination)
        elif piece.destination == ranks.rank:
            lengths = list(x.shape)
            for dim, indices in zip(dims, piece.block):
                lengths[dim] = len(indices)
            arrived.append((piece, receive(tuple(lengths), x.dtype, ranks.first_rank + piece.source)))
    return arrived


def _block(x: Tensor, block: Sequence[range], held: Sequence[range], dims: Sequence[int]) -> Tensor:
    """A view of a block of ``x``, which holds the indices ``held``."""
    for dim, wanted, own in zip(dims, block, held):
        x = flow.narrow(x, dim, wanted.start - own.start, len(wanted))
    return x


def _join_blocks(blocks: Sequence[tuple[Sequence[range], Tensor]], dims: Sequence[int]) -> Tensor:
    """Concatenate blocks dimension by dimension; the two distributions split the tensor into a grid."""
    rows = {tuple(indices.start for indices in block): x for block, x in blocks}
    for dim in reversed(dims):
        together: dict[tuple[int, ...], list[Tensor]] = {}
        for begin in sorted(rows):
            together.setdefault(begin[:-1], []).append(rows[begin])
        rows = {begin: parts[0] if len(parts) == 1 else flow.cat(parts, dim=dim) for begin, parts in together.items()}
    return rows[()].contiguous()
