"""What the computations of a schedule are: the interface, and a model's stages behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...schedule import Kind
from ..load import load_oneflow
from .actions import Drop, Run, Update
from .chain import Boundary, StageModule, tied_stages
from .lowering import Lowered
from .transport import wait_for
from .weights import OptimizerFactory, ReplicaWeights

flow: Any = load_oneflow()

__all__ = ["BatchSource", "LossListener", "ModelWork", "Work"]

Tensor = Any
BatchSource = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Inputs and targets of a micro-batch by its number over all runs, the same on every rank; called where they are needed."""
LossListener = Callable[[int, float, float], None]
"""Called with a micro-batch's number over all runs, a part of its mean loss, and the share of its rows that this part is of."""


class Work(Protocol):
    """The computations of one rank; the engine calls them in the order of the rank's program."""

    boundaries: Sequence[Boundary]
    """What passes between stages s and s + 1."""
    losses: dict[int, float]
    """Per micro-batch whose last stage is here, this rank's part of its mean loss."""
    peak_activations: float
    """The most micro-batches (this rank's rows of them) whose activations were alive at once."""
    peak_versions: int
    """The most versions of any one stage's weights alive at once."""

    def begin(self) -> None:
        """A run of the schedule begins, with the present weights as version 0."""

    def compute(self, run: Run, x: Tensor | None) -> Tensor | None:
        """Carry out a task on what it takes in; what it gives to a neighbouring stage. Returns when it is done."""

    def gradient(self, stages: tuple[int, ...], update: int) -> Tensor | None:
        """What this rank adds to a sum over ranks, as one vector: of the weights that belong to exactly these stages.

        None where there are none.
        """

    def set_gradient(self, stage: int, stages: tuple[int, ...], update: int, vector: Tensor) -> None:
        """The sum, for the weights as they are in one of the stages."""

    def update(self, action: Update) -> None: ...

    def drop(self, action: Drop) -> None: ...


class _Saved(NamedTuple):
    """A piece whose activations are alive: autograd's graph from its input to its output."""

    x: Tensor
    y: Tensor
    gradient: Tensor | None = None
    """Of the output, kept for the weight part of a backward whose input part is done."""


