"""Blocks of a tensor that ranks send to each other, where collectives along a mesh axis cannot bring it to another layout."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import oneflow as flow

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
    lengths = [x.shape[0] * prod(a.size for a in source.axes(0)), x.shape[2] * source.num_parts]
    mine, blocks = held_by(source, ranks.rank, *lengths), []
    for k in range(1 << (source.num_ranks - 1).bit_length()):
        other = ranks.rank ^ k
        for sender, receiver in sorted({(ranks.rank, other), (other, ranks.rank)}) if other < source.num_ranks else ():
            samples, features = map(overlap, held_by(source, sender, *lengths), held_by(target, receiver, *lengths))
            if not (samples and features):
                continue
            if sender == ranks.rank:
                part = flow.narrow(x, 0, samples.start - mine[0].start, len(samples))
                part = flow.narrow(part, 2, features.start - mine[1].start, len(features)).contiguous()
                if receiver != ranks.rank:
                    flow.comm.send(part, ranks.first_rank + receiver, send_meta=False)
                    continue
            else:
                shape = flow.Size((len(samples), x.shape[1], len(features)))
                part = flow.comm.recv(ranks.first_rank + sender, shape=shape, dtype=x.dtype, device=flow.device("cpu"))
            blocks.append((samples.start, features.start, part))
    rows = []
    for _, side_by_side in groupby(sorted(blocks, key=lambda found: found[:2]), key=lambda found: found[0]):
        parts = [part for *_, part in side_by_side]
        rows.append(parts[0] if len(parts) == 1 else flow.cat(parts, dim=2))
    return rows[0] if len(rows) == 1 else flow.cat(rows, dim=0)


class Piece(NamedTuple):
    """A message: of every part (samples, features) a block, from one rank to another, each counted within its worker."""

    source: int
    destination: int
    samples: range
    features: range


def pieces(source: Layout, target: Layout, num_samples: int, num_features: int) -> Iterator[Piece]:
    """The messages that bring a tensor from one layout to the other, on other ranks."""
    for destination in range(target.num_ranks):
        wanted = held_by(target, destination, num_samples, num_features)
        for rank in range(source.num_ranks):
            samples, features = map(overlap, held_by(source, rank, num_samples, num_features), wanted)
            if samples and features:
                yield Piece(rank, destination, samples, features)


def held_by(layout: Layout, rank: int, num_samples: int, num_features: int) -> tuple[range, range]:
    """The block (samples, features) that a rank holds between layers."""
    found = []
    for axes, length in ((layout.axes(0), num_samples), (layout.features, num_features)):
        parts = prod(axis.size for axis in axes)
        if length % parts:
            raise ValueError(f"{length} samples or features do not divide over {parts} ranks")
        width = length // parts
        start = place_on(axes, rank) * width
        found.append(range(start, start + width))
    return found[0], found[1]


def overlap(one: range, other: range) -> range:
    """What two ranges have in common."""
    return range(max(one.start, other.start), min(one.stop, other.stop))
