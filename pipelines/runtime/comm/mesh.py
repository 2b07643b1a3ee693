"""The axes of a mesh of ranks, and the groups of ranks along an axis.

A mesh with axes of lengths (l_0, ..., l_k) consists of the ranks ``first_rank`` to ``first_rank + num_ranks - 1`` in ascending
order, where the last axis varies fastest. Neighbours along axis i have ranks that differ by ``stride_i = l_{i+1} * ... * l_k``.
Ranks 0 to 7 on the mesh (2, 4):

    =========================  ======  =============================
    axis                       stride  groups along it
    =========================  ======  =============================
    0, length 2                4       {0 4} {1 5} {2 6} {3 7}
    1, length 4                1       {0 1 2 3} {4 5 6 7}
    both as one, length 8      1       {0 1 2 3 4 5 6 7}
    =========================  ======  =============================

A `RankAxis` stores its size and its stride, not the mesh. The ranks of a group always ascend: OneFlow accepts a placement whose
ranks have another order, and then returns wrong values.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.errors import UserError

from .handshake import NO_HANDSHAKE, Handshake

__all__ = ["RankAxis", "partners_of"]


@dataclass(frozen=True)
class RankAxis:
    """One axis of a mesh.

    Attributes:
        size: Number of ranks along the axis.
        stride: Difference between the ranks of neighbours along the axis.
        num_ranks: Number of ranks of the mesh.
        first_rank: Lowest rank of the mesh.
        handshake: Before which exchanges of two ranks there is a handshake.

    >>> RankAxis(size=2, stride=4, num_ranks=8).groups()
    [(0, 4), (1, 5), (2, 6), (3, 7)]

    Raises:
        UserError: The mesh has no such axis: ``size * stride`` does not divide ``num_ranks``, or a number is out of range.
    """

    size: int
    stride: int
    num_ranks: int
    first_rank: int = 0
    handshake: Handshake = NO_HANDSHAKE

    def __post_init__(self) -> None:
        for name in ("size", "stride", "num_ranks"):
            if getattr(self, name) < 1:
                raise UserError(f"a mesh axis has {name} {getattr(self, name)}; it must be at least 1")
        if self.first_rank < 0:
            raise UserError(f"a mesh axis has first_rank {self.first_rank}; it must be at least 0")
        if self.num_ranks % (self.size * self.stride):
            raise UserError(
                f"a mesh axis of size {self.size} and stride {self.stride} does not fit {self.num_ranks} ranks: "
                f"{self.size} x {self.stride} must divide {self.num_ranks}"
            )

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along this axis, including ``rank``, in ascending order."""
        base = rank - self.index(rank) * self.stride
        return tuple(base + k * self.stride for k in range(self.size))

    def index(self, rank: int) -> int:
        """Return the coordinate of ``rank`` along this axis, which is its position in its group.

        Raises:
            UserError: The rank is not on the mesh.
        """
        position = rank - self.first_rank
        if not 0 <= position < self.num_ranks:
            last = self.first_rank + self.num_ranks - 1
            raise UserError(f"rank {rank} is not on the mesh of ranks {self.first_rank} to {last}")
        return position // self.stride % self.size

    def groups(self) -> list[tuple[int, ...]]:
        """Return all groups along this axis, ordered by their first rank. Each rank of the mesh is in exactly one group."""
        ranks = range(self.first_rank, self.first_rank + self.num_ranks)
        return [self.group(rank) for rank in ranks if self.index(rank) == 0]


def partners_of(place: int, num_places: int) -> list[int | None]:
    """Return whom a place meets in each round of a tournament in which every two places meet once; None: nobody.

    With an odd number n of places, i and j meet in round (i + j) mod n, and i with 2 i = round mod n has nobody. With one place
    more, that place meets whoever would have nobody.

    >>> [partners_of(place, 4) for place in range(4)]
    [[3, 1, 2], [2, 0, 3], [1, 3, 0], [0, 2, 1]]
    >>> partners_of(0, 3)
    [None, 1, 2]
    """
    odd = num_places - 1 + num_places % 2
    last = odd if odd < num_places else None
    if place == last:
        return [round_ * (odd + 1) // 2 % odd for round_ in range(odd)]
    met = [(round_ - place) % odd for round_ in range(odd)]
    return [last if other == place else other for other in met]
