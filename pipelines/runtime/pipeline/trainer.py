"""Training of a model with a pipeline schedule: the part of one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.errors import UserError

from ...schedule import Schedule
from ...times import Times
from ..backend import HOST, Backend, place_buffers
from ..load import load_oneflow
from ..loss_scaling import INITIAL_SCALE, LossScaler
from ..recording import RecordedWork, Recorder, Tracer
from ..stage.model import PlannedModel
from ..stage.tracing import Measure, TracedSection
from .actions import BoundaryTensor
from .chain import ModuleChain, StageModule, boundary_tensors, cut_into_stages, even_stage_sizes, tied_stages
from .chain_stages import ChainStages
from .checkpoint import Entry
from .data import BatchSource, LossListener
from .engine import execute
from .lowering import Lowered, lower
from .planned import PlannedStages
from .report import RankReport
from .saving import Member, restore, save, warn_on_stderr
from .slots import slots_per_micro_batch
from .stage_plans import stage_layouts
from .transport import make_transport
from .weights import OptimizerFactory, ReplicaWeights
from .work import ModelWork, TrainableStages

flow: Any = load_oneflow()

__all__ = ["PipelineTrainer"]


class PipelineTrainer:
    """Trains one rank's share of a model with a schedule. Every rank of the job creates a trainer with the same arguments.

    The ranks of the job are assigned to the workers in order: worker w of the schedule gets the next ``schedule.widths[w]`` ranks.
    One run executes the whole schedule. A synchronous schedule can be run repeatedly. An asynchronous schedule drains the pipeline
    at its end, and the next run starts without delayed weights.

    Args:
        model: The whole model. A `ModuleChain` needs the same values on every rank. The trainer takes over its modules: it writes
            weights into those of its own stages, and keeps references to the others. The ranks of a worker share the rows of every
            micro-batch. For a `PlannedModel` the values of the first rank are used, and stages are distributed by their plans.
        schedule: A schedule of one training step or of several.
        make_optimizer: Returns an optimizer for a list of parameters; called for each replica of a stage on this rank.
        batch: Returns the inputs and targets of a micro-batch, by its number over all runs: arrays whose rows are the samples.
        loss_of: For a `PlannedModel` that does not end in a loss: returns the mean loss of a micro-batch, given the whole output of
            the model. ``batch`` then returns inputs only.
        sizes: Layers per stage of a chain. Default: an even division.
        times: Durations of the stages' tasks, by which communication is ordered (see `lower`).
        compress: Whether tensors between stages are compressed if their values allow it (see `compression`).
        on_loss: Called with the losses as they are computed, on the ranks of the last stage.
        keep_gradients: Whether gradients are kept for `gradients`.
        backend: Where tensors lie, and in which types the ranks compute. Default: CPU ranks in single precision.
        loss_scale: Scale of the loss in the first run, if the backend's types need one.
        warn: Called with warnings of one line about checkpoints, on rank 0 only. Default: print them on stderr.
        tracer: Runs each run, and decides which ones are recorded. Default: none is, unless `run` is given a recorder.

    Attributes:
        rank: Number of this rank in the job.
        num_updates: Weight updates in all runs so far, including those before a checkpoint.
        num_micro_batches: Micro-batches in all runs so far, including those before a checkpoint.
        scaler: Scale of the loss, and the number of skipped updates; None if losses are not scaled.
        save_failure: Reason why the last `save` could not write its checkpoint; "" if it could.

    Raises:
        UserError: The job has another number of ranks than the schedule, or the sizes do not fit the chain; or as for `lower`.
    """

    def __init__(
        self,
        model: ModuleChain | PlannedModel,
        schedule: Schedule,
        make_optimizer: OptimizerFactory,
        batch: BatchSource,
        *,
        loss_of: Callable[[Any], Any] | None = None,
        sizes: Sequence[int] | None = None,
        times: Times | None = None,
        compress: bool = False,
        on_loss: LossListener | None = None,
        keep_gradients: bool = False,
        backend: Backend = HOST,
        loss_scale: float = INITIAL_SCALE,
        warn: Callable[[str], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        if flow.env.get_world_size() != sum(schedule.widths):
            raise UserError(
                f"the job has {flow.env.get_world_size()} ranks; schedule {schedule.name} takes {sum(schedule.widths)}"
            )
        inputs = batch(0)[0]
        self.rank: int = flow.env.get_rank()
        self.num_updates = 0
        self.num_micro_batches = 0
        self.save_failure = ""
        self._tracer = tracer
        self.scaler = LossScaler(loss_scale) if backend.scales_losses else None
        self._backend = backend
        agrees = self.scaler is not None
        self._member = Member(self.rank, flow.env.get_world_size(), _all_gather_text, warn or warn_on_stderr)
        self._damaged: set[Path] = set()
        if isinstance(model, PlannedModel):
            layouts = stage_layouts(model.graph, model.stages, len(inputs) // slots_per_micro_batch(schedule))
            tied = model.tied()
            self.lowered = lower(
                schedule, len(inputs), times=times, tied=tied, compress=compress, layouts=layouts, agrees=agrees
            )
            self._stages: TrainableStages = PlannedStages(self.lowered, self.rank, model, batch, loss_of, backend)
        else:
            stages = _cut_chain(model, schedule, sizes)
            tensors = [
                BoundaryTensor(tensor.row_shape, backend.compute if tensor.dtype == flow.float32 else tensor.dtype)
                for tensor in boundary_tensors(stages, HOST.tensor(np.ascontiguousarray(inputs[:1])))
            ]
            place_buffers(model.model, backend.device, backend.compute)
            tied = set(tied_stages(stages).values())
            self.lowered = lower(schedule, len(inputs), times=times, tied=tied, compress=compress, agrees=agrees)
            self._stages = ChainStages(self.lowered, self.rank, stages, tensors, batch, backend)
        self._program = self.lowered.program(self.rank)
        self._replicas = {
            (pipeline, stage): self._replica(stage, make_optimizer, backend)
            for pipeline, stage in self.lowered.schedule.stages_on(self._program.worker)
        }
        if isinstance(model, PlannedModel):
            _check_optimizers(self._replicas.values())
        for replica in self._replicas.values():
            replica.keeps_gradients = keep_gradients
        self._work = ModelWork(self._program, self._stages, self._replicas, on_loss, self.scaler)
        self._owners = _owners(self.lowered, self._stages)

    def _replica(self, stage: int, make_optimizer: OptimizerFactory, backend: Backend) -> ReplicaWeights:
        """Return the weights of a stage on this rank."""
        values = self._stages.initial_values(stage)
        if not isinstance(self._stages, PlannedStages):
            return ReplicaWeights(values, make_optimizer, backend)
        return ReplicaWeights(values, make_optimizer, backend, self._stages.layouts(stage), self._stages.stepper)

    def run(self, recorder: Recorder | None = None) -> RankReport:
        """Run the schedule once, on the micro-batches after those of earlier runs; all ranks call.

        Args:
            recorder: Records where the time goes, which makes the run slower; None: nothing is recorded.
        """
        if recorder is None and self._tracer is not None:
            return self._tracer.run(self._run)
        return self._run(recorder)

    def _run(self, recorder: Recorder | None) -> RankReport:
        """Run the schedule once; see `run`."""
        self._stages.first_micro_batch = self.num_micro_batches
        transport = make_transport(self.lowered.compresses, self._backend)
        if recorder is None:
            report = execute(self._program, self._work, transport)
        else:
            with self._recording(recorder):
                report = execute(self._program, RecordedWork(self._work, recorder), transport)
        self._update_scale()
        self.num_updates += self.lowered.schedule.num_updates
        self.num_micro_batches += self.lowered.schedule.num_micro_batches
        return report if self.scaler is None else replace(report, num_skipped=self.scaler.num_skipped)

    @contextlib.contextmanager
    def _recording(self, recorder: Recorder) -> Iterator[None]:
        """Record the step that runs in this context."""
        stepper = self._stages.stepper if isinstance(self._stages, PlannedStages) else None
        if stepper is not None:
            stepper.recorder = recorder
        try:
            with recorder.step():
                yield
        finally:
            if stepper is not None:
                stepper.recorder = None

    def _update_scale(self) -> None:
        """Change the scale of the loss after a run, by the updates that were skipped on any rank."""
        if self.scaler is None:
            return
        schedule = self.lowered.schedule
        skipped = np.zeros(schedule.num_updates, dtype=np.int64)
        skipped[list(self._work.skipped_updates())] = 1
        # In a synchronous schedule all ranks have decided together.
        for is_skipped in skipped if schedule.is_synchronous else _sum_over_ranks(skipped):
            self.scaler.update(is_finite=not is_skipped)

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the newest values of the parameters of this rank's stages, by their names in the model; all ranks call."""
        replicas = self._replicas.items()
        return _parameter_values(
            self._stages.whole(stage, self._entries(stage, replica)) for (_, stage), replica in replicas
        )

    def gradients(self, update: int) -> dict[str, np.ndarray]:
        """Return the gradients of an update of the last run, in the form of `parameters`; all ranks call.

        Requires ``keep_gradients``.
        """
        replicas = self._replicas.items()
        return _parameter_values(
            self._stages.whole(stage, replica.kept_gradients(update)) for (_, stage), replica in replicas
        )

    def _entries(self, stage: int, replica: ReplicaWeights) -> dict[str, Entry]:
        """Return all weights that this rank stores for a stage, trained and frozen, with optimizer states."""
        frozen = self._stages.frozen(stage) if isinstance(self._stages, PlannedStages) else {}
        return {**replica.entries(), **frozen}

    def trace(self, measure: Measure | None = None) -> list[TracedSection]:
        """Run the layers of planned stages separately and measure each phase; see `PlannedStages.trace`. All ranks call."""
        assert isinstance(self._stages, PlannedStages), (
            "the ranks of a chain's stage do not communicate inside the stage"
        )
        return self._stages.trace(measure)

    def logging(self) -> AbstractContextManager[list[Step]]:
        """Return a context that yields a list of the communication steps that this rank runs inside planned stages meanwhile."""
        assert isinstance(self._stages, PlannedStages), (
            "the ranks of a chain's stage do not communicate inside the stage"
        )
        return self._stages.stepper.logging()

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> bool:
        """Write a checkpoint of the present weights and optimizer states; all ranks call.

        If the checkpoint cannot be written (because the disk is full, say), the user is warned, earlier checkpoints are kept, and
        training can continue; see `saving`. The reason is in ``save_failure``.

        Args:
            directory: Directory of the job's checkpoints.

        Returns:
            Whether the checkpoint was written; the same on all ranks.
        """
        entries = {}
        for (_, stage), replica in self._replicas.items():
            whole = self._stages.whole(stage, self._entries(stage, replica))
            if isinstance(self._stages, PlannedStages):
                whole.update(self._stages.buffers(stage))
            entries.update({name: entry for name, entry in whole.items() if self._owners[name] == self.rank})
        name = self.lowered.schedule.name
        counts = self.num_updates, self.num_micro_batches
        scale = None if self.scaler is None else self.scaler.state()
        self.save_failure = save(directory, self._member, *counts, name, entries, self._damaged, scale)
        return not self.save_failure

    def restore(self, directory: Path) -> bool:
        """Restore the newest intact checkpoint in a directory, written with any schedule; all ranks call.

        Damaged checkpoints are skipped with a warning, the same ones on all ranks; see `saving`.

        Args:
            directory: Directory of the job's checkpoints.

        Returns:
            Whether a checkpoint was restored; False if there is none.

        Raises:
            UserError: There are checkpoints but none is intact, or the newest intact one is of another model.
        """
        replicas = self._replicas.items()
        shapes = {name: shape for (_, stage), _ in replicas for name, shape in self._stages.shapes(stage).items()}
        restored = restore(directory, self._member, shapes)
        if restored is None:
            return False
        for (_, stage), replica in replicas:
            self._stages.restore(stage, replica, restored.entries)
        self._damaged = set(restored.damaged)
        if self.scaler is not None and restored.checkpoint.loss_scale:
            self.scaler.restore(restored.checkpoint.loss_scale)
        self.num_updates = restored.checkpoint.num_updates
        self.num_micro_batches = restored.checkpoint.num_micro_batches
        return True


