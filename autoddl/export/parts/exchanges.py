"""Blocks of a tensor that ranks send to each other: between layers, where collectives along a mesh axis cannot bring it to another
layout, and between stages."""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import oneflow as flow

from autoddl.costmodel.crossing import Piece
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.exchanging import exchange_blocks
from autoddl.pipelines.runtime.layouts import Layout, place_on
from autoddl.pipelines.runtime.stepping import Ranks

Tensor = Any
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase


def exchange(x: Tensor, ranks: Ranks, source: Layout, target: Layout) -> Tensor:
    """(samples, rows, features) from one layout to the other: each rank sends what others want of it. Backward: the way back."""
    return _Function.apply(
        "exchange",
        lambda ctx, t: redistributed(t, ranks, source, target),
        lambda ctx, dy: redistributed(dy, ranks, target, source),
        x,
    )


def redistributed(x: Tensor, ranks: Ranks, source: Layout, target: Layout) -> Tensor:
    """This rank's block at ``target``, of that at ``source``.

    In round k ranks r and r ^ k send to each other, the lower one first: so none waits for another one in a circle.
    """
    shape = x.shape[0] * prod(axis.size for axis in source.axes(0)), x.shape[2] * source.num_parts
    moving = [piece for piece in pieces(source, target, *shape) if piece.source != piece.destination]
    moving.sort(key=lambda piece: (piece.source ^ piece.destination, piece.source))
    mine, wanted = (held_by(end, ranks.rank, *shape) for end in (source, target))
    return exchange_blocks(x, moving, ranks, mine, wanted, (0, 2))


@functools.cache
def pieces(source: Layout, target: Layout, num_samples: int, num_features: int) -> tuple[Piece, ...]:
    """The messages that bring a tensor from one layout to the other, by destination; ranks are counted within either."""
    found = []
    for destination in range(target.num_ranks):
        wanted = held_by(target, destination, num_samples, num_features)
        for rank in range(source.num_ranks):
            held = held_by(source, rank, num_samples, num_features)
            block = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(held, wanted))
            if all(block):
                found.append(Piece(rank, destination, block))
    return tuple(found)


def held_by(layout: Layout, rank: int, num_samples: int, num_features: int) -> tuple[range, ...]:
    """The block (samples, features) that a rank holds between layers."""
    found = []
    for axes, length in ((layout.axes(0), num_samples), (layout.features, num_features)):
        parts = prod(axis.size for axis in axes)
        if length % parts:
            raise UserError(f"{length} samples or features do not divide over {parts} ranks")
        width = length // parts
        start = place_on(axes, rank) * width
        found.append(range(start, start + width))
    return tuple(found)
