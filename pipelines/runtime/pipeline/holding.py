"""The block of each boundary tensor that a rank holds.

The tensor that crosses the boundary between two stages is, for every slot, a matrix of ``slot_rows`` rows (samples) by columns (the
last dimension, features; the dimensions between the two are never split). If ranks share the positions of a sample at one of the
ends, the rows of the matrix are those of the samples. Its `Distribution` over the ranks of a worker is

- an even split of the rows, if the stages have no SBP plans;
- the distribution in the plan of the stage otherwise: *leaving* at the end of a stage, *arriving* at its beginning.

The gradient of a boundary tensor has the distribution of the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoddl.costmodel.crossing import Piece, crossing
from autoddl.costmodel.distribution import Axis, Distribution
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.sbp import Split

from ...schedule import Kind, Schedule, Task
from .slots import HeldBlock, RankMap, slots_per_micro_batch

__all__ = ["Holding", "StageLayout", "make_holding", "rows_over"]


@dataclass(frozen=True)
class StageLayout:
    """How the ranks of a stage with an SBP plan hold its input and its output.

    Attributes:
        arriving: Distribution of the stage's input over its ranks. It is not used for the first stage.
        leaving: Distribution of the stage's output over its ranks. For the last stage, only its number of ranks is used.
        columns: Columns of the stage's output.
        row_multiple: Number that the rows of a slot must be a multiple of.
        is_joint: Whether the ranks of the stage communicate with each other during its computations.
        rows_per_sample: Rows of the stage's output per sample, if ranks share samples at one of the ends of the boundary; else 1.
    """

    arriving: Distribution
    leaving: Distribution
    columns: int
    row_multiple: int
    is_joint: bool
    rows_per_sample: int = 1


@dataclass(frozen=True)
class Holding:
    """The blocks that the ranks of a schedule hold at the boundaries of their stages.

    Attributes:
        schedule: The schedule.
        slot_rows: Rows of a slot, over all ranks of a worker.
        layouts: Layouts of the stages; None if the ranks of each worker share the rows evenly.
    """

    schedule: Schedule
    slot_rows: int
    layouts: tuple[StageLayout, ...] | None = None

    @cached_property
    def ranks(self) -> RankMap:
        """The ranks of each worker."""
        return RankMap(self.schedule.widths)

    @cached_property
    def slots_per_micro_batch(self) -> int:
        """Slots of a micro-batch, 1 or 2."""
        return slots_per_micro_batch(self.schedule)

    @cached_property
    def _blocks(self) -> dict[tuple[int, int, bool], HeldBlock]:
        return {}

    def columns(self, boundary: int) -> int:
        """Return the columns of the tensor between stages ``boundary`` and ``boundary + 1``; 1 if rows stay whole."""
        return 1 if self.layouts is None else self.layouts[boundary].columns

    def shape(self, boundary: int) -> tuple[int, int]:
        """Return the rows and columns of a slot of the tensor between stages ``boundary`` and ``boundary + 1``."""
        rows_per_sample = 1 if self.layouts is None else self.layouts[boundary].rows_per_sample
        return self.slot_rows * rows_per_sample, self.columns(boundary)

    def distribution(self, worker: int, stage: int, is_leaving: bool) -> Distribution:
        """Return the distribution of a stage's output (if ``is_leaving``) or input over the ranks of a worker with this stage."""
        if self.layouts is None:
            return rows_over(self.schedule.widths[worker])
        layout = self.layouts[stage]
        return layout.leaving if is_leaving else layout.arriving

    def block(self, rank: int, stage: int, is_leaving: bool) -> HeldBlock:
        """Return the block of a slot of a stage's output (if ``is_leaving``) or input that a rank holds."""
        key = (rank, stage, is_leaving)
        if key not in self._blocks:
            shape = self.shape(stage if is_leaving else stage - 1)
            distribution = self.distribution(self.ranks.worker_of(rank), stage, is_leaving)
            rows, columns = distribution.slices(self.ranks.index_of(rank), shape)
            self._blocks[key] = HeldBlock(range(rows.start, rows.stop), range(columns.start, columns.stop))
        return self._blocks[key]

    def output_block(self, rank: int, task: Task) -> HeldBlock:
        """Return the block of a task's output that a rank computes, for a task whose output goes to another stage."""
        return self.block(rank, task.stage, is_leaving=task.kind is Kind.FORWARD)

    def input_block(self, rank: int, task: Task) -> HeldBlock:
        """Return the block of a task's input that a rank needs, for a task whose input comes from another stage."""
        return self.block(rank, task.stage, is_leaving=task.kind is not Kind.FORWARD)

    def pieces(self, task: Task, source: int, destination: int) -> tuple[Piece, ...]:
        """Return the pieces of one slot of a task's output that the ranks of two workers send each other.

        Args:
            task: Task whose output is sent.
            source: Worker that sends. Ranks in the result are counted from its first one.
            destination: Worker that receives. Ranks in the result are counted from its first one.
        """
        is_forward = task.kind is Kind.FORWARD
        consumer_stage = task.stage + (1 if is_forward else -1)
        return crossing(
            self.distribution(source, task.stage, is_leaving=is_forward),
            self.distribution(destination, consumer_stage, is_leaving=not is_forward),
            self.shape(min(task.stage, consumer_stage)),
        )

    def joint_ranks(self, task: Task) -> tuple[int, ...]:
        """Return the ranks that communicate with each other during a task; empty if each rank computes alone."""
        if self.layouts is None or not self.layouts[task.stage].is_joint:
            return ()
        return tuple(self.ranks.ranks_of(self.schedule.worker_of(task)))


