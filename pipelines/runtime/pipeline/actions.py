"""What a rank does, one thing at a time: the instructions that a schedule is lowered to.

A micro-batch is cut in *slots* (one, or two where a schedule works on halves, see :mod:`autoddl.pipelines.tasktable`), and a slot
has ``slot_rows`` rows (samples). A worker of width r is r ranks, each of which has an even share of the rows of every slot. Slots
are numbered over the whole schedule: slot 2 m + 1 is the second half of micro-batch m.

An action prints like the task that it belongs to::

    run 2F5 v1           a compute task, with the version of the weights that it reads
    run 2F5 v1 of (4 5)  the same by ranks that communicate with each other meanwhile
    send 2F5 to 3        the output of a task; rows and columns, where they are not all: send 2F5[2:4] to 3, send 2F5[0:4,8:16] to 3
    receive 2F5 from 1
    rest of 2F5, 1 to 3  what is still to be sent of a compressed message that turned out to need full precision
    reduce 0A3 of (0 4)  the sum of stage 0's gradients of update 3 over the ranks 0 and 4; 0&3A3 for weights of both
    update 2U3           turns version 3 into 4, in place; "keep" where version 3 is still needed
    drop 2v3             the last reader of version 3 of stage 2's weights is done
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
    """The output of a task (an activation, or the gradient of one) from one rank to another, or a part of its rows."""

    task: Task
    source: int
    """The sending rank."""
    destination: int
    first_slot: int
    num_slots: int
    """The slots that the task covers."""
    first_row: int
    """Of each slot, counted from the slot's first row."""
    num_rows: int
    """Of each slot."""
    is_whole: bool
    """Whether it carries all rows."""
    columns: range | None = None
    """Of each row; None for all of them."""

    def __str__(self) -> str:
        rows = f"{self.first_row}:{self.first_row + self.num_rows}"
        if self.columns is not None:
            return f"{self.task}[{rows},{self.columns.start}:{self.columns.stop}]"
        return f"{self.task}" if self.is_whole else f"{self.task}[{rows}]"


@dataclass(frozen=True)
class BoundaryTensor:
    """What passes between two stages: the shape of one row, and the type."""

    row_shape: tuple[int, ...]
    dtype: Any


def message_of(
    task: Task, per_micro_batch: int, piece: Piece, sources: range, destinations: range, shape: tuple[int, int]
) -> Message:
    """A message between the ranks of two workers; every slot of what passes has ``shape`` over all ranks of either."""
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
    """A forward, backward (or a part of one) or recomputation."""

    task: Task
    first_slot: int
    pieces: tuple[int, ...]
    """The numbers of slots that backwards take at a time: a forward is computed in these pieces, so that each can go back alone."""
    version: int
    """Of the stage's weights."""
    update: int
    """That its gradients count towards."""
    ranks: tuple[int, ...] = ()
    """All ranks of the worker, where they communicate with each other in this computation; none where each computes alone."""

    @property
    def num_slots(self) -> int:
        return sum(self.pieces)

    def __str__(self) -> str:
        together = f" of ({' '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"run {self.task} v{self.version}{together}"


class Send(NamedTuple):
    message: Message

    def __str__(self) -> str:
        return f"send {self.message} to {self.message.destination}"


class Receive(NamedTuple):
    message: Message

    def __str__(self) -> str:
        return f"receive {self.message} from {self.message.source}"


class Rest(NamedTuple):
    """The second part of a message that is compressed where its values allow it.

    Both ends come to it, and know by then whether there is one.
    """

    message: Message

    def __str__(self) -> str:
        return f"rest of {self.message}, {self.message.source} to {self.message.destination}"


class Reduce(NamedTuple):
    """The sum, on all of ``ranks``, of the gradients of the weights that belong to exactly the stages ``stages``."""

    stages: tuple[int, ...]
    """One, or those that share tied weights."""
    update: int
    ranks: tuple[int, ...]
    """All that hold any of the stages, ascending."""

    def __str__(self) -> str:
        stages = "&".join(map(str, self.stages))
        return f"reduce {stages}A{self.update} of ({' '.join(map(str, self.ranks))})"


class Update(NamedTuple):
    """An optimizer step."""

    task: Task
    keeps: bool
    """Whether the version that it starts from is still needed."""

    def __str__(self) -> str:
        return f"update {self.task}{' keep' if self.keeps else ''}"


class Drop(NamedTuple):
    """A version of a replica's weights that nobody needs any more."""

    pipeline: int
    stage: int
    version: int

    def __str__(self) -> str:
        prefix = f"{self.pipeline}:" if self.pipeline else ""
        return f"drop {prefix}{self.stage}v{self.version}"


Action = Union[Run, Send, Receive, Rest, Reduce, Update, Drop]


@dataclass(frozen=True)
class Program:
    """All that one rank does in a run of a schedule, and what it has to know for it.

    Attributes:
        rank: of the job.
        worker: that it is a part of.
        frame: the schedule without its tasks.
        slots_per_micro_batch: what a micro-batch is cut in.
        blocks: what this rank holds of each slot where its stages begin and end, by (stage, is its end).
        actions: in order.
    """

    rank: int
    worker: int
    frame: ScheduleFrame
    slots_per_micro_batch: int
    blocks: Mapping[tuple[int, bool], HeldBlock]
    actions: tuple[Action, ...]

    def given(self, task: Task) -> HeldBlock:
        """What this rank has of what a task gives to a neighbouring stage."""
        return self.blocks[task.stage, task.kind is Kind.FORWARD]
