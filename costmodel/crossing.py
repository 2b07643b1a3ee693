"""Crossings: the messages that move a tensor from one mesh of ranks to another (cross-mesh resharding).

Between two stages of a pipeline a tensor leaves one mesh and arrives on another, whose size may differ.  Every destination
receives exactly its block from ranks that hold it.  The intersection of two blocks is a block, so each message is one slice of
the tensor.  A 4 x 4 tensor from (S0:2) to (S0:2, S1:2):

    ============  ===========  =================
    from rank     to rank      rows, columns
    ============  ===========  =================
    0             0            0:2, 0:2
    0             1            0:2, 2:4
    1             2            2:4, 0:2
    1             3            2:4, 2:4
    ============  ===========  =================

Ranks that hold the same block share the load.  If k destinations need the same block, the j-th receives equal parts of it from
the holders j, j + k, j + 2k, ...  If there are fewer holders than destinations, each destination receives from one holder,
round robin.  The round robin continues from one block to the next, so that the first holder is not the busiest.

*One list, used twice*: the cost model prices these messages and the runtime sends them.  The gradient of a tensor returns by the
crossing from the target's distribution to the source's.

If both ends split the tensor evenly, each element has one holder and one destination, and the messages are the overlaps of the
blocks of both ends (:func:`even_crossing`).  :mod:`.exchange` has the same messages between ranks of one mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .distribution import Axis, Distribution, flat_coordinate
from .errors import UserError
from .sbp import PartialSum, Split

__all__ = [
    "Cuts",
    "Overlaps",
    "Piece",
    "crossing",
    "cuts_of",
    "even_crossing",
    "held_by",
    "is_even_split",
    "moving_pieces",
    "overlaps",
]

#: An even split: for each dimension of a tensor the mesh axes that cut it, as `Distribution` lists them. They are all axes.
Cuts = tuple[tuple[Axis, ...], ...]


@dataclass(frozen=True)
class Piece:
    """One message: a slice of the logical tensor.

    Attributes:
        source: the sending rank, an index into the source mesh.
        destination: the receiving rank, an index into the target mesh.
        block: the indices that are sent, for each dimension of the tensor.
    """

    source: int
    destination: int
    block: tuple[range, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of the message."""
        return prod(map(len, self.block))


class Overlaps(NamedTuple):
    """The overlaps of the blocks of two even splits: a grid of blocks with one dimension per dimension of the tensor.

    Attributes:
        sources, destinations: the sending and the receiving rank of each block, arrays of the grid's shape.
        begins, lengths: first index and length of each interval of the grid, for each dimension of the tensor.
    """

    sources: np.ndarray
    destinations: np.ndarray
    begins: tuple[np.ndarray, ...]
    lengths: tuple[np.ndarray, ...]

    @property
    def num_elements(self) -> np.ndarray:
        """Number of elements of each block, an array of the grid's shape."""
        return reduce(np.multiply.outer, self.lengths)


def cuts_of(distribution: Distribution, num_dims: int) -> Cuts:
    """The axes that cut each of ``num_dims`` dimensions."""
    pairs = list(zip(distribution.axes, distribution.states))
    return tuple(tuple(axis for axis, state in pairs if state == Split(dim)) for dim in range(num_dims))


