"""What a rank does, one thing at a time: the instructions that a schedule is lowered to.

A micro-batch is cut in *slots* (one, or two where a schedule works on halves, see :mod:`autoddl.pipelines.tasktable`), and a slot
has ``slot_rows`` rows (samples). A worker of width r is r ranks, each of which has an even share of the rows of every slot. Slots
are numbered over the whole schedule: slot 2 m + 1 is the second half of micro-batch m.

An action prints like the task that it belongs to::

    run 2F5 v1           a compute task, with the version of the weights that it reads
    send 2F5 to 3        the output of a task; the rows, where they are not all: send 2F5[2:4] to 3
    receive 2F5 from 1
    reduce 0A3 of (0 4)  the sum of stage 0's gradients of update 3 over the ranks 0 and 4; 0&3A3 for weights of both
    update 2U3           turns version 3 into 4, in place; "keep" where version 3 is still needed
    drop 2v3             the last reader of version 3 of stage 2's weights is done
"""

from __future__ import annotations

from typing import NamedTuple, Union

from ...schedule import Task

__all__ = ["Action", "Drop", "Message", "Receive", "Reduce", "Run", "Send", "Update"]


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

    def __str__(self) -> str:
        rows = "" if self.is_whole else f"[{self.first_row}:{self.first_row + self.num_rows}]"
        return f"{self.task}{rows}"


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

    @property
    def num_slots(self) -> int:
        return sum(self.pieces)

    def __str__(self) -> str:
        return f"run {self.task} v{self.version}"


class Send(NamedTuple):
    message: Message

    def __str__(self) -> str:
        return f"send {self.message} to {self.message.destination}"


class Receive(NamedTuple):
    message: Message

    def __str__(self) -> str:
        return f"receive {self.message} from {self.message.source}"


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


Action = Union[Run, Send, Receive, Reduce, Update, Drop]
