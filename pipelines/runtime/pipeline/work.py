"""The computations of one rank: the interfaces that the engine calls, and their implementation by the stages of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...schedule import Kind
from ..load import load_oneflow
from ..loss_scaling import LossScaler
from .actions import Agree, BoundaryTensor, Drop, Program, Reduce, Run, Update
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
    """The computations of one rank, which the engine calls in the order of the rank's program.

    Attributes:
        boundaries: Shape and type of the tensors between stages s and s + 1, for each s.
        losses: This rank's part of the mean loss of each micro-batch, if the last stage is on this rank.
        peak_activations: Largest number of micro-batches (this rank's rows of them) whose activations were in memory at once.
        peak_versions: Largest number of versions of any one stage's weights in memory at once.
    """

    boundaries: Sequence[BoundaryTensor]
    losses: dict[int, float]
    peak_activations: float
    peak_versions: int

    def begin(self) -> None:
        """Begin a run of the schedule: the present weights become version 0."""

    def compute(self, run: Run, x: Tensor | None) -> Tensor | None:
        """Run a compute task, and return when it has finished.

        Args:
            run: The task.
            x: Tensor from the neighbouring stage: an activation, or the gradient of one; None if the task receives none.

        Returns:
            The tensor for the next stage or, in a backward pass, the previous one; None if there is none.
        """

    def total(self, action: Reduce, transport: Transport) -> Tensor | None:
        """Begin to sum the gradients of the weights that exactly the action's stages share; return the future sum.

        The result is None if there are no such weights.
        """

    def set_gradient(self, stage: int, action: Reduce, total: Tensor) -> None:
        """Set the gradients of one of the action's stages to the sum that `total` returned."""

    def agree(self, action: Agree, transport: Transport) -> None:
        """Decide with other ranks whether an update is skipped. The gradients of the update have been set."""

    def update(self, action: Update) -> None:
        """Make an optimizer step, unless it is skipped."""

    def drop(self, action: Drop) -> None:
        """Free a version of weights."""


class RunnableStages(Protocol):
    """The stages of a model on one rank.

    Attributes:
        boundaries: As of `Work`.
        first_micro_batch: Number, over all runs, of the first micro-batch of the present run.
    """

    boundaries: Sequence[BoundaryTensor]
    first_micro_batch: int

    def run(
        self, run: Run, x: Tensor | None, weights: Sequence[Tensor], first_slot: int, num_slots: int
    ) -> tuple[Tensor, list[LossPart]]:
        """Run a stage forward on some slots of a task.

        Args:
            run: The task.
            x: This rank's part of the previous stage's output; None in the first stage, which reads the data.
            weights: Leaves of the weights' version that the task reads.
            first_slot: Number of the first slot.
            num_slots: Number of slots.

        Returns:
            (output, loss parts). In the last stage the output is the contribution of these slots to the mean loss of the update,
            and the loss parts are those that this rank reports.
        """

    def total(self, action: Reduce, replicas: Mapping[int, WeightVersions], transport: Transport) -> Tensor | None:
        """As `Work.total`. ``replicas`` holds the weights of those of the action's stages that are on this rank, by stage."""

    def set_gradient(self, stage: int, action: Reduce, replica: WeightVersions, total: Tensor) -> None:
        """As `Work.set_gradient`, for the weights ``replica``."""


class TrainableStages(RunnableStages, Protocol):
    """Stages whose weights can be initialized, saved and restored."""

    def initial_values(self, stage: int) -> dict[str, Tensor]:
        """Return this rank's initial weights of a stage, by the names under which the rank stores them."""

    def shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a stage's parameters in the whole model, by their names there."""

    def whole(self, stage: int, kept: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the whole parameters of a stage, named as in `shapes`; all ranks of the stage call.

        Args:
            stage: Number of the stage.
            kept: Parameters as this rank stores them: `ReplicaWeights.entries`.
        """

    def restore(self, stage: int, replica: ReplicaWeights, entries: Mapping[str, Entry]) -> None:
        """Restore weights from entries that `whole` returned, for any division of the same model into stages."""


class ModelWork(StagePasses):
    """Implements `Work` by the stages of a model.

    A loss is the mean over the rows of a micro-batch. Gradients are those of the mean loss over all rows of an update, in all
    pipelines and on all ranks. So they can be summed over ranks without a further factor.

    Args:
        program: Program of this rank.
        stages: The model's stages.
        replicas: Weights of the stages on this rank, by (pipeline, stage).
        on_loss: Called with each part of a loss as soon as it is computed, on the ranks of the last stage.
        scaler: Scale of the loss, which is constant during a run and the same on all ranks; None: losses are not scaled.
    """

    def __init__(
        self,
        program: Program,
        stages: RunnableStages,
        replicas: Mapping[tuple[int, int], WeightVersions],
        on_loss: LossListener | None = None,
        scaler: LossScaler | None = None,
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
        self.scaler = scaler
        # Whether the gradients were finite on all ranks that decided, by (stage, update); None for all stages.
        self._decisions: dict[tuple[int | None, int], bool] = {}
        self._per_micro_batch = program.slots_per_micro_batch
        self._alive_slots = 0

    # ---- Computations ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.losses = {}
        self._decisions = {}
        if self.scaler is not None:
            self.loss_scale = self.scaler.scale
        self.peak_activations, self.peak_versions = 0.0, 1
        for replica in self.replicas.values():
            replica.begin()

    def _record_loss(self, part: LossPart) -> None:
        super()._record_loss(part)
        if self.on_loss is not None:
            self.on_loss(self.stages.first_micro_batch + part.micro_batch, part.value, part.share)

    def _count_live_slots(self, num_slots: int) -> None:
        self._alive_slots += num_slots
        self.peak_activations = max(self.peak_activations, self._alive_slots / self._per_micro_batch)

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def total(self, action: Reduce, transport: Transport) -> Tensor | None:
        held = {stage: replica for (_, stage), replica in self.replicas.items() if stage in action.stages}
        return self.stages.total(action, held, transport)

    def set_gradient(self, stage: int, action: Reduce, total: Tensor) -> None:
        (replica,) = (replica for (_, number), replica in self.replicas.items() if number == stage)
        self.stages.set_gradient(stage, action, replica, total)

    def agree(self, action: Agree, transport: Transport) -> None:
        held = [replica for (_, stage), replica in self.replicas.items() if action.stage in (None, stage)]
        is_finite = all(replica.are_finite(action.update) for replica in held)
        num_infinite = transport.all_reduce(held[0].backend.tensor([0.0 if is_finite else 1.0]), action.ranks)
        self._decisions[action.stage, action.update] = float(num_infinite.numpy()[0]) == 0.0

    def update(self, action: Update) -> None:
        task = action.task
        replica = self.replicas[task.pipeline, task.stage]
        decisions = ((task.stage, task.micro_batch), (None, task.micro_batch))
        is_finite = all(self._decisions.get(key, True) for key in decisions)
        replica.update(task.micro_batch, action.keeps, self.loss_scale, is_skipped=not is_finite)
        self.peak_versions = max(self.peak_versions, replica.num_versions)
        if replica.parameters:
            wait_for(replica.parameters[-1].local())

    def skipped_updates(self) -> set[int]:
        """Return the numbers of the updates that were skipped, at least for one stage, in the present run."""
        return {update for (_, update), is_finite in self._decisions.items() if not is_finite}

    def drop(self, action: Drop) -> None:
        self.replicas[action.pipeline, action.stage].drop(action.version)
