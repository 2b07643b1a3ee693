"""The axes of a mesh of ranks, and the groups of ranks along an axis.

A mesh of lengths (l_0, ..., l_k) holds the ranks ``first_rank`` to ``first_rank + num_ranks - 1`` in natural order, the last
axis varying fastest, so that a step of one along axis i is a step of ``stride_i = l_{i+1} * ... * l_k`` ranks. Ranks 0 to 7
on the mesh (2, 4):

    =========================  ======  =============================
    axis                       stride  groups along it
    =========================  ======  =============================
    0, length 2                4       {0 4} {1 5} {2 6} {3 7}
    1, length 4                1       {0 1 2 3} {4 5 6 7}
    both as one, length 8      1       {0 1 2 3 4 5 6 7}
    =========================  ======  =============================

A `RankAxis` stores only its size and its stride. Ranks in a group always ascend (OneFlow accepts a placement with its ranks in
another order, and returns wrong values).
"""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.errors import UserError

__all__ = ["RankAxis"]


@dataclass(frozen=True)
class RankAxis:
    """One axis of a mesh.

    Attributes:
        size: number of ranks along it.
        stride: distance in ranks of neighbours along it.
        num_ranks: of the mesh.
        first_rank: of the mesh.

    >>> RankAxis(size=2, stride=4, num_ranks=8).groups()
    [(0, 4), (1, 5), (2, 6), (3, 7)]

    Raises:
        UserError: ``size * stride`` does not divide ``num_ranks``, or a number is out of range.
    """

    size: int
    stride: int
    num_ranks: int
    first_rank: int = 0

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
        """The ranks that differ from ``rank`` only along this axis, itself included, ascending."""
        base = rank - self.index(rank) * self.stride
        return tuple(base + k * self.stride for k in range(self.size))

    def index(self, rank: int) -> int:
        """The coordinate of ``rank`` along this axis: its position in its group."""
        position = rank - self.first_rank
        if not 0 <= position < self.num_ranks:
            last = self.first_rank + self.num_ranks - 1
            raise UserError(f"rank {rank} is not on the mesh of ranks {self.first_rank} to {last}")
        return position // self.stride % self.size

    def groups(self) -> list[tuple[int, ...]]:
        """All groups along this axis, ordered by their first rank; each rank of the mesh is in exactly one."""
        ranks = range(self.first_rank, self.first_rank + self.num_ranks)
        return [self.group(rank) for rank in ranks if self.index(rank) == 0]
