"""Weights that several stages share: which elements of the sum of their gradients each rank has to be told by others.

Every stage cuts such a weight in its own way. When each has summed its own gradient over its ranks, a rank of one stage needs, of
every other stage, the elements that it holds itself: the intersection, dimension by dimension, of its indices and those of ranks
there. So a rank is sent as many bytes as its shard has, once for every other stage. Needs no OneFlow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from ..layouts import ParameterLayout

__all__ = ["WeightPiece", "weight_pieces"]


@dataclass(frozen=True)
class WeightPiece:
    """Elements of a weight that one rank tells another: of every dimension some indices.

    Attributes:
        source, destination: ranks of the two stages, each counted from 0.
        places_there, places_here: where these indices are in what the source and the destination hold.
    """

    source: int
    destination: int
    places_there: tuple[np.ndarray, ...]
    places_here: tuple[np.ndarray, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.places_here))

    @property
    def size(self) -> int:
        return prod(self.shape)


@cache
def weight_pieces(source: ParameterLayout, destination: ParameterLayout) -> tuple[WeightPiece, ...]:
    """Who tells whom what, so that every rank of ``destination`` gets every element that it holds once; by destination.

    Ranks of the source that hold the same take turns over destinations that want the same.
    """
    holders: dict[tuple[bytes, ...], list[int]] = {}
    for rank in range(source.num_ranks):
        holders.setdefault(_key_of(source, rank), []).append(rank)
    num_alike: dict[tuple[bytes, ...], int] = {}
    pieces = []
    for rank in range(destination.num_ranks):
        turn = num_alike.setdefault(_key_of(destination, rank), 0)
        num_alike[_key_of(destination, rank)] += 1
        for ranks in holders.values():
            teller = ranks[turn % len(ranks)]
            there, here = [], []
            for theirs, mine in zip(source.indices, destination.indices):
                _, in_theirs, in_mine = np.intersect1d(
                    theirs[teller], mine[rank], assume_unique=True, return_indices=True
                )
                there.append(in_theirs)
                here.append(in_mine)
            piece = WeightPiece(teller, rank, tuple(there), tuple(here))
            if piece.size:
                pieces.append(piece)
    return tuple(pieces)


def _key_of(layout: ParameterLayout, rank: int) -> tuple[bytes, ...]:
    """What a rank holds."""
    return tuple(held[rank].tobytes() for held in layout.indices)
