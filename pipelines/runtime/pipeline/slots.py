"""The rows of micro-batches that each task and each rank works on.

A micro-batch is divided into *slots*: one, or two if the schedule has tasks on half micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ...schedule import Part, Schedule, Task

__all__ = ["HeldBlock", "RankMap", "slots_of", "slots_per_micro_batch"]

_HALVES = (Part.FIRST_HALF, Part.SECOND_HALF)


class HeldBlock(NamedTuple):
    """The rows and columns of a slot's matrix that a rank holds."""

    rows: range
    columns: range

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.rows) * len(self.columns)


@dataclass(frozen=True)
class RankMap:
    """The assignment of ranks to workers: in order, worker w has the next ``widths[w]`` ranks.

    >>> ranks = RankMap((2, 1))
    >>> ranks.ranks_of(1), ranks.worker_of(1), ranks.index_of(1)
    (range(2, 3), 0, 1)
    """

    widths: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return sum(self.widths)

    def ranks_of(self, worker: int) -> range:
        """Return the ranks of a worker."""
        first = sum(self.widths[:worker])
        return range(first, first + self.widths[worker])

    def worker_of(self, rank: int) -> int:
        """Return the worker that a rank belongs to."""
        return next(worker for worker, end in enumerate(accumulate(self.widths)) if rank < end)

    def index_of(self, rank: int) -> int:
        """Return the position of a rank in its worker."""
        return rank - self.ranks_of(self.worker_of(rank)).start

    def rows_of(self, rank: int, slot_rows: int) -> range:
        """Return the rows of every slot that a rank holds if the ranks of its worker share the rows evenly."""
        share = slot_rows // self.widths[self.worker_of(rank)]
        first = self.index_of(rank) * share
        return range(first, first + share)


def slots_per_micro_batch(schedule: Schedule) -> int:
    """Return 2 if a task of the schedule works on half a micro-batch, else 1."""
    return 2 if any(task.part in _HALVES for tasks in schedule.workers for task in tasks) else 1


def slots_of(task: Task, per_micro_batch: int) -> range:
    """Return the slots that a compute task works on, numbered over the whole schedule."""
    first = task.micro_batch * per_micro_batch + (task.part is Part.SECOND_HALF)
    return range(first, first + round(task.part.size * per_micro_batch))