def _parameter_values(stages: Iterable[Mapping[str, Entry]]) -> dict[str, np.ndarray]:
    """Return the parameters' values without their optimizer states, of all stages together."""
    return {name: entry["value"] for entries in stages for name, entry in entries.items()}


def _check_optimizers(replicas: Iterable[ReplicaWeights]) -> None:
    """Refuse optimizers that are not element-wise, since ranks of planned stages hold shards of the weights."""
    for replica in replicas:
        if isinstance(replica.optimizer, flow.optim.LAMB):
            raise UserError(
                "LAMB needs norms of whole weights, but each rank of a planned stage holds only a part; give SGD, Adam or AdamW"
            )


def _cut_chain(chain: ModuleChain, schedule: Schedule, sizes: Sequence[int] | None) -> tuple[StageModule, ...]:
    """Divide a chain into the stages of a schedule, evenly if no sizes are given."""
    stages = cut_into_stages(
        chain, even_stage_sizes(len(chain.layers), schedule.num_stages) if sizes is None else sizes
    )
    if len(stages) != schedule.num_stages:
        raise UserError(f"{len(stages)} sizes were given, schedule {schedule.name} has {schedule.num_stages} stages")
    return stages


def _owners(lowered: Lowered, stages: TrainableStages) -> dict[str, int]:
    """Return, for each parameter, the first rank that holds it: the rank that saves it."""
    owners: dict[str, int] = {}
    for stage in range(lowered.schedule.num_stages):
        first_rank = min(
            lowered.ranks.ranks_of(replica.worker).start for replica in lowered.schedule.replicas_of(stage)
        )
        for name in stages.shapes(stage):
            owners[name] = min(owners.get(name, first_rank), first_rank)
    return owners


def _all_gather_text(text: str) -> list[str]:
    """Return the texts of all ranks, in rank order; all ranks of the job call."""
    rank, num_ranks = flow.env.get_rank(), flow.env.get_world_size()
    if num_ranks == 1:
        return [text]
    own = np.frombuffer(text.encode(), dtype=np.uint8)
    sizes = _sum_over_ranks(own.size * (np.arange(num_ranks) == rank))
    # All-gather as a sum: each rank fills its own row of a table of zeros.
    table = np.zeros((num_ranks, max(1, *sizes)), dtype=np.int64)
    table[rank, : own.size] = own
    return [row[:size].astype(np.uint8).tobytes().decode() for row, size in zip(_sum_over_ranks(table), sizes)]


def _sum_over_ranks(values: np.ndarray) -> np.ndarray:
    """Return the sum of integer arrays over all ranks of the job, on each of them."""
    tensor = HOST.tensor(values.astype(np.int64))
    flow.comm.all_reduce(tensor)
    return tensor.numpy()
