"""Training a model with a schedule, on one rank of all those that do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.errors import UserError

from ...schedule import Schedule
from ...times import Times
from ..load import load_oneflow
from ..stage.model import PlannedModel
from ..stage.tracing import Measure, TracedSection
from .chain import ModuleChain, StageModule, boundaries, cut, even_sizes, tied_stages
from .chain_stages import ChainStages
from .checkpoint import Entry
from .data import BatchSource, LossListener
from .engine import execute
from .lowering import Lowered, lower
from .planned import PlannedStages
from .report import RankReport
from .saving import Member, restore, save, warn_on_stderr
from .stage_plans import stage_layouts
from .transport import make_transport
from .weights import OptimizerFactory, ReplicaWeights
from .work import ModelWork, TrainableStages

flow: Any = load_oneflow()

__all__ = ["PipelineTrainer"]


class PipelineTrainer:
    """One rank's part in training a model with a schedule; every rank of the job makes one, with the same arguments.

    Worker w of the schedule is ``schedule.widths[w]`` ranks, from rank 0 on in the order of workers. A run carries out the whole
    schedule. A synchronous one can be run again and again; an asynchronous one empties the pipeline at its end, and begins the next
    run without delayed weights.

    Attributes:
        rank: this one.
        num_updates, num_micro_batches: of all runs so far, those before a checkpoint included.
        save_failure: why the last `save` could not write its checkpoint; "" where it could.

    Args:
        model: whole. A chain has the same values on every rank, and its modules belong to the trainer from now on, which puts the
            weights of its own stages into them; it does not let go of the others. A worker's ranks share the rows of every
            micro-batch. Of a `PlannedModel` the first rank's values are taken; its stages are spread as their plans say.
        schedule: of one iteration or many.
        make_optimizer: for each replica of a stage here, of its parameters.
        batch: inputs and targets of a micro-batch by its number, counted over all runs; arrays whose rows are the samples.
        sizes: layers per stage of a chain; even by default.
        times: of the stages, to order the communication by (see `lower`).
        compress: whether what goes between stages is compressed where its values allow it (see `compression`).
        on_loss: told of losses as they come, where the last stage is.
        keep_gradients: whether `gradients` can be asked for.
        warn: takes warnings of one line about checkpoints, on rank 0 alone; they go to stderr by default.

    Raises:
        UserError: the job has another number of ranks than the schedule, the sizes do not fit the chain, or see `lower`.
    """

    def __init__(
        self,
        model: ModuleChain | PlannedModel,
        schedule: Schedule,
        make_optimizer: OptimizerFactory,
        batch: BatchSource,
        *,
        sizes: Sequence[int] | None = None,
        times: Times | None = None,
        compress: bool = False,
        on_loss: LossListener | None = None,
        keep_gradients: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        if flow.env.get_world_size() != sum(schedule.widths):
            raise UserError(
                f"the job has {flow.env.get_world_size()} ranks; schedule {schedule.name} takes {sum(schedule.widths)}"
            )
        inputs, _ = batch(0)
        self.rank: int = flow.env.get_rank()
        self.num_updates = 0
        self.num_micro_batches = 0
        self.save_failure = ""
        self._member = Member(self.rank, flow.env.get_world_size(), _exchange, warn or warn_on_stderr)
        self._damaged: set[Path] = set()
        if isinstance(model, PlannedModel):
            layouts = stage_layouts(model.graph, model.stages)
            tied = model.tied()
            self.lowered = lower(schedule, len(inputs), times=times, tied=tied, compress=compress, layouts=layouts)
            self._stages: TrainableStages = PlannedStages(self.lowered, self.rank, model, batch)
        else:
            stages = _cut(model, schedule, sizes)
            between = boundaries(stages, flow.tensor(np.ascontiguousarray(inputs[:1])))
            tied = set(tied_stages(stages).values())
            self.lowered = lower(schedule, len(inputs), times=times, tied=tied, compress=compress)
            self._stages = ChainStages(self.lowered, self.rank, stages, between, batch)
        self._program = self.lowered.program(self.rank)
        self._replicas = {
            (pipeline, stage): ReplicaWeights(self._stages.initial_values(stage), make_optimizer)
            for pipeline, stage in self.lowered.schedule.stages_on(self._program.worker)
        }
        if isinstance(model, PlannedModel):
            _check_optimizers(self._replicas.values())
        for replica in self._replicas.values():
            replica.keeps_gradients = keep_gradients
        self._work = ModelWork(self._program, self._stages, self._replicas, on_loss)
        self._owners = _owners(self.lowered, self._stages)

    def run(self) -> RankReport:
        """Carry out the schedule once, on the micro-batches that follow; all ranks call."""
        self._stages.first_micro_batch = self.num_micro_batches
        report = execute(self._program, self._work, make_transport(self.lowered.compresses))
        self.num_updates += self.lowered.schedule.num_updates
        self.num_micro_batches += self.lowered.schedule.num_micro_batches
        return report

    def parameters(self) -> dict[str, np.ndarray]:
        """The newest values of the parameters of the stages here, by their names in the model; all ranks call."""
        held = self._replicas.items()
        return _values(self._stages.whole(stage, self._entries(stage, replica)) for (_, stage), replica in held)

    def gradients(self, update: int) -> dict[str, np.ndarray]:
        """What an update of the last run was made with, as `parameters`, where ``keep_gradients`` was asked for; all ranks call."""
        held = self._replicas.items()
        return _values(self._stages.whole(stage, replica.kept_gradients(update)) for (_, stage), replica in held)

    def _entries(self, stage: int, replica: ReplicaWeights) -> dict[str, Entry]:
        """All that this rank keeps of a stage."""
        frozen = self._stages.frozen(stage) if isinstance(self._stages, PlannedStages) else {}
        return {**replica.entries(), **frozen}

    def trace(self, measure: Measure | None = None) -> list[TracedSection]:
        """What each layer of stages with plans sends, phase by phase: see `PlannedStages.trace`; all ranks call."""
        assert isinstance(self._stages, PlannedStages), "stages of a chain send nothing inside"
        return self._stages.trace(measure)

    def logging(self) -> AbstractContextManager[list[Step]]:
        """A list that grows by every step inside stages with plans that this rank takes part in, while it lasts."""
        assert isinstance(self._stages, PlannedStages), "stages of a chain send nothing inside"
        return self._stages.stepper.logging()

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> bool:
        """Write a checkpoint, of what all runs so far have made; all ranks call.

        Returns:
            whether it could be written, on all ranks alike. If not (the disk is full, say), the user is warned, the checkpoints
            before it stay, and training can go on: losing one checkpoint is no reason to lose the job. See `saving`.
        """
        entries = {}
        for (_, stage), replica in self._replicas.items():
            whole = self._stages.whole(stage, self._entries(stage, replica))
            entries.update({name: entry for name, entry in whole.items() if self._owners[name] == self.rank})
        name = self.lowered.schedule.name
        counts = self.num_updates, self.num_micro_batches
        self.save_failure = save(directory, self._member, *counts, name, entries, self._damaged)
        return not self.save_failure

    def restore(self, directory: Path) -> bool:
        """Go on from the newest whole checkpoint in a directory, of whatever schedule; False where there is none. All ranks call.

        Damaged ones are skipped with a warning, on all ranks alike; see `saving`.

        Raises:
            UserError: there are checkpoints and none is intact, or the one that was found is of another model.
        """
        held = self._replicas.items()
        shapes = {name: shape for (_, stage), _ in held for name, shape in self._stages.shapes(stage).items()}
        found = restore(directory, self._member, shapes)
        if found is None:
            return False
        for (_, stage), replica in held:
            self._stages.restore(stage, replica, found.entries)
        self._damaged = set(found.damaged)
        self.num_updates, self.num_micro_batches = found.checkpoint.num_updates, found.checkpoint.num_micro_batches
        return True


def _values(stages: Iterable[Mapping[str, Entry]]) -> dict[str, np.ndarray]:
    return {name: entry["value"] for entries in stages for name, entry in entries.items()}


def _check_optimizers(replicas: Iterable[ReplicaWeights]) -> None:
    for replica in replicas:
        if isinstance(replica.optimizer, flow.optim.LAMB):
            raise UserError(
                "LAMB takes norms of whole weights, of which a rank of a stage with a plan has a part; give SGD, Adam or AdamW"
            )


def _cut(chain: ModuleChain, schedule: Schedule, sizes: Sequence[int] | None) -> tuple[StageModule, ...]:
    stages = cut(chain, even_sizes(len(chain.layers), schedule.num_stages) if sizes is None else sizes)
    if len(stages) != schedule.num_stages:
        raise UserError(f"{len(stages)} sizes were given, schedule {schedule.name} has {schedule.num_stages} stages")
    return stages


def _owners(lowered: Lowered, stages: TrainableStages) -> dict[str, int]:
    """Per parameter the first of the ranks that have it: the one that saves it."""
    owners: dict[str, int] = {}
    for stage in range(lowered.schedule.num_stages):
        holders = lowered.schedule.replicas_of(stage)
        ranks = [lowered.ranks.ranks_of(replica.worker).start for replica in holders]
        for name in stages.shapes(stage):
            owners[name] = min(ranks + ([owners[name]] if name in owners else []))
    return owners


def _exchange(text: str) -> list[str]:
    """Give a text, and get those of all ranks; all ranks of the job call."""
    rank, num_ranks = flow.env.get_rank(), flow.env.get_world_size()
    if num_ranks == 1:
        return [text]
    own = np.frombuffer(text.encode(), dtype=np.uint8)
    sizes = _total(own.size * (np.arange(num_ranks) == rank))
    table = np.zeros((num_ranks, max(1, *sizes)), dtype=np.int64)
    table[rank, : own.size] = own
    return [row[:size].astype(np.uint8).tobytes().decode() for row, size in zip(_total(table), sizes)]


def _total(values: np.ndarray) -> np.ndarray:
    """A sum over all ranks."""
    tensor = flow.tensor(values.astype(np.int64))
    flow.comm.all_reduce(tensor)
    return tensor.numpy()
