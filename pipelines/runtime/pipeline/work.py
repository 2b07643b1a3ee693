"""What the computations of a schedule are: the interface, and a model's stages behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...schedule import Kind
from ..load import load_oneflow
from .actions import BoundaryTensor, Drop, Program, Reduce, Run, Update
from .checkpoint import Entry
from .data import LossListener, LossPart
from .passes import StagePasses
from .transport import Transport
from .waiting import wait_for
from .weights import ReplicaWeights, WeightVersions

flow: Any = load_oneflow()

__all__ = ["ModelWork", "RunnableStages", "TrainableStages", "Work"]

Tensor = Any


class Work(Protocol):
    """The computations of one rank; the engine calls them in the order of the rank's program."""

    boundaries: Sequence[BoundaryTensor]
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


class RunnableStages(Protocol):
    """The stages of a model as one rank runs them."""

    boundaries: Sequence[BoundaryTensor]
    first_micro_batch: int
    """The number over all runs of the run's first micro-batch."""

    def run(
        self, run: Run, x: Tensor | None, weights: Sequence[Tensor], first_slot: int, num_slots: int
    ) -> tuple[Tensor, list[LossPart]]:
        """A stage's output for some slots of a task, with these weights.

        In the last stage it is the loss's share of its update's, with the parts of the mean losses that are this rank's to report.

        Args:
            x: what comes from the stage before; None in the first one, which reads the data.
        """

    def total(self, action: Reduce, replicas: Mapping[int, WeightVersions], transport: Transport) -> Tensor | None:
        """As `Work.total`; ``replicas`` by stage, where this rank has one of the action's stages."""

    def set_gradient(self, stage: int, action: Reduce, replica: WeightVersions, total: Tensor) -> None:
        """As `Work.set_gradient`."""


class TrainableStages(RunnableStages, Protocol):
    """Stages whose weights can be made, saved and restored."""

    def initial_values(self, stage: int) -> dict[str, Tensor]:
        """This rank's weights of a stage, by the names under which it keeps them."""

    def shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        """A stage's parameters by their names in the whole model, with their shapes there."""

    def whole(self, stage: int, kept: Mapping[str, Entry]) -> dict[str, Entry]:
        """What the ranks of a stage keep (see `ReplicaWeights.entries`) as whole parameters by these names; all of them call."""

    def restore(self, stage: int, replica: ReplicaWeights, entries: Mapping[str, Entry]) -> None:
        """Take what `whole` gave, of whatever cut of the same model."""


class ModelWork(StagePasses):
    """Stages of a model with their weights.

    A loss is the mean over a micro-batch's rows. Gradients are those of the mean over all rows of an update, over all pipelines
    and ranks, so that sums over ranks need no further factor.

    Args:
        program: of this rank.
        replicas: the weights of its stages, by (pipeline, stage).
        on_loss: told of losses as they come, where the last stage is.
    """

    def __init__(
        self,
        program: Program,
        stages: RunnableStages,
        replicas: Mapping[tuple[int, int], WeightVersions],
        on_loss: LossListener | None = None,
    ) -> None:
        self.stages = stages
        self.boundaries = stages.boundaries
        self.on_loss = on_loss
        self.peak_activations = 0.0
        self.peak_versions = 0
        self.replicas = replicas
        tasks = [action.task for action in program.actions if isinstance(action, Run)]
        recomputed = {task.stage for task in tasks if task.kind is Kind.RECOMPUTE}
        super().__init__(replicas, stages.run, program.frame.num_stages - 1, recomputed)
        self._per_micro_batch = program.slots_per_micro_batch
        self._alive_slots = 0

    # ---- Computations ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.losses = {}
        self.peak_activations, self.peak_versions = 0.0, 1
        for replica in self.replicas.values():
            replica.begin()

    def _note_loss(self, part: LossPart) -> None:
        super()._note_loss(part)
        if self.on_loss is not None:
            self.on_loss(self.stages.first_micro_batch + part.micro_batch, part.value, part.share)

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
            wait_for(replica.parameters[-1].local())

    def drop(self, action: Drop) -> None:
        self.replicas[action.pipeline, action.stage].drop(action.version)
