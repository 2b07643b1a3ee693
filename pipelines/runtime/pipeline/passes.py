"""Forward passes, backward passes (whole or in two parts) and recomputations of the stages of a rank.

The function that computes a stage is given by the caller (`Evaluate`). This module runs it with autograd, keeps the activations
that the backward passes need, and collects the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ...schedule import Kind
from ..detaching import detached
from ..load import load_oneflow
from ..updates import scale_gradient
from .actions import Run
from .data import LossPart, SlotData
from .waiting import wait_for
from .weights import WeightVersions

flow: Any = load_oneflow()

__all__ = ["Evaluate", "StagePasses", "evaluate_slots", "select_slots"]

Tensor = Any
#: Computes a stage for some slots: ``evaluate(run, x, weights, first_slot, num_slots) -> (y, loss_parts)``.
#:
#: x is the output of the previous stage, None in the first stage. y is the stage's output; in the last stage it is the loss of
#: these slots, weighted by their share of the update's rows. loss_parts are the parts of mean losses that this rank reports.
Evaluate = Callable[[Run, Any, Sequence[Any], int, int], "tuple[Any, list[LossPart]]"]


class _SavedPiece(NamedTuple):
    """A piece of a forward pass whose activations are alive: autograd's graph from its input to its output.

    Attributes:
        x: Input; None in the first stage.
        y: Output.
        gradient: Gradient of the output, kept for the weight part of a backward pass after its input part.
    """

    x: Tensor | None
    y: Tensor
    gradient: Tensor | None = None


class StagePasses:
    """The computations of a rank's tasks, and the activations that are alive between them.

    Args:
        replicas: Weights of the stages on this rank, by (pipeline, stage).
        evaluate: Computes a stage, see `Evaluate`.
        last_stage: Number of the last stage of the model.
        recomputed: Stages that keep only their inputs in the forward pass, and recompute their activations later.

    Attributes:
        losses: For each micro-batch the part of its mean loss that this rank reports.
        loss_scale: Factor of the gradient of the loss.
    """

    def __init__(
        self,
        replicas: Mapping[tuple[int, int], WeightVersions],
        evaluate: Evaluate,
        last_stage: int,
        recomputed: Collection[int],
    ) -> None:
        self.losses: dict[int, float] = {}
        self.loss_scale = 1.0
        self._replicas = replicas
        self._evaluate_stage = evaluate
        self._last_stage = last_stage
        self._recomputed = recomputed
        # Pieces with live activations, and inputs for recomputations, by (pipeline, stage, first slot).
        self._saved: dict[tuple[int, int, int], _SavedPiece] = {}
        self._inputs: dict[tuple[int, int, int], Tensor | None] = {}

    def compute(self, run: Run, x: Tensor | None) -> Tensor | None:
        """Compute a task, and wait until it is done.

        Args:
            run: The task.
            x: Tensor from a neighbouring stage: the activation (forward) or the gradient of the output (backward). None if the task
                takes nothing from another stage.

        Returns:
            The tensor for a neighbouring stage: the activation (forward) or the gradient of the input (backward). None if the task
            has no such output.
        """
        kind = run.task.kind
        if kind is Kind.FORWARD:
            return self._forward(run, x)
        if kind is Kind.RECOMPUTE:
            key = _piece_key(run)
            self._evaluate(run, key, self._inputs.pop(key), run.first_slot, run.num_slots)
            return None
        if kind is Kind.BACKWARD_INPUT:
            return self._backward_input(run, x)
        return self._backward(run, x)

    def _forward(self, run: Run, x: Tensor | None) -> Tensor | None:
        """Compute a forward pass: as a whole without autograd if it will be recomputed, else piece by piece."""
        recomputes = run.task.stage in self._recomputed
        outputs, slot = [], run.first_slot
        if recomputes:
            with flow.no_grad():
                outputs.append(self._evaluate(run, None, x, run.first_slot, run.num_slots))
        for num_slots in run.slots_per_piece:
            piece = select_slots(x, run.num_slots, slot - run.first_slot, num_slots)
            key = (run.task.pipeline, run.task.stage, slot)
            if recomputes:
                self._inputs[key] = piece
            else:
                outputs.append(self._evaluate(run, key, piece, slot, num_slots))
            slot += num_slots
        if run.task.stage == self._last_stage:
            wait_for(outputs[-1])
            return None
        y = outputs[0] if len(outputs) == 1 else flow.cat(outputs, dim=0)
        wait_for(y)
        return y

    def _evaluate(
        self, run: Run, key: tuple[int, int, int] | None, x: Tensor | None, first_slot: int, num_slots: int
    ) -> Tensor:
        """Compute the stage for some slots, and save its input and output under ``key``; None saves nothing.

        Returns:
            The output (in the last stage the weighted loss), without its autograd graph.
        """
        replica = self._replicas[run.task.pipeline, run.task.stage]
        self._count_live_slots(num_slots)
        if x is not None:
            x = detached(x)
            x.requires_grad_(key is not None)
        y, losses = self._evaluate_stage(run, x, replica.version(run.version), first_slot, num_slots)
        if run.task.stage == self._last_stage:
            y = scale_gradient(y, self.loss_scale)
        if run.task.kind is Kind.FORWARD:
            for part in losses:
                self._record_loss(part)
        if key is None:
            self._count_live_slots(-num_slots)
        else:
            self._saved[key] = _SavedPiece(x, y)
        return detached(y)

    def _record_loss(self, part: LossPart) -> None:
        """Add a part of a micro-batch's mean loss."""
        self.losses[part.micro_batch] = self.losses.get(part.micro_batch, 0.0) + part.value

    def _backward(self, run: Run, gradient: Tensor | None) -> Tensor | None:
        """Compute a whole backward pass, or the weight part of one."""
        saved = self._saved.pop(_piece_key(run))
        if run.task.kind is Kind.BACKWARD_WEIGHT:
            gradient = saved.gradient
        flow.autograd.backward(saved.y, gradient)
        replica = self._replicas[run.task.pipeline, run.task.stage]
        last_weight_gradient = replica.collect(run.version, run.update)
        input_gradient = None if saved.x is None else saved.x.grad
        for result in (input_gradient, last_weight_gradient):
            if result is not None:
                wait_for(result)
        self._count_live_slots(-run.num_slots)
        return input_gradient if run.task.kind is Kind.BACKWARD else None

    def _backward_input(self, run: Run, gradient: Tensor | None) -> Tensor | None:
        """Compute the gradient of the input only, and keep the gradient of the output for the weight part."""
        key = _piece_key(run)
        saved = self._saved[key]
        self._saved[key] = saved._replace(gradient=gradient)
        if saved.x is None:
            return None
        output_gradient = flow.ones_like(saved.y) if gradient is None else gradient
        (input_gradient,) = flow.autograd.grad(saved.y, [saved.x], output_gradient, retain_graph=True)
        wait_for(input_gradient)
        return input_gradient

    def _count_live_slots(self, num_slots: int) -> None:
        """Add a number of slots (negative to subtract) to those whose activations are alive. Does nothing here."""


