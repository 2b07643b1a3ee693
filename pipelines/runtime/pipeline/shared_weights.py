"""Gradients of weights that several stages share: the pieces that ranks of different stages exchange. Needs no OneFlow.

Every stage lays out a shared weight in its own way, and first sums its own gradient over its own ranks. Then each rank receives,
from every other stage, that stage's sum for the elements that it updates: its part of the weight, or its shard of the part if the
ranks divide it (ZeRO). So a rank receives the size of what it stores once from every other stage.

**Boxes.** A part holds the same columns of each of its rows (and so on for further dimensions). A shard is a range of the part's
elements in row-major order. It consists of a few boxes, each of which is such a part itself: of a matrix the rest of the first row,
whole rows, and the beginning of the last row. One message holds the intersection of a box of the sender and a box of the receiver:
in each dimension, the indices that both have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from ..comm.parameter_layouts import ParameterLayout

__all__ = ["Places", "WeightPiece", "weight_pieces"]


@dataclass(frozen=True)
class Places:
    """The places of a piece in what a rank stores of a weight, as a vector.

    Attributes:
        start: Place of the first element of the box that contains the piece.
        shape: Shape of the box.
        within: For each dimension of the box, the positions of the piece.
    """

    start: int
    shape: tuple[int, ...]
    within: tuple[np.ndarray, ...]

    def take(self, stored: np.ndarray) -> np.ndarray:
        """Return the elements of the piece."""
        return self._box(stored)[np.ix_(*self.within)]

    def put(self, stored: np.ndarray, elements: np.ndarray) -> None:
        """Write the elements of the piece."""
        self._box(stored)[np.ix_(*self.within)] = elements

    def _box(self, stored: np.ndarray) -> np.ndarray:
        """Return a view of the box."""
        return stored[self.start : self.start + prod(self.shape)].reshape(self.shape)


@dataclass(frozen=True)
class WeightPiece:
    """A piece of a shared weight's gradient that one rank sends to a rank of another stage.

    Attributes:
        source: Sending rank, counted within its stage.
        destination: Receiving rank, counted within its stage.
        source_places: Places of the piece in what the sender stores.
        destination_places: Places of the piece in what the receiver stores.
    """

    source: int
    destination: int
    source_places: Places
    destination_places: Places

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return tuple(map(len, self.destination_places.within))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@cache
def weight_pieces(source: ParameterLayout, destination: ParameterLayout) -> tuple[WeightPiece, ...]:
    """Return the messages by which every rank of one stage receives each element that it stores once from another stage.

    If several ranks of ``source`` store the same elements, they send them in turn to the ranks of ``destination`` with equal parts.

    Args:
        source: Layout of the weight in the sending stage.
        destination: Layout of the weight in the receiving stage.

    Returns:
        The pieces, in the order of the receiving ranks.
    """
    # Group the source's ranks by what they store.
    holders: dict[tuple[object, ...], list[int]] = {}
    for rank in range(source.num_ranks):
        elements = source.shard(rank)
        holders.setdefault((*_part_key(source, rank), elements.start, elements.stop), []).append(rank)
    boxes = {ranks[0]: _boxes(source, ranks[0]) for ranks in holders.values()}
    num_served: dict[tuple[bytes, ...], int] = {}  # receiving ranks so far, by their parts
    pieces = []
    for receiver in range(destination.num_ranks):
        key = _part_key(destination, receiver)
        turn = num_served.setdefault(key, 0)
        num_served[key] += 1
        received_boxes = _boxes(destination, receiver)
        for ranks in holders.values():
            sender = ranks[turn % len(ranks)]
            for sent in boxes[ranks[0]]:
                for received in received_boxes:
                    piece = _intersection(sender, sent, receiver, received)
                    if piece.size:
                        pieces.append(piece)
    return tuple(pieces)


def _part_key(layout: ParameterLayout, rank: int) -> tuple[bytes, ...]:
    """Return a hashable form of the indices of a rank's part."""
    return tuple(indices[rank].tobytes() for indices in layout.indices)


@dataclass(frozen=True)
class _Box:
    """A box of what a rank stores.

    Attributes:
        start: Place of the first element in what the rank stores, as a vector.
        indices: For each dimension, the logical indices of the weight.
    """

    start: int
    indices: tuple[np.ndarray, ...]

    def places(self, within: Sequence[np.ndarray]) -> Places:
        return Places(self.start, tuple(map(len, self.indices)), tuple(within))


def _boxes(layout: ParameterLayout, rank: int) -> list[_Box]:
    """Return the boxes of what a rank stores, in the order of its elements."""
    held, boxes, start = layout.shard(rank), [], 0
    for ranges in _ranges(layout.local_shape(), held.start, held.stop):
        box = _Box(start, tuple(indices[rank][part.start : part.stop] for indices, part in zip(layout.indices, ranges)))
        boxes.append(box)
        start += prod(map(len, box.indices))
    return boxes


def _ranges(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[range, ...]]:
    """Yield the boxes of the elements ``start`` to ``stop - 1`` of an array in row-major order, as a range for each dimension.

    >>> [tuple(map(str, ranges)) for ranges in _ranges((4, 3), 2, 10)]
    [('range(0, 1)', 'range(2, 3)'), ('range(1, 3)', 'range(0, 3)'), ('range(3, 4)', 'range(0, 1)')]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (range(start, stop),)
        return
    row_size = prod(shape[1:])
    first, last = -(-start // row_size), stop // row_size  # the whole rows are first to last - 1
    if first > last:  # the elements are within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row_size)
    if first < last:
        yield (range(first, last), *map(range, shape[1:]))
    yield from _in_row(shape, last, last * row_size, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[range, ...]]:
    """Yield `_ranges` of elements that are in one row."""
    before = row * prod(shape[1:])
    for ranges in _ranges(shape[1:], start - before, stop - before):
        yield (range(row, row + 1), *ranges)


def _intersection(sender: int, sent: _Box, receiver: int, received: _Box) -> WeightPiece:
    """Return the piece that a box of a sender and a box of a receiver have in common; it may be empty."""
    of_sender, of_receiver = [], []
    for here, there in zip(sent.indices, received.indices):
        _, in_sender, in_receiver = np.intersect1d(here, there, assume_unique=True, return_indices=True)
        of_sender.append(in_sender)
        of_receiver.append(in_receiver)
    return WeightPiece(sender, receiver, sent.places(of_sender), received.places(of_receiver))
