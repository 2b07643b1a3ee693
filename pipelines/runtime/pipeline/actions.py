"""Actions: the instructions of one rank. A schedule is lowered to a list of actions per rank.

A micro-batch consists of one or two *slots*: two if the schedule has tasks on half micro-batches (see
:mod:`autoddl.pipelines.tasktable`), else one. A slot has ``slot_rows`` rows (samples). Slots are numbered over the whole schedule:
with two slots per micro-batch, slot 2 m + 1 is the second half of micro-batch m. A worker of width r consists of r ranks. Each of
these ranks holds an even share of the rows of every slot, or a block of rows and columns if the stage has an SBP plan.

The text of an action contains the text of its task (:mod:`autoddl.pipelines.schedule`):

===========================  ===========================================================================================
``run 2F5 v1``               compute task 2F5 with version 1 of the stage's weights
``run 2F5 v1 of (4 5)``      the same, by ranks 4 and 5, which communicate with each other during the computation
``send 2F5 to 3``            send the output of task 2F5 to rank 3
``send 2F5[2:4] to 3``       send rows 2 and 3 of each slot of the output
``send 2F5[0:4,8:16] to 3``  send rows 0 to 3 and columns 8 to 15 of each slot of the output
``receive 2F5 from 1``       receive the output of task 2F5 from rank 1
``rest of 2F5, 1 to 3``      send or receive the second part of a message, if it could not be compressed
``reduce 0A3 of (0 4)``      sum the gradients of stage 0 for update 3 over ranks 0 and 4
``reduce 0&3A3 of (0 4)``    sum the gradients of the weights that stages 0 and 3 share
``agree on 2V3 of (4 5)``    decide with ranks 4 and 5 whether update 3 of stage 2 is skipped, since gradients are not finite
``agree on V3 of (0 1)``     the same for all stages of these ranks
``update 2U3``               turn version 3 of stage 2's weights into version 4, in place
``update 2U3 keep``          the same, keeping version 3 for later tasks
``drop 2v3``                 free version 3 of stage 2's weights
===========================  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from autoddl.costmodel.crossing import Piece

from ...schedule import Kind, ScheduleFrame, Task
from .slots import HeldBlock, slots_of

__all__ = [
    "Action",
    "Agree",
    "BoundaryTensor",
    "Drop",
    "Message",
    "Program",
    "Receive",
    "Reduce",
    "Rest",
    "Run",
    "Send",
    "Update",
    "message_of",
]


class Message(NamedTuple):
    """A block of a task's output (an activation, or the gradient of one) that one rank sends to another.

    Attributes:
        task: Task whose output is sent.
        source: Rank that sends.
        destination: Rank that receives.
        first_slot: First slot of the task.
        num_slots: Number of slots of the task. The message contains the same rows and columns of each of them.
        first_row: First row of the block, counted from the first row of the slot.
        num_rows: Rows of the block, in one slot.
        is_whole: Whether the block contains all rows of the slot.
        columns: Columns of the block; None if it contains all columns.
    """

    task: Task
    source: int
    destination: int
    first_slot: int
    num_slots: int
    first_row: int
    num_rows: int
    is_whole: bool
    columns: range | None = None

    def __str__(self) -> str:
        rows = f"{self.first_row}:{self.first_row + self.num_rows}"
        if self.columns is not None:
            return f"{self.task}[{rows},{self.columns.start}:{self.columns.stop}]"
        return f"{self.task}" if self.is_whole else f"{self.task}[{rows}]"


@dataclass(frozen=True)
class BoundaryTensor:
    """The tensor that crosses the boundary between two stages.

    Attributes:
        row_shape: Shape of one row (sample).
        dtype: Type of the elements.
    """

    row_shape: tuple[int, ...]
    dtype: Any


def message_of(
    task: Task, per_micro_batch: int, piece: Piece, sources: range, destinations: range, shape: tuple[int, int]
) -> Message:
    """Return the message that sends one piece of a task's output from one worker to another.

    Args:
        task: Task whose output is sent.
        per_micro_batch: Slots of a micro-batch.
        piece: Block of one slot, with the sending and the receiving rank counted within their workers.
        sources: Ranks of the sending worker.
        destinations: Ranks of the receiving worker.
        shape: Rows and columns of a slot, over all ranks of a worker.
    """
    slots = slots_of(task, per_micro_batch)
    rows, columns = piece.block
    return Message(
        task=task,
        source=sources[piece.source],
        destination=destinations[piece.destination],
        first_slot=slots.start,
        num_slots=len(slots),
        first_row=rows.start,
        num_rows=len(rows),
        is_whole=len(rows) == shape[0],
        columns=None if len(columns) == shape[1] else columns,
    )


class Run(NamedTuple):
    """A forward pass, a backward pass or one part of it, or a recomputation.

    A forward pass may cover more slots than its backward passes (a pair of micro-batches forward, each of them back on its own). It
    is computed in *pieces*, one for each backward pass.

    Attributes:
        task: Task of the schedule.
        first_slot: First slot of the task.
        slots_per_piece: Number of slots of each piece; a backward pass has one piece.
        version: Version of the stage's weights that the task reads.
        update: Update that the gradients of the micro-batch belong to.
        ranks: All ranks of the worker if they communicate during the computation; empty if each of them computes alone.
    """

    task: Task
    first_slot: int
    slots_per_piece: tuple[int, ...]
    version: int
    update: int
    ranks: tuple[int, ...] = ()

    @property
    def num_slots(self) -> int:
        """Number of slots of the task."""
        return sum(self.slots_per_piece)

    def __str__(self) -> str:
        together = f" of ({' '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"run {self.task} v{self.version}{together}"


class Send(NamedTuple):
    """Send a message."""

    message: Message

    def __str__(self) -> str:
        return f"send {self.message} to {self.message.destination}"


class Receive(NamedTuple):
    """Receive a message."""

    message: Message

    def __str__(self) -> str:
        return f"receive {self.message} from {self.message.source}"


class Rest(NamedTuple):
    """Send or receive the second part of a message, which exists only if the message could not be compressed.

    Both the sender and the receiver of every message have this action in their programs. When they reach it, both know whether
    there is a second part (see `compression`).
    """

    message: Message

    def __str__(self) -> str:
        return f"rest of {self.message}, {self.message.source} to {self.message.destination}"


class Reduce(NamedTuple):
    """Sum gradients over ranks. All of these ranks receive the sum.

    Attributes:
        stages: The summed weights belong to exactly these stages: a single one, or those that share tied weights.
        update: Update that the gradients belong to.
        ranks: All ranks that hold any of the stages, ascending.
    """

    stages: tuple[int, ...]
    update: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        stages = "&".join(map(str, self.stages))
        return f"reduce {stages}A{self.update} of ({' '.join(map(str, self.ranks))})"


class Agree(NamedTuple):
    """Decide together whether an update is skipped, because the gradients of some rank are not finite (mixed precision only).

    Attributes:
        stage: Stage whose update waits for the decision; None: all stages of the ranks.
        update: Number of the update.
        ranks: All ranks that decide, ascending.
    """

    stage: int | None
    update: int
    ranks: tuple[int, ...]

    @property
    def word(self) -> str:
        """The action as a word of a worker."""
        return f"{'' if self.stage is None else self.stage}V{self.update}"

    def __str__(self) -> str:
        return f"agree on {self.word} of ({' '.join(map(str, self.ranks))})"


class Update(NamedTuple):
    """Run an optimizer step, which turns a version of a stage's weights into the next one.

    Attributes:
        task: Task of the schedule.
        keeps: Whether later tasks still read the old version.
    """

    task: Task
    keeps: bool

    def __str__(self) -> str:
        return f"update {self.task}{' keep' if self.keeps else ''}"


class Drop(NamedTuple):
    """Free a version of a stage's weights that no later task reads.

    Attributes:
        pipeline: Pipeline of the replica that holds the weights.
        stage: Stage of the weights.
        version: Version that is freed.
    """

    pipeline: int
    stage: int
    version: int

    def __str__(self) -> str:
        prefix = f"{self.pipeline}:" if self.pipeline else ""
        return f"drop {prefix}{self.stage}v{self.version}"


Action = Union[Run, Send, Receive, Rest, Reduce, Agree, Update, Drop]


@dataclass(frozen=True)
class Program:
    """The actions of one rank in a run of a schedule, with the data that the engine needs to execute them.

    Attributes:
        rank: Rank in the job.
        worker: Worker that the rank is a part of.
        frame: The schedule without its tasks.
        slots_per_micro_batch: Slots of a micro-batch, 1 or 2.
        blocks: Block of a slot that the rank holds at the boundaries of its stages, by (stage, whether at the end of the stage).
        actions: The actions in order.
    """

    rank: int
    worker: int
    frame: ScheduleFrame
    slots_per_micro_batch: int
    blocks: Mapping[tuple[int, bool], HeldBlock]
    actions: tuple[Action, ...]

    def output_block(self, task: Task) -> HeldBlock:
        """Return the block of a task's output that this rank computes, for a task whose output goes to another stage."""
        return self.blocks[task.stage, task.kind is Kind.FORWARD]