def evaluate_slots(
    evaluate: Callable[[Any, int], Any],
    x: Tensor | None,
    slots: range,
    update: int,
    data: SlotData,
    is_last: bool,
    reports: bool,
) -> tuple[Tensor, list[LossPart]]:
    """Compute a stage slot by slot, and return the output and loss parts as `Evaluate` does.

    Args:
        evaluate: Computes the stage for one slot: ``evaluate(x, slot)`` returns its output; in the last stage, the mean loss of
            all rows of the slot.
        x: Output of the previous stage for all slots, concatenated along dimension 0; None in the first stage.
        slots: Slots to compute.
        update: Update that the gradients of the slots belong to.
        data: Data of the run.
        is_last: Whether this is the last stage.
        reports: Whether this rank reports the loss, which all ranks of the last stage compute.
    """
    outputs, losses = [], []
    for position, slot in enumerate(slots):
        y = evaluate(select_slots(x, len(slots), position, 1), slot)
        if is_last:
            if reports:
                share = data.share_of_micro_batch(data.slot_rows)
                losses.append(LossPart(data.micro_batch(slot), float(y.detach().numpy()) * share, share))
            y = y * data.share_of_update(data.slot_rows, update)
        outputs.append(y)
    if len(outputs) == 1:
        return outputs[0], losses
    return sum(outputs[1:], outputs[0]) if is_last else flow.cat(outputs, dim=0), losses


def select_slots(x: Tensor | None, num_slots: int, first: int, count: int) -> Tensor | None:
    """Return ``count`` slots of a tensor, from position ``first`` on.

    Args:
        x: The slots, concatenated along dimension 0. None is returned as it is.
        num_slots: Number of slots of ``x``.
        first: Position of the first slot in ``x``.
        count: Number of slots.
    """
    if x is None or count == num_slots:
        return x
    rows = x.shape[0] // num_slots
    return flow.narrow(x, 0, first * rows, count * rows)


def _piece_key(run: Run) -> tuple[int, int, int]:
    """Return (pipeline, stage, first slot) of a task."""
    return run.task.pipeline, run.task.stage, run.first_slot