def held_by(cuts: Cuts, rank: int, shape: Sequence[int]) -> tuple[range, ...]:
    """For each dimension of a tensor of ``shape`` the indices that a rank holds.

    Raises:
        UserError: a dimension does not divide into its slices.
    """
    found = []
    for axes, length, parts in zip(cuts, shape, _num_slices(cuts)):
        if length % parts:
            raise UserError(f"{length} does not divide over {parts} ranks")
        start = flat_coordinate(axes, rank) * (length // parts)
        found.append(range(start, start + length // parts))
    return tuple(found)


def is_even_split(distribution: Distribution) -> bool:
    """Whether every axis splits the tensor, so that each element is on one rank."""
    return all(isinstance(state, Split) for state in distribution.states)


def overlaps(source: Cuts, target: Cuts, shape: Sequence[int]) -> Overlaps:
    """The overlaps of two even splits of a tensor of ``shape``, which must be divisible at both ends.

    The cuts of both ends are merged in each dimension; each combination of intervals is a block.  O(b) time for b blocks.
    """
    begins, lengths, held, wanted = [], [], [], []
    for length, num_held, num_wanted in zip(shape, _num_slices(source), _num_slices(target)):
        cuts = np.union1d(np.arange(0, length, length // num_held), np.arange(0, length, length // num_wanted))
        begins.append(cuts)
        lengths.append(np.diff(cuts, append=length))
        held.append(cuts // (length // num_held))
        wanted.append(cuts // (length // num_wanted))
    return Overlaps(_owners(source)[np.ix_(*held)], _owners(target)[np.ix_(*wanted)], tuple(begins), tuple(lengths))


@lru_cache(maxsize=4096)
def even_crossing(source: Cuts, target: Cuts, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """`crossing` between two even splits of a tensor that divides at both ends."""
    found = overlaps(source, target, shape)
    stretches = [
        [range(begin, begin + length) for begin, length in zip(begins.tolist(), lengths.tolist())]
        for begins, lengths in zip(found.begins, found.lengths)
    ]
    pairs = zip(found.sources.ravel().tolist(), found.destinations.ravel().tolist(), product(*stretches))
    # Blocks come by their places, and keep that order among those of one destination.
    return tuple(sorted((Piece(*piece) for piece in pairs), key=lambda piece: piece.destination))


def moving_pieces(source: Cuts, target: Cuts, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """The messages between two even splits over the same ranks, in an order that all ranks keep to.

    In round k ranks r and r ^ k (bitwise) send to each other, the lower one first: no rank has two partners in a round, and
    none waits for another one in a circle.
    """
    moving = [piece for piece in even_crossing(source, target, shape) if piece.source != piece.destination]
    return tuple(sorted(moving, key=lambda piece: (piece.source ^ piece.destination, piece.source)))


def crossing(source: Distribution, target: Distribution, shape: Sequence[int]) -> tuple[Piece, ...]:
    """The messages that move a tensor of ``shape`` from ``source`` to ``target``, ordered by destination, then by block.

    The two meshes have different ranks, so everything is sent: the target's ``num_ranks`` times its local size.

    Raises:
        UserError: a dimension is not divisible at one of the ends, or an end has a partial sum.

    >>> source, target = Distribution.parse("(S0:2)"), Distribution.parse("(S0:2, S1:2)")
    >>> [(piece.source, piece.destination, piece.num_elements) for piece in crossing(source, target, (4, 4))]
    [(0, 0, 4), (0, 1, 4), (1, 2, 4), (1, 3, 4)]
    """
    return _crossing(source, target, tuple(shape))


@lru_cache(maxsize=4096)
def _crossing(source: Distribution, target: Distribution, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    for end in (source, target):
        if any(isinstance(state, PartialSum) for state in end.states):
            raise UserError(
                f"a tensor cannot cross from {source} to {target}: {end} has partial sums, reduce them first"
            )
        end.local_shape(shape)
    if is_even_split(source) and is_even_split(target):
        return even_crossing(cuts_of(source, len(shape)), cuts_of(target, len(shape)), shape)
    starts, lengths = _blocks(source, shape)
    wanted_starts, wanted_lengths = _blocks(target, shape)
    begin = np.maximum(starts[:, None], wanted_starts[None])
    end = np.minimum((starts + lengths)[:, None], (wanted_starts + wanted_lengths)[None])
    meets = (begin < end).all(axis=2)
    # Destinations seen so far of each wanted block; and for each group of holders, keyed by its first rank, the order of blocks.
    num_twins: dict[tuple[int, ...], int] = {}
    turns: dict[int, dict[tuple[int, ...], int]] = {}
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


def _num_slices(cuts: Cuts) -> tuple[int, ...]:
    """The number of slices of each dimension."""
    return tuple(prod(axis.size for axis in axes) for axes in cuts)


@lru_cache(maxsize=4096)
def _owners(cuts: Cuts) -> np.ndarray:
    """The rank that holds each block of an even split, as an array indexed by the block."""
    owners = np.empty(_num_slices(cuts), dtype=int)
    ranks: Any = np.arange(owners.size)
    owners[tuple(np.zeros_like(ranks) + flat_coordinate(axes, ranks) for axes in cuts)] = ranks
    return owners


def _blocks(distribution: Distribution, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(first index of each rank's block, shape (ranks, dims); length of a block, shape (dims,))."""
    lengths = np.array(distribution.local_shape(shape))
    blocks = [distribution.block(rank, len(shape)) for rank in range(distribution.num_ranks)]
    return np.array(blocks).reshape(len(blocks), len(shape)) * lengths, lengths


def _parts(block: tuple[range, ...], count: int) -> list[tuple[range, ...]]:
    """Cut a block along its longest dimension into at most ``count`` parts of nearly equal length."""
    longest = max(range(len(block)), key=lambda dim: len(block[dim]))
    whole = block[longest]
    count = min(count, len(whole))
    cuts = [whole.start + len(whole) * i // count for i in range(count + 1)]
    return [(*block[:longest], range(a, b), *block[longest + 1 :]) for a, b in zip(cuts, cuts[1:])]
