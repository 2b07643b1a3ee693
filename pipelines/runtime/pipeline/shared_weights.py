"""Gradients of weights that several stages share: the pieces that ranks of different stages exchange. Needs no OneFlow.

Every stage shards a shared weight in its own layout, and first sums its own gradient over its own ranks. Then each rank receives,
from every other stage, that stage's sum for the elements in its own shard. One message holds the intersection of two shards: in
each dimension, the indices that both ranks hold. So a rank receives the size of its shard once from every other stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from ..comm.layouts import ParameterLayout

__all__ = ["WeightPiece", "weight_pieces"]


@dataclass(frozen=True)
class WeightPiece:
    """A piece of a shared weight's gradient that one rank sends to a rank of another stage.

    Attributes:
        source: Sending rank, counted within its stage.
        destination: Receiving rank, counted within its stage.
        source_places: For each dimension, the positions of the piece in the sender's shard.
        destination_places: For each dimension, the positions of the piece in the receiver's shard.
    """

    source: int
    destination: int
    source_places: tuple[np.ndarray, ...]
    destination_places: tuple[np.ndarray, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return tuple(map(len, self.destination_places))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@cache
def weight_pieces(source: ParameterLayout, destination: ParameterLayout) -> tuple[WeightPiece, ...]:
    """Return the messages by which every rank of one stage receives each element of its shard once from another stage.

    If several ranks of ``source`` hold the same shard, they send it in turn to the ranks of ``destination`` with equal shards.

    Args:
        source: Layout of the weight in the sending stage.
        destination: Layout of the weight in the receiving stage.

    Returns:
        The pieces, in the order of the receiving ranks.
    """
    # Group the source's ranks by their shards.
    holders: dict[tuple[bytes, ...], list[int]] = {}
    for rank in range(source.num_ranks):
        holders.setdefault(_shard_key(source, rank), []).append(rank)
    num_served: dict[tuple[bytes, ...], int] = {}  # receiving ranks so far, by their shards
    pieces = []
    for receiver in range(destination.num_ranks):
        key = _shard_key(destination, receiver)
        turn = num_served.setdefault(key, 0)
        num_served[key] += 1
        for ranks in holders.values():
            sender = ranks[turn % len(ranks)]
            # Intersect the two shards, dimension by dimension.
            sender_places, receiver_places = [], []
            for sent, received in zip(source.indices, destination.indices):
                _, in_sender, in_receiver = np.intersect1d(
                    sent[sender], received[receiver], assume_unique=True, return_indices=True
                )
                sender_places.append(in_sender)
                receiver_places.append(in_receiver)
            piece = WeightPiece(sender, receiver, tuple(sender_places), tuple(receiver_places))
            if piece.size:
                pieces.append(piece)
    return tuple(pieces)


def _shard_key(layout: ParameterLayout, rank: int) -> tuple[bytes, ...]:
    """Return a hashable form of the indices that a rank holds."""
    return tuple(indices[rank].tobytes() for indices in layout.indices)