class ModelWork:
    """Stages of a model with their weights.

    A loss is the mean over a micro-batch's rows. Gradients are those of the mean over all rows of an update, over all pipelines
    and ranks, so that sums over ranks need no further factor.
    """

    def __init__(
        self,
        lowered: Lowered,
        rank: int,
        stages: Sequence[StageModule],
        boundaries: Sequence[Boundary],
        make_optimizer: OptimizerFactory,
        batch: BatchSource,
        on_loss: LossListener | None = None,
    ) -> None:
        schedule = lowered.schedule
        self.boundaries = boundaries
        self.batch = batch
        self.first_micro_batch = 0
        self.on_loss = on_loss
        self.losses: dict[int, float] = {}
        self.peak_activations = 0.0
        self.peak_versions = 0
        self._schedule = schedule
        self._per_micro_batch = lowered.slots_per_micro_batch
        self._slot_rows = lowered.slot_rows
        self._rows = lowered.ranks.rows_of(rank, lowered.slot_rows)
        self._stages = stages
        worker = lowered.ranks.worker_of(rank)
        self.replicas = {
            (pipeline, stage): ReplicaWeights(stages[stage].initial_values(), make_optimizer)
            for pipeline, stage in schedule.stages_on(worker)
        }
        tied = tied_stages(stages)
        self._names = {stages: [name for name in tied if tied[name] == stages] for stages in set(tied.values())}
        for stage in stages:
            self._names[(stage.number,)] = [name for name in stage.places if name not in tied]
        self._recomputes = {task.stage for task in schedule.workers[worker] if task.kind is Kind.RECOMPUTE}
        self._saved: dict[tuple[int, int, int], _Saved] = {}
        self._inputs: dict[tuple[int, int, int], Tensor] = {}
        self._alive_slots = 0

    # ---- Computations ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.losses = {}
        self.peak_activations, self.peak_versions = 0.0, 1
        for replica in self.replicas.values():
            replica.begin()

    def compute(self, run: Run, x: Tensor | None) -> Tensor | None:
        kind = run.task.kind
        if kind is Kind.FORWARD:
            return self._forward(run, self._data(run, 0) if x is None else x)
        if kind is Kind.RECOMPUTE:
            key = _key(run)
            self._evaluate(run, key, self._inputs.pop(key), run.first_slot, run.num_slots)
            return None
        if kind is Kind.BACKWARD_INPUT:
            return self._backward_input(run, x)
        return self._backward(run, x)

    def _forward(self, run: Run, x: Tensor) -> Tensor | None:
        """In pieces that go back alone; in one, without autograd, where it will be recomputed."""
        recomputes = run.task.stage in self._recomputes
        local = len(self._rows)
        outputs, slot = [], run.first_slot
        if recomputes:
            with flow.no_grad():
                outputs.append(self._evaluate(run, None, x, run.first_slot, run.num_slots))
        for num_slots in run.pieces:
            rows = x if len(run.pieces) == 1 else flow.narrow(x, 0, (slot - run.first_slot) * local, num_slots * local)
            key = (run.task.pipeline, run.task.stage, slot)
            if recomputes:
                self._inputs[key] = rows
            else:
                outputs.append(self._evaluate(run, key, rows, slot, num_slots))
            slot += num_slots
        if self._stages[run.task.stage].loss is not None:
            wait_for(outputs[-1])
            return None
        y = outputs[0] if len(outputs) == 1 else flow.cat(outputs, dim=0)
        wait_for(y)
        return y

    def _evaluate(
        self, run: Run, key: tuple[int, int, int] | None, x: Tensor, first_slot: int, num_slots: int
    ) -> Tensor:
        """The output (in the last stage the loss's share of the update's), without its graph, which is kept under ``key``."""
        stage = self._stages[run.task.stage]
        replica = self.replicas[run.task.pipeline, run.task.stage]
        self._count(num_slots)
        x = x.detach()
        if run.task.stage > 0 and key is not None:
            x.requires_grad_(True)
        y = stage.run(x, replica.version(run.version))
        if stage.loss is not None:
            y = self._loss(run, stage.loss, y, first_slot, num_slots)
        if key is None:
            self._count(-num_slots)
        else:
            self._saved[key] = _Saved(x, y)
        return y.detach()

    def _loss(
        self, run: Run, loss: Callable[[Tensor, Tensor], Tensor], y: Tensor, first: int, num_slots: int
    ) -> Tensor:
        """The mean losses of a piece's micro-batches (or halves), each times its share of the rows of its update."""
        whole = self._per_micro_batch * self._slot_rows
        of_update = len(self._schedule.micro_batches_of(run.update)) * whole
        targets = self._data(run._replace(first_slot=first, pieces=(num_slots,)), 1)
        total, begin = 0.0, 0
        for number, slots in groupby(range(first, first + num_slots), key=lambda slot: slot // self._per_micro_batch):
            rows = sum(1 for _ in slots) * len(self._rows)
            value = loss(flow.narrow(y, 0, begin, rows), flow.narrow(targets, 0, begin, rows))
            begin += rows
            if run.task.kind is Kind.FORWARD:
                self._note_loss(number, float(value.detach().numpy()) * rows / whole, rows / whole)
            total = value * (rows / of_update) + total
        return total

    def _note_loss(self, number: int, part: float, share: float) -> None:
        self.losses[number] = self.losses.get(number, 0.0) + part
        if self.on_loss is not None:
            self.on_loss(self.first_micro_batch + number, part, share)

    def _backward(self, run: Run, gradient: Tensor | None) -> Tensor | None:
        """A whole backward, or the weight part of one."""
        saved = self._saved.pop(_key(run))
        if run.task.kind is Kind.BACKWARD_WEIGHT:
            gradient = saved.gradient
        flow.autograd.backward(saved.y, gradient)
        replica = self.replicas[run.task.pipeline, run.task.stage]
        replica.collect(run.version, run.update)
        wait_for(saved.x if saved.x.grad is None else saved.x.grad)
        self._count(-run.num_slots)
        return saved.x.grad if run.task.kind is Kind.BACKWARD else None

    def _backward_input(self, run: Run, gradient: Tensor | None) -> Tensor | None:
        key = _key(run)
        saved = self._saved[key]
        self._saved[key] = saved._replace(gradient=gradient)
        if not saved.x.requires_grad:
            return None
        seed = flow.ones_like(saved.y) if gradient is None else gradient
        (of_input,) = flow.autograd.grad(saved.y, [saved.x], seed, retain_graph=True)
        wait_for(of_input)
        return of_input

    def _data(self, run: Run, which: int) -> Tensor:
        """This rank's rows of the inputs (0) or targets (1) of a task's slots."""
        pieces = []
        for slot in range(run.first_slot, run.first_slot + run.num_slots):
            number, half = divmod(slot, self._per_micro_batch)
            first = half * self._slot_rows
            pieces.append(
                self.batch(self.first_micro_batch + number)[which][first + self._rows.start : first + self._rows.stop]
            )
        return flow.tensor(np.concatenate(pieces))

    def _count(self, num_slots: int) -> None:
        self._alive_slots += num_slots
        self.peak_activations = max(self.peak_activations, self._alive_slots / self._per_micro_batch)

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def gradient(self, stages: tuple[int, ...], update: int) -> Tensor | None:
        names = self._names[stages]
        held = [replica for (_, stage), replica in self.replicas.items() if stage in stages]
        parts: list[Any] = [replica.gradient(update, names) for replica in held if names]
        return sum(parts[1:], parts[0]) if parts else None

    def set_gradient(self, stage: int, stages: tuple[int, ...], update: int, vector: Tensor) -> None:
        (replica,) = (replica for (_, number), replica in self.replicas.items() if number == stage)
        replica.set_gradient(update, self._names[stages], vector)

    def update(self, action: Update) -> None:
        replica = self.replicas[action.task.pipeline, action.task.stage]
        replica.update(action.task.micro_batch, action.keeps)
        self.peak_versions = max(self.peak_versions, replica.num_versions)
        if replica.parameters:
            wait_for(replica.parameters[-1])

    def drop(self, action: Drop) -> None:
        self.replicas[action.pipeline, action.stage].drop(action.version)


def _key(run: Run) -> tuple[int, int, int]:
    return run.task.pipeline, run.task.stage, run.first_slot
