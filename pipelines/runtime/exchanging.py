"""Executing exchanges: the very pieces of :mod:`autoddl.costmodel.exchange`, from rank to rank.

The gradient goes back by the exchange from the target to the source, which is the adjoint: every element is on one rank at either
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.crossing import Piece
from autoddl.costmodel.distribution import Distribution
from autoddl.costmodel.exchange import Exchange

from .collectives import receive, send
from .load import load_oneflow
from .stepping import Ranks, Stepper, num_bytes

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["exchange_blocks", "exchange_tensor", "held_by", "send_pieces"]

Tensor = Any


def exchange_tensor(x: Tensor, exchange: Exchange, stepper: Stepper, dims: Sequence[int]) -> Tensor:
    """This rank's part of a tensor after an exchange; differentiable.

    Args:
        x: its part before.
        stepper: the ranks; all of them call.
        dims: which dimension of ``x`` each dimension of the distributions is, ascending; others are whole everywhere.
    """
    for step in exchange.steps(num_bytes(x) * exchange.source.num_ranks):
        x = stepper.logged(x, step)
    return _Function.apply(
        "exchange",
        lambda ctx, t: _exchanged(t, exchange, stepper, dims),
        lambda ctx, dy: _exchanged(dy, exchange.reversed(), stepper, dims),
        x,
    )


def _exchanged(x: Tensor, exchange: Exchange, stepper: Stepper, dims: Sequence[int]) -> Tensor:
    num_parts = exchange.source.split_sizes(len(dims))
    shape = tuple(x.shape[dim] * count for dim, count in zip(dims, num_parts))
    mine, wanted = (held_by(end, stepper.rank, shape) for end in (exchange.source, exchange.target))
    return exchange_blocks(x, exchange.pieces(shape), stepper, mine, wanted, dims)


def exchange_blocks(
    x: Tensor,
    pieces: Sequence[Piece],
    ranks: Ranks,
    mine: Sequence[range],
    wanted: Sequence[range],
    dims: Sequence[int],
) -> Tensor:
    """What this rank wants of a tensor, of what it has and what others send; arguments as of `send_pieces`."""
    stays = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(mine, wanted))
    blocks = [(stays, _block(x, stays, mine, dims))] if all(stays) else []
    blocks += [(piece.block, data) for piece, data in send_pieces(x, pieces, ranks, mine, dims)]
    return _gridded(blocks, dims)


def send_pieces(
    x: Tensor, pieces: Sequence[Piece], ranks: Ranks, mine: Sequence[range], dims: Sequence[int]
) -> list[tuple[Piece, Tensor]]:
    """Send this rank's pieces and receive what is for it, in the order of ``pieces``, which is the same on all ranks.

    Args:
        x: what this rank holds: of each dimension of the distributions the indices ``mine``.

    Returns:
        What came, piece by piece.
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


def held_by(distribution: Distribution, rank: int, shape: tuple[int, ...]) -> tuple[range, ...]:
    """For each dimension of a tensor of ``shape`` the indices that a rank holds."""
    return tuple(range(held.start, held.stop) for held in distribution.slices(rank, shape))


def _block(x: Tensor, block: Sequence[range], held: Sequence[range], dims: Sequence[int]) -> Tensor:
    """A view of a block of what ``x`` holds."""
    for dim, wanted, own in zip(dims, block, held):
        x = flow.narrow(x, dim, wanted.start - own.start, len(wanted))
    return x


def _gridded(blocks: Sequence[tuple[Sequence[range], Tensor]], dims: Sequence[int]) -> Tensor:
    """The tensor that blocks make up; what the two ends cut it into is a grid, so that they are joined dimension by dimension."""
    rows = {tuple(indices.start for indices in block): x for block, x in blocks}
    for dim in reversed(dims):
        together: dict[tuple[int, ...], list[Tensor]] = {}
        for begin in sorted(rows):
            together.setdefault(begin[:-1], []).append(rows[begin])
        rows = {begin: parts[0] if len(parts) == 1 else flow.cat(parts, dim=dim) for begin, parts in together.items()}
    return rows[()].contiguous()
