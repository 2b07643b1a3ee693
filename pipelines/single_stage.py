"""The schedule of a single stage on one worker: forward and backward of one micro-batch after the other, then the update.

This is 1F1B with one stage.  Tasks are made when they are indexed, so that the number of micro-batches does not cost memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from .schedule import Kind, Schedule, Task

__all__ = ["single_stage_schedule"]


@dataclass(frozen=True)
class _Tasks(Sequence[Task]):
    """The tasks of the worker as a lazy sequence: ``0F0 0B0 0F1 0B1 ... 0A0 0U0``; with recomputation ``0F0 0R0 0B0 ...``.

    Attributes:
        num_micro_batches: Number of micro-batches per step.
        recomputes: Whether the forward pass is run again before the backward pass.
    """

    num_micro_batches: int
    recomputes: bool

    @property
    def _passes(self) -> tuple[Kind, ...]:
        return (Kind.FORWARD, *([Kind.RECOMPUTE] if self.recomputes else []), Kind.BACKWARD)

    def __len__(self) -> int:
        return len(self._passes) * self.num_micro_batches + 2

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Task, ...]: ...

    def __getitem__(self, index: int | slice) -> Task | tuple[Task, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        passes, position = self._passes, range(len(self))[index]  # raises IndexError beyond the end
        micro_batch, place = divmod(position, len(passes))
        if micro_batch == self.num_micro_batches:
            return Task((Kind.ALL_REDUCE, Kind.UPDATE)[place], 0, 0, 0)
        return Task(passes[place], 0, 0, micro_batch)


def single_stage_schedule(num_micro_batches: int, width: int = 1, recomputes: bool = False) -> Schedule:
    """Make the schedule of one stage on one worker.

    Args:
        num_micro_batches: Number of micro-batches per step.
        width: Number of devices of the worker.
        recomputes: Whether the forward pass is run again as a task of its own.

    >>> [str(task) for task in single_stage_schedule(2).workers[0]]
    ['0F0', '0B0', '0F1', '0B1', '0A0', '0U0']
    """
    return Schedule(
        name="1f1b",
        num_stages=1,
        num_micro_batches=num_micro_batches,
        placement=((0,),),
        workers=(_Tasks(num_micro_batches, recomputes),),
        update_period=num_micro_batches,
        delays=(0,),
        widths=(width,),
    )
