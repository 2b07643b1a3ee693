"""Text form of programs: words for the actions of a worker, which people can read and edit, and their translation to actions.

A word stands for an action of a whole worker, in which each of its ranks takes part:

=============  ==============================================================================================================
``2F5``        run a compute task: here the forward pass of stage 2, micro-batch 5 (:mod:`autoddl.pipelines.schedule`)
``2F5>3``      send its output to worker 3
``2F5<1``      receive its output from worker 1
``2A3``        sum stage 2's gradients of update 3 over ranks; ``0&3A3``: those of weights that stages 0 and 3 share
``2V3``        decide with the other ranks of the worker whether update 3 of stage 2 is skipped; ``V3``: with all ranks
``2U3``        update version 3 of stage 2's weights to version 4, in place
``2K3``        update it and keep version 3, which computations still read
``2D3``        drop version 3
=============  ==============================================================================================================

Words do not contain versions, slots, rows and ranks of actions. `WorkerWords` determines them from facts that are common to all
words of a schedule.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoddl.costmodel.crossing import Cuts, even_crossing, held_by
from autoddl.costmodel.errors import UserError

from ...schedule import Kind, ScheduleFrame, Task, read_task
from .actions import Action, Agree, Drop, Message, Program, Receive, Reduce, Run, Send, Update, message_of
from .local import backward_pieces, run_of
from .slots import HeldBlock

__all__ = ["Crossing", "WorkerWords", "word_of"]

#: A word for `Agree`.
_DECISION = re.compile(r"^(\d*)V(\d+)$")
#: (task, direction, other worker); direction and worker are empty except in words for messages.
_WORD = re.compile(r"^(.+?)(?:([<>])(\d+))?$")


def word_of(action: Action) -> str:
    """Return the word for an action of a rank that is a worker by itself."""
    if isinstance(action, Run):
        return str(action.task)
    if isinstance(action, Send):
        return f"{action.message.task}>{action.message.destination}"
    if isinstance(action, Receive):
        return f"{action.message.task}<{action.message.source}"
    if isinstance(action, Reduce):
        return f"{'&'.join(map(str, action.stages))}A{action.update}"
    if isinstance(action, Agree):
        return action.word
    if isinstance(action, Update):
        text = str(action.task)
        return text.replace("U", "K") if action.keeps else text
    assert isinstance(action, Drop), action
    return str(Task(Kind.UPDATE, action.pipeline, action.stage, action.version)).replace("U", "D")


class Crossing(NamedTuple):
    """The tensor that crosses the boundary between two stages.

    Attributes:
        shape: (rows, columns) of each slot, over all ranks of a worker.
        leaving: Division of the rows and columns over the ranks of the earlier stage.
        arriving: Division of the rows and columns over the ranks of the later stage.
    """

    shape: tuple[int, int]
    leaving: Cuts
    arriving: Cuts


@dataclass(frozen=True)
class WorkerWords:
    """Translates the words of a schedule's workers to programs of ranks.

    Attributes:
        frame: The schedule without its tasks.
        slots_per_micro_batch: Number of slots that a micro-batch is divided into.
        workers: Ranks of each worker.
        crossings: Tensors between consecutive stages, for each boundary.
        joint_stages: Stages whose ranks communicate with each other while they compute.
    """

    frame: ScheduleFrame
    slots_per_micro_batch: int
    workers: Sequence[range]
    crossings: Sequence[Crossing]
    joint_stages: Collection[int]

    def program(self, text: str, worker: int, rank: int) -> Program:
        """Return the program of a rank.

        Args:
            text: Words of the rank's worker, separated by white space.
            worker: Number of the worker.
            rank: Number of the rank in the job.

        Raises:
            UserError: A word is not valid, or a forward pass has no backward pass. The message names the word.
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
            if decision := _DECISION.match(word):
                yield self._agreement(decision[1], int(decision[2]), worker)
                continue
            text, arrow, peer = _WORD.findall(word)[0]
            *other_stages, last = text.split("&")
            task = read_task(re.sub("[KD]", "U", last))  # 2K3 and 2D3 contain the task 2U3
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
                yield self._reduction((*map(int, other_stages), task.stage), task.micro_batch)
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
        """Return all messages with which worker ``source`` sends a task's output to worker ``destination``."""
        is_forward = task.kind is Kind.FORWARD
        shape, leaving, arriving = self.crossings[task.stage if is_forward else task.stage - 1]
        ends = (leaving, arriving) if is_forward else (arriving, leaving)
        workers = self.workers[source], self.workers[destination]
        pieces = even_crossing(*ends, shape)
        return [message_of(task, self.slots_per_micro_batch, piece, *workers, shape) for piece in pieces]

    def _agreement(self, stage: str, update: int, worker: int) -> Agree:
        if stage:
            return Agree(int(stage), update, tuple(self.workers[worker]))
        return Agree(None, update, tuple(rank for members in self.workers for rank in members))

    def _reduction(self, stages: tuple[int, ...], update: int) -> Reduce:
        holders = {workers[stage] for workers in self.frame.placement for stage in stages}
        return Reduce(stages, update, tuple(sorted(rank for worker in holders for rank in self.workers[worker])))
