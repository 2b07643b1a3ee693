"""Which part of what crosses the boundaries between stages each rank holds.

What crosses is, for every slot, a matrix of ``slot_rows`` rows (samples) by columns (features; what lies between the two is whole
everywhere). Its `Distribution` over a worker's ranks is rows alone, in even shares, where a stage has no plan of its own; else
what the plan says, at the stage's beginning (*arriving*) and at its end (*leaving*). Gradients lie where the activations do.
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

__all__ = ["Holding", "StageLayout", "hold", "rows_over"]


@dataclass(frozen=True)
class StageLayout:
    """How the ranks of a stage hold what they take in and what they give away.

    Attributes:
        arriving, leaving: over the stage's ranks; the first stage's ``arriving`` and the last one's ``leaving`` do not matter.
        columns: of what leaves.
        row_parts: what the rows of a slot have to be a multiple of.
        is_joint: whether the ranks communicate with each other while they compute.
    """

    arriving: Distribution
    leaving: Distribution
    columns: int
    row_parts: int
    is_joint: bool


@dataclass(frozen=True)
class Holding:
    """A schedule's stages on its ranks.

    Attributes:
        slot_rows: rows of a slot.
        layouts: of the stages; None where each worker shares the rows out evenly.
    """

    schedule: Schedule
    slot_rows: int
    layouts: tuple[StageLayout, ...] | None = None

    @cached_property
    def ranks(self) -> RankMap:
        return RankMap(self.schedule.widths)

    @cached_property
    def slots_per_micro_batch(self) -> int:
        return slots_per_micro_batch(self.schedule)

    @cached_property
    def _blocks(self) -> dict[tuple[int, int, bool], HeldBlock]:
        return {}

    def columns(self, boundary: int) -> int:
        """Columns of what crosses between stages ``boundary`` and ``boundary + 1``; 1 for whole rows."""
        return 1 if self.layouts is None else self.layouts[boundary].columns

    def distribution(self, worker: int, stage: int, is_leaving: bool) -> Distribution:
        """Over the ranks of a worker, at the beginning or at the end of one of its stages."""
        if self.layouts is None:
            return rows_over(self.schedule.widths[worker])
        layout = self.layouts[stage]
        return layout.leaving if is_leaving else layout.arriving

    def block(self, rank: int, stage: int, is_leaving: bool) -> HeldBlock:
        """What a rank holds at the beginning or at the end of a stage."""
        key = (rank, stage, is_leaving)
        if key not in self._blocks:
            shape = (self.slot_rows, self.columns(stage if is_leaving else stage - 1))
            distribution = self.distribution(self.ranks.worker_of(rank), stage, is_leaving)
            rows, columns = distribution.slices(self.ranks.index_of(rank), shape)
            self._blocks[key] = HeldBlock(range(rows.start, rows.stop), range(columns.start, columns.stop))
        return self._blocks[key]

    def given(self, rank: int, task: Task) -> HeldBlock:
        """What a rank has of what a task gives to a neighbouring stage."""
        return self.block(rank, task.stage, is_leaving=task.kind is Kind.FORWARD)

    def taken(self, rank: int, task: Task) -> HeldBlock:
        """What a rank needs of what a task takes from a neighbouring stage."""
        return self.block(rank, task.stage, is_leaving=task.kind is not Kind.FORWARD)

    def pieces(self, task: Task, source: int, destination: int) -> tuple[Piece, ...]:
        """The messages of one slot of a task's output between two workers; ranks are counted within each of them."""
        is_forward = task.kind is Kind.FORWARD
        neighbour = task.stage + (1 if is_forward else -1)
        return crossing(
            self.distribution(source, task.stage, is_leaving=is_forward),
            self.distribution(destination, neighbour, is_leaving=not is_forward),
            (self.slot_rows, self.columns(min(task.stage, neighbour))),
        )

    def joint_ranks(self, task: Task) -> tuple[int, ...]:
        """The ranks that a task's computation communicates between; none where each of them computes alone."""
        if self.layouts is None or not self.layouts[task.stage].is_joint:
            return ()
        return tuple(self.ranks.ranks_of(self.schedule.worker_of(task)))


def rows_over(width: int) -> Distribution:
    """Rows in even shares over ``width`` ranks."""
    return Distribution((Axis(width, 1),), (Split(0),))


def hold(schedule: Schedule, micro_batch_rows: int, layouts: Sequence[StageLayout] | None = None) -> Holding:
    """How the ranks of a schedule hold micro-batches of so many rows.

    Raises:
        UserError: a slot's rows do not divide over the ranks of some worker, a stage's layout is for another number of ranks than
            its workers have, or a worker has two stages in a row that hold what passes between them otherwise.
    """
    if layouts is not None:
        _check(schedule, layouts)
    per_micro_batch = slots_per_micro_batch(schedule)
    for worker, width in enumerate(schedule.widths):
        parts = [1 if layouts is None else layouts[stage].row_parts for _, stage in schedule.stages_on(worker)]
        for multiple in [width] if layouts is None else parts:
            if micro_batch_rows < 1 or micro_batch_rows % (per_micro_batch * multiple):
                halves = "half micro-batches over " if per_micro_batch == 2 else ""
                raise UserError(
                    f"micro_batch_rows is {micro_batch_rows}, which does not divide into {halves}the {multiple} rank(s) of "
                    f"worker {worker}; give a multiple of {per_micro_batch * multiple}"
                )
    return Holding(schedule, micro_batch_rows // per_micro_batch, None if layouts is None else tuple(layouts))


def _check(schedule: Schedule, layouts: Sequence[StageLayout]) -> None:
    if len(layouts) != schedule.num_stages:
        raise UserError(f"{len(layouts)} stages have plans, schedule {schedule.name} has {schedule.num_stages} stages")
    for worker, width in enumerate(schedule.widths):
        stages = schedule.stages_on(worker)
        for pipeline, stage in stages:
            planned = layouts[stage].leaving.num_ranks
            if planned != width:
                raise UserError(
                    f"stage {stage} is planned for {planned} rank(s), worker {worker}, which has it, is {width} rank(s) wide"
                )
            if (pipeline, stage + 1) in stages and layouts[stage].leaving != layouts[stage + 1].arriving:
                raise UserError(
                    f"worker {worker} has stages {stage} and {stage + 1}, between which the layout changes from "
                    f"{layouts[stage].leaving} to {layouts[stage + 1].arriving}; give both the same one there"
                )