def rows_over(width: int) -> Distribution:
    """Return the distribution that splits rows evenly over ``width`` ranks.

    >>> print(rows_over(4))
    (S0:4)
    """
    return Distribution((Axis(width, 1),), (Split(0),))


def make_holding(schedule: Schedule, micro_batch_rows: int, layouts: Sequence[StageLayout] | None = None) -> Holding:
    """Return the blocks that the ranks of a schedule hold.

    Args:
        schedule: A valid schedule.
        micro_batch_rows: Rows (samples) of a micro-batch.
        layouts: Layouts of stages with SBP plans. If None, the ranks of each worker share the rows evenly.

    Raises:
        UserError: the rows of a slot are not divisible by the ranks of a worker; or a layout has another number of ranks than the
            workers of its stage; or a worker has two consecutive stages with different layouts at their common boundary.

    >>> from autoddl.pipelines import generate
    >>> holding = make_holding(generate("gpipe", num_stages=2, num_micro_batches=4, width=2), micro_batch_rows=6)
    >>> holding.block(rank=3, stage=1, is_leaving=False).rows
    range(3, 6)
    """
    if layouts is not None:
        _check_layouts(schedule, layouts)
    per_micro_batch = slots_per_micro_batch(schedule)
    for worker, width in enumerate(schedule.widths):
        stages = [stage for _, stage in schedule.stages_on(worker)]
        divisors = [width] if layouts is None else [layouts[stage].row_multiple for stage in stages]
        for divisor in divisors:
            if micro_batch_rows < 1 or micro_batch_rows % (per_micro_batch * divisor):
                halves = "half micro-batches over " if per_micro_batch == 2 else ""
                raise UserError(
                    f"micro_batch_rows is {micro_batch_rows}, which does not divide into {halves}the {divisor} "
                    f"rank(s) of worker {worker}; give a multiple of {per_micro_batch * divisor}"
                )
    return Holding(schedule, micro_batch_rows // per_micro_batch, None if layouts is None else tuple(layouts))


def _check_layouts(schedule: Schedule, layouts: Sequence[StageLayout]) -> None:
    """Check that layouts fit the stages and workers of a schedule."""
    if len(layouts) != schedule.num_stages:
        raise UserError(f"{len(layouts)} stages have plans, schedule {schedule.name} has {schedule.num_stages} stages")
    for worker, width in enumerate(schedule.widths):
        stages = schedule.stages_on(worker)
        for pipeline, stage in stages:
            planned = layouts[stage].leaving.num_ranks
            if planned != width:
                raise UserError(
                    f"stage {stage} is planned for {planned} rank(s), worker {worker}, which has it, is {width} rank(s) "
                    "wide"
                )
            if (pipeline, stage + 1) in stages and layouts[stage].leaving != layouts[stage + 1].arriving:
                raise UserError(
                    f"worker {worker} has stages {stage} and {stage + 1}, between which the layout changes from "
                    f"{layouts[stage].leaving} to {layouts[stage + 1].arriving}; give both the same layout there"
                )
