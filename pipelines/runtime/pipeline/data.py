"""Micro-batches of a run, and the parts of their losses. Needs no OneFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...schedule import ScheduleFrame

__all__ = ["BatchSource", "LossListener", "LossPart", "SlotData"]

BatchSource = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Inputs and targets of a micro-batch by its number over all runs, the same on every rank; called where they are needed."""
LossListener = Callable[[int, float, float], None]
"""Called with a micro-batch's number over all runs, a part of its mean loss, and the share of its rows that this part is of."""


class LossPart(NamedTuple):
    """What one rank knows of a micro-batch's mean loss."""

    micro_batch: int
    """Its number in the run."""
    value: float
    share: float
    """Of the micro-batch's rows, that this part is of."""


class SlotData:
    """The data of a run, by slots.

    Args:
        per_micro_batch: slots of a micro-batch.
        slot_rows: rows of a slot, over all ranks of a worker.

    Attributes:
        batch: see `BatchSource`.
        first_micro_batch: the number over all runs of the run's first micro-batch.
    """

    def __init__(self, frame: ScheduleFrame, per_micro_batch: int, slot_rows: int, batch: BatchSource) -> None:
        self.first_micro_batch = 0
        self._frame = frame
        self._per_micro_batch = per_micro_batch
        self.slot_rows = slot_rows
        self.batch = batch

    def rows(self, slot: int, which: int, rows: range | None = None) -> np.ndarray:
        """The inputs (0) or targets (1) of a slot, all its rows or some."""
        number, half = divmod(slot, self._per_micro_batch)
        first = half * self.slot_rows
        rows = range(self.slot_rows) if rows is None else rows
        return self.batch(self.first_micro_batch + number)[which][first + rows.start : first + rows.stop]

    def number(self, slot: int) -> int:
        """A slot's number over all runs."""
        return self.first_micro_batch * self._per_micro_batch + slot

    def micro_batch(self, slot: int) -> int:
        """The micro-batch that a slot is of."""
        return slot // self._per_micro_batch

    def share_of_micro_batch(self, num_rows: int) -> float:
        """Which part of a micro-batch so many rows are."""
        return num_rows / (self._per_micro_batch * self.slot_rows)

    def share_of_update(self, num_rows: int, update: int) -> float:
        """Which part of all rows of an update so many rows are."""
        return self.share_of_micro_batch(num_rows) / len(self._frame.micro_batches_of(update))
