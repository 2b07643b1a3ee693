"""A pipeline in an exported file: the stages of this rank's worker, and the schedule that they are run by."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import oneflow as flow

from autoddl.pipelines.runtime.backend import HOST
from autoddl.pipelines.runtime.comm.layouts import Layout
from autoddl.pipelines.runtime.comm.parameter_layouts import ParameterLayout
from autoddl.pipelines.runtime.images import images_of, pixel_rows
from autoddl.pipelines.runtime.loss_scaling import LossScaler
from autoddl.pipelines.runtime.parameters import StoredParameter
from autoddl.pipelines.runtime.pipeline.actions import BoundaryTensor, Run
from autoddl.pipelines.runtime.pipeline.data import BatchSource, SlotData
from autoddl.pipelines.runtime.pipeline.engine import execute
from autoddl.pipelines.runtime.pipeline.gradients import GradientSums, StageWeight, shared_layouts
from autoddl.pipelines.runtime.pipeline.report import RankReport
from autoddl.pipelines.runtime.pipeline.slot_stages import SlotStages
from autoddl.pipelines.runtime.pipeline.transport import Transport
from autoddl.pipelines.runtime.pipeline.weights import WeightVersions
from autoddl.pipelines.runtime.pipeline.words import Crossing, WorkerWords
from autoddl.pipelines.runtime.pipeline.work import ModelWork
from autoddl.pipelines.runtime.train_steps import make_optimizer
from autoddl.pipelines.schedule import ScheduleFrame

from .given import BACKEND, JOB_RANK, RANKS, WORKER, WORKERS
from .parameters import all_parameters
from .passes import PASSES
from .training import load_plain_state, plain_state

Tensor = Any


class StageBoundary(NamedTuple):
    """The tensor that a stage sends to the next stage; its gradient goes the other way.

    Attributes:
        rows: rows of a sample.
        features: features of a row.
        producer_layout: layout on the ranks of the stage that computes the tensor.
        consumer_layout: layout on the ranks of the next stage.
        shares_samples: whether ranks share the rows of a sample at one of the ends; then rows are sent, not samples.
        is_image: whether samples are images, whose rows are pixels and whose features are channels.
    """

    rows: int
    features: int
    producer_layout: Layout
    consumer_layout: Layout
    shares_samples: bool = False
    is_image: bool = False

    @property
    def rows_per_sample(self) -> int:
        """Number of parts of a sample that are sent separately: its rows, or 1."""
        return self.rows if self.shares_samples else 1


class SharedWeight(NamedTuple):
    """A weight that several stages hold. Each of them has all of it, in its own layout.

    Attributes:
        name: name of the weight in the plain model.
        layouts: layout of the weight by number of the stage.
    """

    name: str
    layouts: Mapping[int, ParameterLayout]


class StageReplica(NamedTuple):
    """A stage on this rank's worker.

    Attributes:
        module: the stage.
        stored: the trained parameters of the module.
        weights: versions and gradients of the parameters.
    """

    module: Any
    stored: list[StoredParameter]
    weights: WeightVersions


class ModuleStages(SlotStages):
    """Runs the stages of this rank's worker, which are modules.

    Args:
        replicas: the stages by (pipeline, stage).
        boundaries: the tensors between consecutive stages.
        data: inputs and targets of the micro-batches.
        sums: sums of gradients over ranks.

    Attributes:
        first_slot: number, over all runs, of the first slot of the present run.
    """

    def __init__(
        self,
        replicas: Mapping[tuple[int, int], StageReplica],
        boundaries: Sequence[StageBoundary],
        data: SlotData,
        sums: GradientSums,
    ):
        tensors = [
            BoundaryTensor((boundary.rows // boundary.rows_per_sample, boundary.features), BACKEND.compute)
            for boundary in boundaries
        ]
        super().__init__(tensors, data, sums, reports=RANKS.rank == 0)
        self._replicas, self._between = replicas, boundaries
        self.first_slot = 0

    def stage_function(self, run: Run, weights: Sequence[Tensor]) -> Callable[[Any, int], Tensor]:
        """Return the function that computes a task's stage for one slot, with the given weights."""
        replica = self._replicas[run.task.pipeline, run.task.stage]
        for stored, leaf in zip(replica.stored, weights):
            stored.leaf = leaf
        stage = run.task.stage

        def compute(x: Any, slot: int) -> Tensor:
            arguments = self.data.arrays(slot)
            PASSES.step = self.first_slot + slot + 1
            if stage and self._between[stage - 1].shares_samples:  # rows of all samples arrive
                entry = self._between[stage - 1]
                samples = max(len(arguments[0]) // prod(axis.size for axis in entry.consumer_layout.axes(0)), 1)
                x = images_of(x, samples) if entry.is_image else x.reshape(samples, -1, x.shape[2])
            y = replica.module(x, *arguments)
            if flow.is_grad_enabled() and not y.requires_grad:
                y.requires_grad_(True)  # a frozen first stage: its backward pass ends at this tensor
            if stage == len(self._between) or not self._between[stage].shares_samples:
                return y
            exit_ = self._between[stage]
            if exit_.is_image:
                return pixel_rows(y, exit_.features // exit_.producer_layout.num_parts)
            return y.reshape(-1, 1, y.shape[2])

        return compute


class Pipeline:
    """The stages of this rank's worker, and the actions of this rank.

    Args:
        stages: functions that make the modules of all stages; only those of this worker are called.
        instructions: the instructions of each worker, separated by spaces.
        schedule: the rest of the schedule: placement of the stages, and updates of the weights.
        micro_batch: number of samples of a micro-batch.
        slots_per_micro_batch: number of equal slots that a micro-batch is divided into.
        boundaries: the tensors between consecutive stages.
        joint_stages: numbers of the stages whose ranks communicate with each other while they compute.
        shared: weights that several stages hold.
        optimizer: name of the optimizer, see `make_optimizer`.
        learning_rate: learning rate of all stages.

    Attributes:
        replicas: the stages of this worker by (pipeline, stage).
        scaler: scale of the loss, and the number of skipped updates; None if losses are not scaled.
        report: measurements of the last run: start and end of each task, and the bytes that this rank sent. None before the
            first run.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[], Any]],
        instructions: Sequence[str],
        schedule: ScheduleFrame,
        micro_batch: int,
        slots_per_micro_batch: int,
        boundaries: Sequence[StageBoundary],
        joint_stages: set[int],
        shared: Sequence[SharedWeight],
        optimizer: str,
        learning_rate: float,
    ):
        slot_rows = micro_batch // slots_per_micro_batch
        crossings = [
            Crossing(
                (slot_rows * boundary.rows_per_sample, boundary.features),
                boundary.producer_layout.cuts,
                boundary.consumer_layout.cuts,
            )
            for boundary in boundaries
        ]
        reader = WorkerWords(schedule, slots_per_micro_batch, WORKERS, crossings, joint_stages)
        self.schedule, self.slots_per_micro_batch = schedule, slots_per_micro_batch
        self.program = reader.program(instructions[WORKER], WORKER, JOB_RANK)
        self.replicas = {
            (pipeline, stage): make_replica(stages[stage](), optimizer, learning_rate)
            for pipeline, stage in schedule.stages_on(WORKER)
        }
        self.stages = ModuleStages(
            self.replicas,
            boundaries,
            SlotData(schedule, slots_per_micro_batch, slot_rows, lambda number: (np.empty(0), np.empty(0))),
            make_gradient_sums(schedule, self.replicas, shared),
        )
        weights = {key: replica.weights for key, replica in self.replicas.items()}
        self.scaler = LossScaler() if BACKEND.scales_losses else None
        self.work = ModelWork(self.program, self.stages, weights, scaler=self.scaler)
        self.report: RankReport | None = None

    def run(self, batches: BatchSource) -> np.ndarray:
        """Run the schedule once. All ranks must call this.

        Args:
            batches: a function that returns inputs and targets of a micro-batch, given its number in this run.

        Returns:
            The mean loss of each update of the schedule, the same on every rank.
        """
        self.stages.data.batch = batches
        self.report = execute(self.program, self.work, Transport(BACKEND))
        self.stages.first_slot += self.schedule.num_micro_batches * self.slots_per_micro_batch
        # In two rows: the loss of each update, and whether any stage skipped it.
        rows = np.zeros((2, self.schedule.num_updates), np.float32)
        for number, loss in self.report.losses.items():
            update = self.schedule.update_of(number)
            rows[0, update] += loss / len(self.schedule.micro_batches_of(update))
        rows[1, list(self.work.skipped_updates())] = 1
        total = HOST.tensor(rows)
        flow.comm.all_reduce(total)
        losses, num_skipped = total.numpy()
        if self.scaler is not None:
            for num in num_skipped:
                self.scaler.update(is_finite=not num)
        return losses


def make_replica(module: Any, optimizer: str, learning_rate: float) -> StageReplica:
    """Return a stage with an optimizer of its weights."""
    stored = [parameter for parameter in all_parameters(module) if parameter.tensor.requires_grad]
    names = [parameter.layout.name for parameter in stored]
    layouts = [parameter.layout for parameter in stored]
    weights = WeightVersions(
        names, stored, lambda tensors: make_optimizer(tensors, optimizer, learning_rate), BACKEND, layouts, RANKS
    )
    return StageReplica(module, stored, weights)


def make_gradient_sums(
    schedule: ScheduleFrame, replicas: Mapping[tuple[int, int], StageReplica], shared: Sequence[SharedWeight]
) -> GradientSums:
    """Return the sums of gradients that this rank takes part in."""
    # The stages that hold a weight: several for a shared weight, otherwise one.
    stages_of = {weight.name: tuple(weight.layouts) for weight in shared}
    weights: dict[int, list[StageWeight]] = {}
    for (_, stage), replica in replicas.items():
        weights[stage] = []
        for parameter in replica.stored:
            first_name = parameter.layout.sources[0][0]
            holders = stages_of.get(first_name, (stage,))
            weights[stage].append(StageWeight(parameter.layout, holders))
    pipelines = [[WORKERS[worker] for worker in workers] for workers in schedule.placement]
    return GradientSums(RANKS, pipelines, weights, shared_layouts(weight.layouts for weight in shared))


def load_values(pipeline: Pipeline, paths: Sequence[str]) -> None:
    """Set the parameters of this worker's stages from a ``state_dict`` of the plain model.

    Args:
        paths: ``.npz`` files, each with some of the parameters. Together they have all.
    """
    state = ChainMap(*map(np.load, paths))
    for replica in pipeline.replicas.values():
        load_plain_state(replica.module, state)
        replica.weights.renew()


def save_values(pipeline: Pipeline, name: str) -> None:
    """Write the parameters of each stage to ``NAME.stageN.npz``, by their names in the plain model. All ranks must call this."""
    for (pipeline_number, stage), replica in pipeline.replicas.items():
        if pipeline_number == 0:  # all pipelines have the same values
            state = plain_state(replica.module, {})
            if RANKS.rank == 0:
                np.savez(f"{name}.stage{stage}.npz", **state)
