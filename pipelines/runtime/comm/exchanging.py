"""Execution of exchanges (:mod:`autoddl.costmodel.exchange`): changes of layout by messages from rank to rank.

The backward pass exchanges the gradient from the target distribution to the source. This is the adjoint, since every element is on
exactly one rank in both distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from autoddl.costmodel.crossing import Cuts, Piece, cuts_of, held_by, moving_pieces
from autoddl.costmodel.exchange import Exchange

from ..load import load_oneflow
from ..stepping import Ranks, Stepper, num_bytes
from .collectives import receive, send

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["exchange", "exchange_tensor", "send_pieces"]

Tensor = Any


def exchange_tensor(x: Tensor, priced: Exchange, stepper: Stepper, dims: Sequence[int]) -> Tensor:
    """Run an exchange, and log and record its steps; differentiable. All ranks of ``stepper`` call.

    Args:
        x: This rank's part of the tensor in the source distribution.
        priced: The exchange: source and target distributions.
        stepper: The ranks, which log the priced steps.
        dims: Dimension of ``x`` for each dimension of the distributions, ascending. The other dimensions are never split.

    Returns:
        This rank's part of the tensor in the target distribution.
    """
    steps = priced.steps(num_bytes(x) * priced.source.num_ranks)
    ends = cuts_of(priced.source, len(dims)), cuts_of(priced.target, len(dims))
    return stepper.run_steps(lambda t: exchange(t, stepper, *ends, tuple(dims)), x, steps)


def exchange(x: Tensor, ranks: Ranks, source: Cuts, target: Cuts, dims: Sequence[int] = (0, 2)) -> Tensor:
    """Change a tensor from one even split to another: each rank sends the pieces that other ranks need; differentiable.

    Args:
        x: This rank's part of the tensor before.
        ranks: The ranks; all of them call.
        source: Mesh axes that split each dimension before.
        target: Mesh axes that split each dimension after.
        dims: Dimension of ``x`` for each dimension of the splits.
    """
    return _Function.apply(
        "exchange",
        lambda ctx, t: _exchanged(t, ranks, source, target, dims),
        lambda ctx, dy: _exchanged(dy, ranks, target, source, dims),
        x,
    )


def _exchanged(x: Tensor, ranks: Ranks, source: Cuts, target: Cuts, dims: Sequence[int]) -> Tensor:
    shape = tuple(x.shape[dim] * prod(axis.size for axis in axes) for dim, axes in zip(dims, source))
    pieces = moving_pieces(source, target, shape)
    before, after = (held_by(end, ranks.rank, shape) for end in (source, target))
    # The block that stays on this rank, then the blocks from other ranks.
    staying = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(before, after))
    blocks = [(staying, _block(x, staying, before, dims))] if all(staying) else []
    blocks += [(piece.block, data) for piece, data in send_pieces(x, pieces, ranks, before, dims)]
    return _join_blocks(blocks, dims)


def send_pieces(
    x: Tensor, pieces: Sequence[Piece], ranks: Ranks, held: Sequence[range], dims: Sequence[int]
) -> list[tuple[Piece, Tensor]]:
    """Send this rank's pieces and receive those for it, in the order of ``pieces``, which is the same on all ranks.

    Args:
        x: This rank's part of the tensor.
        pieces: All pieces of the exchange, between all ranks.
        ranks: The ranks.
        held: Indices of the elements in ``x``, for each dimension of the distributions.
        dims: Dimension of ``x`` for each dimension of the distributions.

    Returns:
        The received pieces with their tensors.
    """
    received = []
    for piece in pieces:
        if piece.source == ranks.rank:
            send(_block(x, piece.block, held, dims), ranks.first_rank + piece.destination)
        elif piece.destination == ranks.rank:
            lengths = list(x.shape)
            for dim, indices in zip(dims, piece.block):
                lengths[dim] = len(indices)
            received.append((piece, receive(tuple(lengths), x.dtype, ranks.first_rank + piece.source, x.device.type)))
    return received


def _block(x: Tensor, block: Sequence[range], held: Sequence[range], dims: Sequence[int]) -> Tensor:
    """Return a view of a block of ``x``, which holds the indices ``held``."""
    for dim, indices, own in zip(dims, block, held):
        x = flow.narrow(x, dim, indices.start - own.start, len(indices))
    return x


def _join_blocks(blocks: Sequence[tuple[Sequence[range], Tensor]], dims: Sequence[int]) -> Tensor:
    """Concatenate blocks dimension by dimension. They form a grid, since both distributions split every dimension evenly."""
    by_start = {tuple(indices.start for indices in block): x for block, x in blocks}
    for dim in reversed(dims):
        # Blocks that differ only in where they start in the last of the remaining dimensions lie side by side.
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for start in sorted(by_start):
            groups.setdefault(start[:-1], []).append(by_start[start])
        by_start = {start: parts[0] if len(parts) == 1 else flow.cat(parts, dim=dim) for start, parts in groups.items()}
    return by_start[()].contiguous()
