"""The micro-batches of a run, by slots, and the parts of their losses that a rank computes. Needs no OneFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...schedule import ScheduleFrame

__all__ = ["BatchSource", "LossListener", "LossPart", "SlotData"]

#: Returns the inputs of a micro-batch and, for a model that ends in a loss, its targets, given its number over all runs. Every rank
#: must get the same arrays. Ranks call it when they need the data, possibly several times for the same micro-batch.
BatchSource = Callable[[int], tuple[np.ndarray, ...]]
#: Called with the number of a micro-batch over all runs, a rank's part of its mean loss, and the fraction of the micro-batch's rows
#: that this part covers.
LossListener = Callable[[int, float, float], None]


class LossPart(NamedTuple):
    """A rank's part of the mean loss of a micro-batch.

    Attributes:
        micro_batch: Number of the micro-batch in the run.
        value: Mean loss over the rows of this part, times ``share``. The parts of a micro-batch add up to its mean loss.
        share: Fraction of the micro-batch's rows that the part covers.
    """

    micro_batch: int
    value: float
    share: float


class SlotData:
    """The data of a run, by slots.

    Args:
        frame: Schedule of the run.
        per_micro_batch: Slots of a micro-batch.
        slot_rows: Rows of a slot, over all ranks of a worker.
        batch: Source of the micro-batches.

    Attributes:
        first_micro_batch: Number over all runs of the run's first micro-batch.
    """

    def __init__(self, frame: ScheduleFrame, per_micro_batch: int, slot_rows: int, batch: BatchSource) -> None:
        self.first_micro_batch = 0
        self._frame = frame
        self._per_micro_batch = per_micro_batch
        self.slot_rows = slot_rows
        self.batch = batch

    def rows(self, slot: int, which: int, rows: range | None = None) -> np.ndarray:
        """Return some rows of one of the arrays of a slot.

        Args:
            slot: Number of the slot in the run.
            which: Index of the array; for a model with one input 0 is the input, and 1 the targets.
            rows: Rows of the slot; None for all of them.
        """
        return self.arrays(slot, rows)[which]

    def arrays(self, slot: int, rows: range | None = None) -> list[np.ndarray]:
        """Return some rows (None: all) of each of the arrays of a slot."""
        micro_batch, half = divmod(slot, self._per_micro_batch)
        first = half * self.slot_rows
        rows = range(self.slot_rows) if rows is None else rows
        batch = self.batch(self.first_micro_batch + micro_batch)
        return [array[first + rows.start : first + rows.stop] for array in batch]

    def global_number(self, slot: int) -> int:
        """Return the number of a slot over all runs."""
        return self.first_micro_batch * self._per_micro_batch + slot

    def micro_batch(self, slot: int) -> int:
        """Return the micro-batch of a slot, by its number in the run."""
        return slot // self._per_micro_batch

    def share_of_micro_batch(self, num_rows: int) -> float:
        """Return the fraction of a micro-batch that ``num_rows`` rows are."""
        return num_rows / (self._per_micro_batch * self.slot_rows)

    def share_of_update(self, num_rows: int, update: int) -> float:
        """Return the fraction of all rows of an update, over all pipelines, that ``num_rows`` rows are."""
        return self.share_of_micro_batch(num_rows) / len(self._frame.micro_batches_of(update))
