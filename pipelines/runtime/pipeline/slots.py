"""Which rows of which micro-batches a task and a rank work on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ...schedule import Part, Schedule, Task

__all__ = ["HeldBlock", "RankMap", "slots_of", "slots_per_micro_batch"]

_HALVES = (Part.FIRST_HALF, Part.SECOND_HALF)


class HeldBlock(NamedTuple):
    """Rows and columns of a slot's matrix."""

    rows: range
    columns: range

    @property
    def size(self) -> int:
        return len(self.rows) * len(self.columns)


@dataclass(frozen=True)
class RankMap:
    """Worker w is ``widths[w]`` consecutive ranks, behind those of the workers before it."""

    widths: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return sum(self.widths)

    def ranks_of(self, worker: int) -> range:
        first = sum(self.widths[:worker])
        return range(first, first + self.widths[worker])

    def worker_of(self, rank: int) -> int:
        """The worker that a rank is a part of."""
        return next(worker for worker, end in enumerate(accumulate(self.widths)) if rank < end)

    def index_of(self, rank: int) -> int:
        """A rank's place in its worker."""
        return rank - self.ranks_of(self.worker_of(rank)).start

    def rows_of(self, rank: int, slot_rows: int) -> range:
        """The rows of every slot that a rank has: an even share of its worker's."""
        share = slot_rows // self.widths[self.worker_of(rank)]
        first = self.index_of(rank) * share
        return range(first, first + share)


def slots_per_micro_batch(schedule: Schedule) -> int:
    """2 where some task works on half a micro-batch, else 1."""
    return 2 if any(task.part in _HALVES for tasks in schedule.workers for task in tasks) else 1


def slots_of(task: Task, per_micro_batch: int) -> range:
    """The slots that a compute task covers."""
    first = task.micro_batch * per_micro_batch + (task.part is Part.SECOND_HALF)
    return range(first, first + round(task.part.size * per_micro_batch))
