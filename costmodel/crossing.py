"""Crossings: the messages that bring a tensor from the ranks that have it to other ranks, which want it in another distribution.

Between two stages of a pipeline a tensor leaves one mesh and arrives on another, of as many ranks or not.  Every destination is
sent exactly what it wants, by ranks that have it: the intersection of two blocks is a block, so a message is one slice of the
tensor.  A 4 x 4 tensor from (S0:2) to (S0:2, S1:2):

    ============  ===========  =================
    from rank     to rank      rows, columns
    ============  ===========  =================
    0             0            0:2, 0:2
    0             1            0:2, 2:4
    1             2            2:4, 0:2
    1             3            2:4, 2:4
    ============  ===========  =================

Where several ranks hold the same block they share the load: the j-th of k destinations that want the same asks the holders j,
j + k, j + 2k, ... for equal parts of it; where there are fewer holders than destinations, they ask one holder each, in turn.
The count goes on from one wanted block to the next, so that no holder serves first every time.

*One list, used twice*: a cost model prices these messages, the runtime sends these very messages.  The gradient of what crossed
goes back by the crossing from the target's distribution to the source's.

Where both ends split the tensor evenly, nothing is held or wanted twice, and the list is that of all blocks in which they
overlap (:func:`overlaps`).  :mod:`.exchange` has the same messages between ranks of one mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from .distribution import Distribution
from .errors import UserError
from .sbp import PartialSum, Split

__all__ = ["Overlaps", "Piece", "busiest_elements", "crossing", "is_even_split", "overlaps"]


@dataclass(frozen=True)
class Piece:
    """One message: a slice of the logical tensor.

    Attributes:
        source: a rank of the mesh that the tensor leaves, counted from 0.
        destination: a rank of the mesh that it arrives on, counted from 0.
        block: for each dimension of the tensor the indices that are sent.
    """

    source: int
    destination: int
    block: tuple[range, ...]

    @property
    def num_elements(self) -> int:
        """How many elements it carries."""
        return prod(map(len, self.block))


class Overlaps(NamedTuple):
    """All blocks of a tensor that a rank of one mesh has and a rank of another one wants: a grid of them.

    Attributes:
        sources, destinations: the two ranks, as arrays with a dimension for each of the tensor's.
        begins, lengths: for each dimension of the tensor where the stretches begin that the grid cuts it into, and how long they
            are.
    """

    sources: np.ndarray
    destinations: np.ndarray
    begins: tuple[np.ndarray, ...]
    lengths: tuple[np.ndarray, ...]

    @property
    def num_elements(self) -> np.ndarray:
        """Of each block."""
        return reduce(np.multiply.outer, self.lengths)


def is_even_split(distribution: Distribution) -> bool:
    """Whether every axis splits the tensor, so that each element is on one rank."""
    return all(isinstance(state, Split) for state in distribution.states)


def overlaps(source: Distribution, target: Distribution, shape: Sequence[int]) -> Overlaps:
    """Where two even splits of a tensor of ``shape``, which divides at both ends, overlap.

    O(b) time for b blocks: dimension by dimension the cuts of both ends are merged, and every choice of one stretch for each
    dimension is a block.
    """
    num_dims = len(shape)
    begins, lengths, held, wanted = [], [], [], []
    for length, num_held, num_wanted in zip(shape, source.split_sizes(num_dims), target.split_sizes(num_dims)):
        cuts = np.union1d(np.arange(0, length, length // num_held), np.arange(0, length, length // num_wanted))
        begins.append(cuts)
        lengths.append(np.diff(cuts, append=length))
        held.append(cuts // (length // num_held))
        wanted.append(cuts // (length // num_wanted))
    owners, takers = _owners(source, num_dims)[np.ix_(*held)], _owners(target, num_dims)[np.ix_(*wanted)]
    return Overlaps(owners, takers, tuple(begins), tuple(lengths))


def crossing(source: Distribution, target: Distribution, shape: Sequence[int]) -> tuple[Piece, ...]:
    """The messages by which a tensor of ``shape`` gets from ``source`` to ``target``, ordered by destination, then by place.

    The ranks of the two meshes are different ones, so everything is sent: ``num_ranks`` of the target times its local size.

    Raises:
        UserError: the tensor does not divide at either end, or is a sum that has not been made yet.
    """
    return _crossing(source, target, tuple(shape))


def busiest_elements(pieces: Iterable[Piece]) -> int:
    """The most elements that any one rank sends, or receives: what a crossing takes where all links work at once."""
    loads: dict[tuple[bool, int], int] = {}
    for piece in pieces:
        for end in ((False, piece.source), (True, piece.destination)):
            loads[end] = loads.get(end, 0) + piece.num_elements
    return max(loads.values(), default=0)


@lru_cache(maxsize=4096)
def _crossing(source: Distribution, target: Distribution, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    for end in (source, target):
        if any(isinstance(state, PartialSum) for state in end.states):
            raise UserError(f"a tensor cannot cross from {source} to {target}: {end} holds summands, reduce them first")
        end.local_shape(shape)
    if is_even_split(source) and is_even_split(target):
        return _pieces(overlaps(source, target, shape))
    starts, lengths = _blocks(source, shape)
    wanted_starts, wanted_lengths = _blocks(target, shape)
    begin = np.maximum(starts[:, None], wanted_starts[None])
    end = np.minimum((starts + lengths)[:, None], (wanted_starts + wanted_lengths)[None])
    meets = (begin < end).all(axis=2)
    num_twins: dict[tuple[int, ...], int] = {}
    turns: dict[
        int, dict[tuple[int, ...], int]
    ] = {}  # of each group of holders, by its first: which wanted block came when
    pieces = []
    for destination in range(target.num_ranks):
        wanted = tuple(wanted_starts[destination].tolist())
        twin = num_twins.get(wanted, 0)
        num_twins[wanted] = twin + 1
        num_all = int((wanted_starts == wanted_starts[destination]).all(axis=1).sum())
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank in np.flatnonzero(meets[:, destination]).tolist():
            holders.setdefault(tuple(begin[rank, destination].tolist()), []).append(rank)
        for place, ranks in sorted(holders.items()):
            block = tuple(map(range, place, end[ranks[0], destination].tolist()))
            turn = turns.setdefault(ranks[0], {}).setdefault(wanted, len(turns[ranks[0]]))
            if num_all < len(ranks):
                first = turn % len(ranks)
                asked = (ranks[first:] + ranks[:first])[twin::num_all]
            else:
                asked = [ranks[(turn * num_all + twin) % len(ranks)]]
            parts = _parts(block, len(asked))
            pieces += [Piece(rank, destination, part) for rank, part in zip(asked, parts)]
    return tuple(pieces)


def _pieces(found: Overlaps) -> tuple[Piece, ...]:
    stretches = [
        [range(begin, begin + length) for begin, length in zip(begins.tolist(), lengths.tolist())]
        for begins, lengths in zip(found.begins, found.lengths)
    ]
    pairs = zip(found.sources.ravel().tolist(), found.destinations.ravel().tolist(), product(*stretches))
    # Blocks come by their places, and keep that order among those of one destination.
    return tuple(sorted((Piece(*piece) for piece in pairs), key=lambda piece: piece.destination))


@lru_cache(maxsize=4096)
def _owners(distribution: Distribution, num_dims: int) -> np.ndarray:
    """The rank that holds each block of an even split, as an array with the blocks' indices."""
    ranks = np.arange(distribution.num_ranks)
    index = [np.zeros_like(ranks) for _ in range(num_dims)]
    for axis, state in zip(distribution.axes, distribution.states):
        assert isinstance(state, Split), distribution
        index[state.dim] = index[state.dim] * axis.size + ranks // axis.stride % axis.size
    owners = np.empty(distribution.split_sizes(num_dims), dtype=int)
    owners[tuple(index)] = ranks
    return owners


def _blocks(distribution: Distribution, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """For every rank and dimension where its block begins, and how long blocks are."""
    lengths = np.array(distribution.local_shape(shape))
    blocks = [distribution.block(rank, len(shape)) for rank in range(distribution.num_ranks)]
    return np.array(blocks).reshape(len(blocks), len(shape)) * lengths, lengths


def _parts(block: tuple[range, ...], count: int) -> list[tuple[range, ...]]:
    """A block in at most ``count`` parts, as even as can be, along its longest dimension."""
    longest = max(range(len(block)), key=lambda dim: len(block[dim]))
    whole = block[longest]
    count = min(count, len(whole))
    cuts = [whole.start + len(whole) * i // count for i in range(count + 1)]
    return [(*block[:longest], range(a, b), *block[longest + 1 :]) for a, b in zip(cuts, cuts[1:])]
