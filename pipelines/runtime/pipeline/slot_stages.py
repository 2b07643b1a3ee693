"""The stages of this rank's worker, run slot by slot: what planned stages and the stages of exported files have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .actions import BoundaryTensor, Reduce, Run
from .data import LossPart, SlotData
from .gradients import GradientSums
from .passes import evaluate_slots
from .transport import Transport
from .weights import WeightVersions

__all__ = ["SlotStages"]

Tensor = Any


class SlotStages:
    """Runs the stages of this rank's worker slot by slot; implements `work.RunnableStages`.

    Subclasses define `stage_function`.

    Args:
        boundaries: Shape and type of the tensors between consecutive stages.
        data: Inputs and targets of the micro-batches.
        sums: Sums of gradients over ranks.
        reports: Whether this rank reports the losses, which all ranks of the last stage compute.
    """

    def __init__(
        self, boundaries: Sequence[BoundaryTensor], data: SlotData, sums: GradientSums, *, reports: bool
    ) -> None:
        self.boundaries = boundaries
        self.data = data
        self._sums = sums
        self._reports = reports

    @property
    def first_micro_batch(self) -> int:
        """Number, over all runs, of the first micro-batch of the present run."""
        return self.data.first_micro_batch

    @first_micro_batch.setter
    def first_micro_batch(self, number: int) -> None:
        self.data.first_micro_batch = number

    def stage_function(self, run: Run, weights: Sequence[Tensor]) -> Callable[[Any, int], Tensor]:
        """Return the function that computes a task's stage for one slot.

        Args:
            run: The task.
            weights: Leaves of the weights' version that the task reads.

        Returns:
            ``function(x, slot)``: the output of the stage, given that of the previous stage (None in the first stage); in the last
            stage the mean loss of all rows of the slot.
        """
        raise NotImplementedError

    def run(
        self, run: Run, x: Tensor | None, weights: Sequence[Tensor], first_slot: int, num_slots: int
    ) -> tuple[Tensor, list[LossPart]]:
        """Run the forward pass of a task for some slots with the given weights.

        Returns:
            The output of the stage and, in the last stage, this rank's parts of the micro-batches' losses. The output of the last
            stage is the loss, times the share of the slots in their update.
        """
        slots, is_last = range(first_slot, first_slot + num_slots), run.task.stage == len(self.boundaries)
        evaluate = self.stage_function(run, weights)
        return evaluate_slots(evaluate, x, slots, run.update, self.data, is_last, self._reports)

    def total(self, action: Reduce, replicas: Mapping[int, WeightVersions], transport: Transport) -> Tensor | None:
        """Begin the sum of the gradients that an action names; return None if this rank has no such weights."""
        return self._sums.total(action, replicas, transport)

    def set_gradient(self, stage: int, action: Reduce, replica: WeightVersions, total: Tensor) -> None:
        """Give the weights of a stage their part of the summed gradients ``total``."""
        self._sums.set_gradient(stage, action, replica, total)
