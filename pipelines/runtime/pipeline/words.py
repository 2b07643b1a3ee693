"""Programs of workers as words, for people to read and edit, and the actions of a rank that they stand for.

A word is an action of a whole worker; each of its ranks has a share of the message or the sum:

=============  ===================================================================
``2F5``        a compute task (:mod:`autoddl.pipelines.schedule`)
``2F5>3``      its output goes to worker 3
``2F5<1``      it comes from worker 1
``2A3``        the sum of stage 2's gradients of update 3; ``0&3A3`` for weights that both stages have
``2U3``        turns version 3 of stage 2's weights into version 4, in place
``2K3``        the same where version 3 is still needed
``2D3``        version 3 is needed no more
=============  ===================================================================

What words leave out (versions, slots, rows, ranks) follows from what does not change from word to word: `WorkerWords`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoddl.costmodel.crossing import Cuts, even_crossing, held_by
from autoddl.costmodel.errors import UserError

from ...schedule import Kind, ScheduleFrame, Task, read_task
from .actions import Action, Drop, Message, Program, Receive, Reduce, Run, Send, Update, message_of
from .local import backward_pieces, run_of
from .slots import HeldBlock

__all__ = ["Crossing", "WorkerWords", "word_of"]

#: What makes a word, and where that goes or comes from.
_WORD = re.compile(r"^(.+?)(?:([<>])(\d+))?$")


def word_of(action: Action) -> str:
    """The word for an action of a worker that is one rank."""
    if isinstance(action, Run):
        return str(action.task)
    if isinstance(action, Send):
        return f"{action.message.task}>{action.message.destination}"
    if isinstance(action, Receive):
        return f"{action.message.task}<{action.message.source}"
    if isinstance(action, Reduce):
        return f"{'&'.join(map(str, action.stages))}A{action.update}"
    if isinstance(action, Update):
        text = str(action.task)
        return text.replace("U", "K") if action.keeps else text
    assert isinstance(action, Drop), action
    return str(Task(Kind.UPDATE, action.pipeline, action.stage, action.version)).replace("U", "D")


class Crossing(NamedTuple):
    """What passes from a stage to the next one: of every slot (rows, columns), as both stages hold them."""

    shape: tuple[int, int]
    leaving: Cuts
    arriving: Cuts


@dataclass(frozen=True)
class WorkerWords:
    """Reads the words of a schedule's workers.

    Attributes:
        frame: of the schedule.
        slots_per_micro_batch: what a micro-batch is cut in.
        workers: the ranks of each.
        crossings: one for each two stages in a row.
        joint_stages: those whose ranks communicate with each other while they compute.
    """

    frame: ScheduleFrame
    slots_per_micro_batch: int
    workers: Sequence[range]
    crossings: Sequence[Crossing]
    joint_stages: Collection[int]

    def program(self, text: str, worker: int, rank: int) -> Program:
        """What a rank of the job does, by the words of its worker.

        Raises:
            UserError: a word is none, or a forward pass has no backward pass; it is named.
        """
        blocks = {}
        for _, stage in self.frame.stages_on(worker):
            for at_end, boundary in ((False, stage - 1), (True, stage)):
                if 0 <= boundary < len(self.crossings):
                    crossing = self.crossings[boundary]
                    cuts = crossing.leaving if at_end else crossing.arriving
                    blocks[stage, at_end] = HeldBlock(*held_by(cuts, rank - self.workers[worker].start, crossing.shape))
        actions = tuple(self._actions(text.split(), worker, rank))
        return Program(rank, worker, self.frame, self.slots_per_micro_batch, blocks, actions)

    def _actions(self, words: Sequence[str], worker: int, rank: int) -> Iterator[Action]:
        pieces = backward_pieces(filter(None, map(read_task, words)), self.slots_per_micro_batch)
        for word in words:
            text, arrow, peer = _WORD.findall(word)[0]
            *others, last = text.split("&")
            task = read_task(re.sub("[KD]", "U", last))
            if task is None:
                raise UserError(
                    f"{word!r} is not a word for an action; words read like 2F5, 2F5>3, 1:2B5<0, 0&3A0 or 2K0"
                )
            if arrow:
                source, destination = (worker, int(peer)) if arrow == ">" else (int(peer), worker)
                for message in self._messages(task, source, destination):
                    if rank in (message.source, message.destination):
                        yield Send(message) if arrow == ">" else Receive(message)
            elif task.kind is Kind.ALL_REDUCE:
                yield self._reduction((*map(int, others), task.stage), task.micro_batch)
            elif "D" in last:
                yield Drop(task.pipeline, task.stage, task.micro_batch)
            elif task.kind is Kind.UPDATE:
                yield Update(task, keeps="K" in last)
            else:
                try:
                    run = run_of(self.frame, task, pieces, self.slots_per_micro_batch)
                except KeyError:
                    raise UserError(f"{word!r} has no backward pass in the words of worker {worker}") from None
                yield run._replace(ranks=tuple(self.workers[worker]) if task.stage in self.joint_stages else ())

    def _messages(self, task: Task, source: int, destination: int) -> list[Message]:
        is_forward = task.kind is Kind.FORWARD
        shape, leaving, arriving = self.crossings[task.stage if is_forward else task.stage - 1]
        ends = (leaving, arriving) if is_forward else (arriving, leaving)
        workers = self.workers[source], self.workers[destination]
        pieces = even_crossing(*ends, shape)
        return [message_of(task, self.slots_per_micro_batch, piece, *workers, shape) for piece in pieces]

    def _reduction(self, stages: tuple[int, ...], update: int) -> Reduce:
        holders = {workers[stage] for workers in self.frame.placement for stage in stages}
        return Reduce(stages, update, tuple(sorted(rank for worker in holders for rank in self.workers[worker])))
