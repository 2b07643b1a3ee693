"""The stages of this rank's worker as modules, for the runtime's engine to run."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import oneflow as flow

from autoddl.pipelines.runtime.layouts import Layout, ParameterLayout
from autoddl.pipelines.runtime.parameters import StoredParameter
from autoddl.pipelines.runtime.pipeline.actions import BoundaryTensor, Reduce, Run
from autoddl.pipelines.runtime.pipeline.data import BatchSource, LossPart, SlotData
from autoddl.pipelines.runtime.pipeline.engine import execute
from autoddl.pipelines.runtime.pipeline.gradients import GradientSums, SharedLayouts, StageWeight
from autoddl.pipelines.runtime.pipeline.passes import evaluate_slots
from autoddl.pipelines.runtime.pipeline.report import RankReport
from autoddl.pipelines.runtime.pipeline.transport import Transport
from autoddl.pipelines.runtime.pipeline.weights import WeightVersions
from autoddl.pipelines.runtime.pipeline.words import Crossing, WorkerWords
from autoddl.pipelines.runtime.pipeline.work import ModelWork
from autoddl.pipelines.schedule import ScheduleFrame

from .given import JOB_RANK, RANKS, WORKER, WORKERS
from .parameters import all_parameters
from .training import load_plain_state, optimizer_over, plain_state

Tensor = Any


class StageBoundary(NamedTuple):
    """What passes from a stage to the next one: (rows, features) of each sample, as they leave and as they arrive."""

    rows: int
    features: int
    leaving: Layout
    arriving: Layout


class SharedWeight(NamedTuple):
    """A weight that several stages hold: for each of them how it lies on its ranks."""

    name: str
    held: Mapping[int, ParameterLayout]


class StageReplica(NamedTuple):
    """A stage on this worker: its module, the parameters of that, and their versions and gradients."""

    module: Any
    stored: list[StoredParameter]
    weights: WeightVersions


class ModuleStages:
    """The stages here: see `RunnableStages`."""

    def __init__(
        self,
        replicas: Mapping[tuple[int, int], StageReplica],
        boundaries: Sequence[BoundaryTensor],
        data: SlotData,
        sums: GradientSums,
    ):
        self.boundaries = boundaries
        self.first_micro_batch = 0
        self.data = data
        self._replicas = replicas
        self._sums = sums

    def run(
        self, run: Run, x: Tensor | None, weights: Sequence[Tensor], first_slot: int, num_slots: int
    ) -> tuple[Tensor, list[LossPart]]:
        replica = self._replicas[run.task.pipeline, run.task.stage]
        for stored, leaf in zip(replica.stored, weights):
            stored.leaf = leaf

        def evaluate(x: Tensor | None, slot: int) -> Tensor:
            return replica.module(x, self.data.rows(slot, 0), self.data.rows(slot, 1))

        slots, is_last = range(first_slot, first_slot + num_slots), run.task.stage == len(self.boundaries)
        return evaluate_slots(evaluate, x, slots, run.update, self.data, is_last, reports=RANKS.rank == 0)

    def total(self, action: Reduce, replicas: Mapping[int, WeightVersions], transport: Transport) -> Tensor | None:
        return self._sums.total(action, replicas, transport)

    def set_gradient(self, stage: int, action: Reduce, replica: WeightVersions, total: Tensor) -> None:
        self._sums.set_gradient(stage, action, replica, total)


class Pipeline:
    """This worker's stages, and what this rank does.

    Args:
        stages: the modules of all stages; those that are here are made.
        words: what each worker does.
        schedule: all but that.
        micro_batch: its samples.
        slots_per_micro_batch: what it is cut in.
        boundaries: between the stages.
        joint_stages: those whose ranks communicate with each other while they compute.
        shared: weights that several stages have.
        optimizer, learning_rate: of each stage's weights.

    Attributes:
        report: of the last run: when each task began and ended, and the bytes that this rank sent.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[], Any]],
        words: Sequence[str],
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
        crossings = [Crossing((slot_rows, one.features), one.leaving.cuts, one.arriving.cuts) for one in boundaries]
        reader = WorkerWords(schedule, slots_per_micro_batch, WORKERS, crossings, joint_stages)
        self.schedule = schedule
        self.program = reader.program(words[WORKER], WORKER, JOB_RANK)
        self.replicas = {
            (pipeline, stage): replica_of(stages[stage](), optimizer, learning_rate)
            for pipeline, stage in schedule.stages_on(WORKER)
        }
        self.stages = ModuleStages(
            self.replicas,
            [BoundaryTensor((one.rows, one.features), flow.float32) for one in boundaries],
            SlotData(schedule, slots_per_micro_batch, slot_rows, lambda number: (np.empty(0), np.empty(0))),
            sums_of(schedule, self.replicas, shared),
        )
        weights = {key: replica.weights for key, replica in self.replicas.items()}
        self.work = ModelWork(self.program, self.stages, weights)
        self.report: RankReport | None = None

    def run(self, batches: BatchSource) -> np.ndarray:
        """Carry out the schedule, once; the mean loss of each of its updates, on every rank. All ranks call.

        Args:
            batches: by the number of a micro-batch in this run.
        """
        self.stages.data.batch = batches
        self.report = execute(self.program, self.work, Transport())
        losses = np.zeros(self.schedule.num_updates, np.float32)
        for number, loss in self.report.losses.items():
            update = self.schedule.update_of(number)
            losses[update] += loss / len(self.schedule.micro_batches_of(update))
        total = flow.tensor(losses)
        flow.comm.all_reduce(total)
        return total.numpy()


def replica_of(module: Any, optimizer: str, learning_rate: float) -> StageReplica:
    """A stage with an optimizer."""
    stored = all_parameters(module)
    names = [one.layout.name for one in stored]
    return StageReplica(
        module, stored, WeightVersions(names, stored, lambda own: optimizer_over(own, optimizer, learning_rate))
    )


def sums_of(
    schedule: ScheduleFrame, replicas: Mapping[tuple[int, int], StageReplica], shared: Sequence[SharedWeight]
) -> GradientSums:
    """What is summed with which ranks."""
    stages_of = {one.name: tuple(one.held) for one in shared}
    weights = {
        stage: [
            StageWeight(one.layout, one.layout.sources, stages_of.get(one.layout.sources[0][0], (stage,)))
            for one in replica.stored
        ]
        for (_, stage), replica in replicas.items()
    }
    pipelines = [[WORKERS[worker] for worker in workers] for workers in schedule.placement]
    layouts: dict[tuple[int, ...], SharedLayouts] = {}
    for stages in set(stages_of.values()):
        together = [one.held for one in shared if tuple(one.held) == stages]
        layouts[stages] = {stage: {one[stage].sources: one[stage] for one in together} for stage in stages}
    return GradientSums(RANKS, pipelines, weights, layouts)


def load_values(pipeline: Pipeline, paths: Sequence[str]) -> None:
    """Take the values of a plain model's ``state_dict``, saved as a file or several; each has some of them."""
    state = ChainMap(*map(np.load, paths))
    for replica in pipeline.replicas.values():
        load_plain_state(replica.module, state)


def save_values(pipeline: Pipeline, name: str) -> None:
    """Write the values by the plain model's names, a file for each stage; all ranks call."""
    for (number, stage), replica in pipeline.replicas.items():
        if number == 0:
            state = plain_state(replica.module, {})
            if RANKS.rank == 0:
                np.savez(f"{name}.stage{stage}.npz", **state)
