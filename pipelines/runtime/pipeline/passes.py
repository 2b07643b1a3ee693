"""Passes through the stages of a rank: forward, backward, parts of them, recomputation. What a stage computes is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ...schedule import Kind
from ..detaching import detached
from ..load import load_oneflow
from .actions import Run
from .data import LossPart, SlotData
from .waiting import wait_for
from .weights import WeightVersions

flow: Any = load_oneflow()

__all__ = ["Evaluate", "StagePasses", "evaluate_slots", "some_slots"]

Tensor = Any
Evaluate = Callable[[Run, Any, Sequence[Any], int, int], "tuple[Any, list[LossPart]]"]
"""Of a run, what comes from the stage before (None in the first one), the weights, the first slot and how many slots: a stage's
output for them (in the last stage the loss's share of its update's), with the parts of the mean losses that are this rank's."""


class _Saved(NamedTuple):
    """A piece whose activations are alive: autograd's graph from its input to its output."""

    x: Tensor | None
    y: Tensor
    gradient: Tensor | None = None
    """Of the output, kept for the weight part of a backward whose input part is done."""


class StagePasses:
    """The passes of a rank's tasks, and the activations that are alive between them.

    Args:
        replicas: the weights by (pipeline, stage).
        evaluate: see `Evaluate`.
        last_stage: its number.
        recomputed: stages that keep their inputs alone, and run forward again.

    Attributes:
        losses: per micro-batch this rank's part of its mean loss.
    """

    def __init__(
        self,
        replicas: Mapping[tuple[int, int], WeightVersions],
        evaluate: Evaluate,
        last_stage: int,
        recomputed: Collection[int],
    ) -> None:
        self.losses: dict[int, float] = {}
        self._replicas = replicas
        self._evaluate_stage = evaluate
        self._last_stage = last_stage
        self._recomputed = recomputed
        self._saved: dict[tuple[int, int, int], _Saved] = {}
        self._inputs: dict[tuple[int, int, int], Tensor | None] = {}

    def compute(self, run: Run, x: Tensor | None) -> Tensor | None:
        """Carry out a task on what it takes in; what it gives to a neighbouring stage. Returns when it is done."""
        kind = run.task.kind
        if kind is Kind.FORWARD:
            return self._forward(run, x)
        if kind is Kind.RECOMPUTE:
            key = _key(run)
            self._evaluate(run, key, self._inputs.pop(key), run.first_slot, run.num_slots)
            return None
        if kind is Kind.BACKWARD_INPUT:
            return self._backward_input(run, x)
        return self._backward(run, x)

    def _forward(self, run: Run, x: Tensor | None) -> Tensor | None:
        """In pieces that go back alone; in one, without autograd, where it will be recomputed."""
        recomputes = run.task.stage in self._recomputed
        outputs, slot = [], run.first_slot
        if recomputes:
            with flow.no_grad():
                outputs.append(self._evaluate(run, None, x, run.first_slot, run.num_slots))
        for num_slots in run.pieces:
            piece = some_slots(x, run.num_slots, slot - run.first_slot, num_slots)
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
        """The output (in the last stage the loss's share of the update's), without its graph, which is kept under ``key``."""
        replica = self._replicas[run.task.pipeline, run.task.stage]
        self._count(num_slots)
        if x is not None:
            x = detached(x)
            x.requires_grad_(key is not None)
        y, losses = self._evaluate_stage(run, x, replica.version(run.version), first_slot, num_slots)
        if run.task.kind is Kind.FORWARD:
            for part in losses:
                self._note_loss(part)
        if key is None:
            self._count(-num_slots)
        else:
            self._saved[key] = _Saved(x, y)
        return detached(y)

    def _note_loss(self, part: LossPart) -> None:
        self.losses[part.micro_batch] = self.losses.get(part.micro_batch, 0.0) + part.value

    def _backward(self, run: Run, gradient: Tensor | None) -> Tensor | None:
        """A whole backward, or the weight part of one."""
        saved = self._saved.pop(_key(run))
        if run.task.kind is Kind.BACKWARD_WEIGHT:
            gradient = saved.gradient
        flow.autograd.backward(saved.y, gradient)
        replica = self._replicas[run.task.pipeline, run.task.stage]
        latest = replica.collect(run.version, run.update)
        of_input = None if saved.x is None else saved.x.grad
        for made in (of_input, latest):
            if made is not None:
                wait_for(made)
        self._count(-run.num_slots)
        return of_input if run.task.kind is Kind.BACKWARD else None

    def _backward_input(self, run: Run, gradient: Tensor | None) -> Tensor | None:
        key = _key(run)
        saved = self._saved[key]
        self._saved[key] = saved._replace(gradient=gradient)
        if saved.x is None:
            return None
        seed = flow.ones_like(saved.y) if gradient is None else gradient
        (of_input,) = flow.autograd.grad(saved.y, [saved.x], seed, retain_graph=True)
        wait_for(of_input)
        return of_input

    def _count(self, num_slots: int) -> None:
        """So many slots' activations more, or less, are alive."""


def evaluate_slots(
    evaluate: Callable[[Any, int], Any],
    x: Tensor | None,
    slots: range,
    update: int,
    data: SlotData,
    is_last: bool,
    reports: bool,
) -> tuple[Tensor, list[LossPart]]:
    """What `Evaluate` gives, slot by slot.

    Args:
        evaluate: of what comes from the stage before and a slot: the output, in the last stage the mean loss of all of its rows.
        update: that the slots count towards.
        reports: whether this rank reports the loss, which all ranks of the last stage know.
    """
    outputs, losses = [], []
    for position, slot in enumerate(slots):
        y = evaluate(some_slots(x, len(slots), position, 1), slot)
        if is_last:
            if reports:
                share = data.share_of_micro_batch(data.slot_rows)
                losses.append(LossPart(data.micro_batch(slot), float(y.detach().numpy()) * share, share))
            y = y * data.share_of_update(data.slot_rows, update)
        outputs.append(y)
    if len(outputs) == 1:
        return outputs[0], losses
    return sum(outputs[1:], outputs[0]) if is_last else flow.cat(outputs, dim=0), losses


def some_slots(x: Tensor | None, num_slots: int, first: int, count: int) -> Tensor | None:
    """Some slots of a tensor that has ``num_slots`` of them, one below the other."""
    if x is None or count == num_slots:
        return x
    rows = x.shape[0] // num_slots
    return flow.narrow(x, 0, first * rows, count * rows)


def _key(run: Run) -> tuple[int, int, int]:
    return run.task.pipeline, run.task.stage, run.first_slot
