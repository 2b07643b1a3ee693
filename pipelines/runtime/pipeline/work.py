"""What the computations of a schedule are: the interface, and a model's stages behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ...schedule import Kind
from ..detaching import detached
from ..load import load_oneflow
from .actions import Drop, Reduce, Run, Update
from .chain import Boundary
from .checkpoint import Entry
from .data import LossListener, LossPart
from .lowering import Lowered
from .transport import Transport, wait_for
from .weights import OptimizerFactory, ReplicaWeights

flow: Any = load_oneflow()

__all__ = ["ModelWork", "Stages", "Work"]

Tensor = Any


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

    def total(self, action: Reduce, transport: Transport) -> Tensor | None:
        """Begin a sum over ranks: of the gradients of the weights that belong to exactly its stages. None where there are none."""

    def set_gradient(self, stage: int, action: Reduce, total: Tensor) -> None:
        """The sum, for the weights as they are in one of the stages."""

    def update(self, action: Update) -> None: ...

    def drop(self, action: Drop) -> None: ...


class Stages(Protocol):
    """The stages of a model as one rank runs them."""

    boundaries: Sequence[Boundary]
    first_micro_batch: int
    """The number over all runs of the run's first micro-batch."""

    def initial_values(self, stage: int) -> dict[str, Tensor]:
        """This rank's weights of a stage, by the names under which it keeps them."""

    def run(
        self, run: Run, x: Tensor | None, weights: Sequence[Tensor], first_slot: int, num_slots: int
    ) -> tuple[Tensor, list[LossPart]]:
        """A stage's output for some slots of a task, with these weights.

        In the last stage it is the loss's share of its update's, with the parts of the mean losses that are this rank's to report.

        Args:
            x: what comes from the stage before; None in the first one, which reads the data.
        """

    def total(self, action: Reduce, replicas: Mapping[int, ReplicaWeights], transport: Transport) -> Tensor | None:
        """As `Work.total`; ``replicas`` by stage, where this rank has one of the action's stages."""

    def set_gradient(self, stage: int, action: Reduce, replica: ReplicaWeights, total: Tensor) -> None:
        """As `Work.set_gradient`."""

    def shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        """A stage's parameters by their names in the whole model, with their shapes there."""

    def whole(self, stage: int, kept: Mapping[str, Entry]) -> dict[str, Entry]:
        """What the ranks of a stage keep (see `ReplicaWeights.entries`) as whole parameters by these names; all of them call."""

    def restore(self, stage: int, replica: ReplicaWeights, entries: Mapping[str, Entry]) -> None:
        """Take what `whole` gave, of whatever cut of the same model."""


class _Saved(NamedTuple):
    """A piece whose activations are alive: autograd's graph from its input to its output."""

    x: Tensor | None
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
        stages: Stages,
        make_optimizer: OptimizerFactory,
        on_loss: LossListener | None = None,
    ) -> None:
        schedule = lowered.schedule
        self.stages = stages
        self.boundaries = stages.boundaries
        self.on_loss = on_loss
        self.losses: dict[int, float] = {}
        self.peak_activations = 0.0
        self.peak_versions = 0
        self._per_micro_batch = lowered.slots_per_micro_batch
        self._last_stage = schedule.num_stages - 1
        worker = lowered.ranks.worker_of(rank)
        self.replicas = {
            (pipeline, stage): ReplicaWeights(stages.initial_values(stage), make_optimizer)
            for pipeline, stage in schedule.stages_on(worker)
        }
        self._recomputes = {task.stage for task in schedule.workers[worker] if task.kind is Kind.RECOMPUTE}
        self._saved: dict[tuple[int, int, int], _Saved] = {}
        self._inputs: dict[tuple[int, int, int], Tensor | None] = {}
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
        recomputes = run.task.stage in self._recomputes
        outputs, slot = [], run.first_slot
        if recomputes:
            with flow.no_grad():
                outputs.append(self._evaluate(run, None, x, run.first_slot, run.num_slots))
        for num_slots in run.pieces:
            piece = _slots(x, run.num_slots, slot - run.first_slot, num_slots)
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
        replica = self.replicas[run.task.pipeline, run.task.stage]
        self._count(num_slots)
        if x is not None:
            x = detached(x)
            x.requires_grad_(key is not None)
        y, losses = self.stages.run(run, x, replica.version(run.version), first_slot, num_slots)
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
        if self.on_loss is not None:
            self.on_loss(self.stages.first_micro_batch + part.micro_batch, part.value, part.share)

    def _backward(self, run: Run, gradient: Tensor | None) -> Tensor | None:
        """A whole backward, or the weight part of one."""
        saved = self._saved.pop(_key(run))
        if run.task.kind is Kind.BACKWARD_WEIGHT:
            gradient = saved.gradient
        flow.autograd.backward(saved.y, gradient)
        replica = self.replicas[run.task.pipeline, run.task.stage]
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
        self._alive_slots += num_slots
        self.peak_activations = max(self.peak_activations, self._alive_slots / self._per_micro_batch)

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def total(self, action: Reduce, transport: Transport) -> Tensor | None:
        held = {stage: replica for (_, stage), replica in self.replicas.items() if stage in action.stages}
        return self.stages.total(action, held, transport)

    def set_gradient(self, stage: int, action: Reduce, total: Tensor) -> None:
        (replica,) = (replica for (_, number), replica in self.replicas.items() if number == stage)
        self.stages.set_gradient(stage, action, replica, total)

    def update(self, action: Update) -> None:
        replica = self.replicas[action.task.pipeline, action.task.stage]
        replica.update(action.task.micro_batch, action.keeps)
        self.peak_versions = max(self.peak_versions, replica.num_versions)
        if replica.parameters:
            wait_for(replica.parameters[-1])

    def drop(self, action: Drop) -> None:
        self.replicas[action.pipeline, action.stage].drop(action.version)


def _slots(x: Tensor | None, num_slots: int, first: int, count: int) -> Tensor | None:
    """Some slots of a tensor that has ``num_slots`` of them, one below the other."""
    if x is None or count == num_slots:
        return x
    rows = x.shape[0] // num_slots
    return flow.narrow(x, 0, first * rows, count * rows)


def _key(run: Run) -> tuple[int, int, int]:
    return run.task.pipeline, run.task.stage, run.first_slot
