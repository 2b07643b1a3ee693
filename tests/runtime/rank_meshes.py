"""Meshes of ranks, whose axes the tests of collectives use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.comm.mesh import RankAxis

__all__ = ["RankMesh"]


@dataclass(frozen=True)
class RankMesh:
    """Ranks in natural order on several axes.

    Attributes:
        lengths: Lengths of the axes, the slowest first.
        first_rank: The lowest rank.
    """

    lengths: tuple[int, ...]
    first_rank: int = 0

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.lengths):
            raise UserError(f"the mesh {self.lengths} has an axis shorter than 1")

    @property
    def num_ranks(self) -> int:
        return math.prod(self.lengths)

    @property
    def strides(self) -> tuple[int, ...]:
        """For each axis, the distance in ranks of neighbours along it."""
        return tuple(math.prod(self.lengths[i + 1 :]) for i in range(len(self.lengths)))

    def axis(self, i: int) -> RankAxis:
        return RankAxis(self.lengths[i], self.strides[i], self.num_ranks, self.first_rank)

    @property
    def axes(self) -> tuple[RankAxis, ...]:
        return tuple(self.axis(i) for i in range(len(self.lengths)))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of ``rank`` on all axes."""
        return tuple(axis.index(rank) for axis in self.axes)
