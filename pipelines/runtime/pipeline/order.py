"""One total order of everything that ranks send each other, and each rank's list with its share of it.

All communication is ordered by the times at which it begins in a simulation, and every rank issues its share of it in that order.
Of everything that has not happened yet, the first has its inputs, because whatever these need comes before, and both its ends
have nothing else before it: so there is no deadlock, whatever the real times are. Within that order a rank issues communication
as early as it can, a send as soon as its tensor is there and a receive at once, beside its computations.

**Ranks that communicate while they compute** (of a stage with a plan of its own) do so with everything else standing still: in
OneFlow a pending receive holds up every collective of its process, in whatever thread. So their computations stand in the order
too, each by its beginning, as one piece of communication between all ranks of the worker. What comes before it is issued before it
and is over when it begins, what comes behind it is issued when it is over; the argument above holds unchanged.

Where boundaries are compressed, a message has a second part, which is sent only if the values need it (`compression`). The receiver
knows that when the first part is there. So the second part's place in the order is where the message's consumer begins: the
receiver has to wait for the first part then anyway, and has issued all it could before without knowing.

Weights that several stages share are *tied*: their gradients are summed over all ranks of all these stages at the end of an
iteration, before the first update of any of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Union

from autoddl.costmodel.errors import UserError

from ...communication import Transfer, timeline_order
from ...schedule import Kind, Schedule, Task
from ...timeline import Timeline
from .actions import Action, Message, Receive, Reduce, Rest, Run, Send, message_of
from .holding import Holding
from .local import LocalActions
from .slots import RankMap, slots_of

__all__ = ["communication", "members", "messages", "rank_program"]


Entry = Union[Message, Rest, Reduce, Run]


def members(entry: Entry) -> tuple[int, ...]:
    """The ranks that a piece of communication takes place on."""
    if isinstance(entry, (Reduce, Run)):
        return entry.ranks
    message = entry.message if isinstance(entry, Rest) else entry
    return message.source, message.destination


def communication(
    holding: Holding,
    timeline: Timeline,
    actions: Sequence[LocalActions],
    tied: Collection[tuple[int, ...]] = (),
    *,
    compress: bool = False,
) -> tuple[Entry, ...]:
    """All messages and reductions, and the computations that ranks communicate in, in one order.

    An iteration of a synchronous schedule comes wholly before the next one, its reductions of tied weights at its end.

    Args:
        holding: the schedule, and what its ranks hold.
        timeline: a simulation of the schedule, with transfers.
        actions: of each worker.
        tied: for each group of weights that several stages share, these stages.
        compress: give every message a second part.

    Raises:
        UserError: weights are tied in a schedule whose stages are not updated together.
    """
    schedule, ranks = holding.schedule, holding.ranks
    per_micro_batch = holding.slots_per_micro_batch
    begins_at = _beginnings(schedule, timeline, per_micro_batch) if compress else {}
    keyed: list[tuple[int, float, int, int, Entry]] = []

    def add(update: int, begins: float, entries: Iterable[Entry]) -> None:
        for entry in entries:
            turn = {Rest: 1, Run: 2}.get(type(entry), 0)  # at the same time: a computation waits for the others
            keyed.append((update if schedule.is_synchronous else 0, begins, turn, len(keyed), entry))

    for item in timeline_order(schedule, timeline):
        if isinstance(item, Transfer):
            sent = messages(item, holding)
            update = schedule.update_of(item.task.micro_batch)
            add(update, item.begins, sent)
            if compress:
                add(update, min(begins_at[place] for place in _places(sent[0])), map(Rest, sent))
        else:
            holders = _holders(schedule, ranks, (item.stage,))
            add(item.update, item.begins, [Reduce((item.stage,), item.update, holders)])
    for stages in sorted(set(tied)):
        if not schedule.is_synchronous:
            raise UserError(
                f"stages {' and '.join(map(str, stages))} share weights, which schedule {schedule.name} updates at "
                "different times; untie them, or take a synchronous schedule"
            )
        holders = _holders(schedule, ranks, stages)
        for update in range(schedule.num_updates):
            add(update, math.inf, [Reduce(stages, update, holders)])
    for aligned, starts in zip(actions, timeline.starts):
        for (_, own), start in zip(aligned, starts.tolist()):
            for action in own:
                if isinstance(action, Run) and action.ranks:
                    add(action.update, start, [action])
    return tuple(entry for *_, entry in sorted(keyed, key=lambda key: key[:4]))


def _beginnings(
    schedule: Schedule, timeline: Timeline, per_micro_batch: int
) -> dict[tuple[bool, int, int, int], float]:
    """Per (is forward, pipeline, consuming stage, slot) when the task begins that takes it in."""
    return {
        (task.kind is Kind.FORWARD, task.pipeline, task.stage, slot): start
        for tasks, starts in zip(schedule.workers, timeline.starts)
        for task, start in zip(tasks, starts.tolist())
        if schedule.source_of(task) is not None
        for slot in slots_of(task, per_micro_batch)
    }


def _places(message: Message) -> list[tuple[bool, int, int, int]]:
    """The (is forward, pipeline, consuming stage, slot) that a message is for."""
    task = message.task
    slots = range(message.first_slot, message.first_slot + message.num_slots)
    return [(task.kind is Kind.FORWARD, task.pipeline, task.stage + _direction(task), slot) for slot in slots]


def _direction(task: Task) -> int:
    """From a task's stage to that of its consumer."""
    return 1 if task.kind is Kind.FORWARD else -1


def _holders(schedule: Schedule, ranks: RankMap, stages: Iterable[int]) -> tuple[int, ...]:
    """The ranks that hold any of these stages, ascending."""
    workers = {replica.worker for stage in stages for replica in schedule.replicas_of(stage)}
    return tuple(sorted(rank for worker in workers for rank in ranks.ranks_of(worker)))


def messages(transfer: Transfer, holding: Holding) -> list[Message]:
    """The messages that a transfer between workers is: what each rank of the one has of what each rank of the other needs.

    Equal layouts: rank to rank. One to many is a split, many to one a concatenation, else both.
    """
    task = transfer.task
    ends = holding.ranks.ranks_of(transfer.source), holding.ranks.ranks_of(transfer.destination)
    shape = holding.slot_rows, holding.columns(min(task.stage, task.stage + _direction(task)))
    pieces = holding.pieces(task, transfer.source, transfer.destination)
    return [message_of(task, holding.slots_per_micro_batch, piece, *ends, shape) for piece in pieces]


def rank_program(rank: int, actions: LocalActions, share: Sequence[Entry]) -> tuple[Action, ...]:
    """A rank's actions with its share of the communication woven in, each as early as its inputs and the order allow.

    Args:
        actions: of its worker.
        share: the communication that the rank takes part in, in the total order.
    """
    gradients: dict[tuple[int, int], set[Task]] = {}
    for task, own in actions:
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            gradients.setdefault((task.stage, own[0].update), set()).add(task)  # type: ignore[union-attr]
    done: set[Task] = set()
    launched: set[tuple[int, int]] = set()
    next_takes: set[tuple[bool, int, int, int]] = set()

    def is_ready(entry: Entry) -> bool:
        if isinstance(entry, Message):
            return entry.destination == rank or entry.task in done
        if isinstance(entry, Rest):
            return entry.message.source == rank or not next_takes.isdisjoint(_places(entry.message))
        if isinstance(entry, Run):
            return False  # it comes with its task
        if len(entry.stages) == 1:
            return (entry.stages[0], entry.update) in launched
        return all(gradients.get((stage, entry.update), set()) <= done for stage in entry.stages)

    program: list[Action] = []
    position = 0
    for task, own in actions:
        next_takes = _taken(own)
        while position < len(share) and is_ready(share[position]):
            program.append(_issued(share[position], rank))
            position += 1
        if position < len(share) and share[position] in own:
            position += 1
        program += own
        done.add(task)
        if task.kind is Kind.ALL_REDUCE:
            launched.add((task.stage, task.micro_batch))
    return (*program, *(_issued(entry, rank) for entry in share[position:] if not isinstance(entry, Run)))


def _taken(actions: Sequence[Action]) -> set[tuple[bool, int, int, int]]:
    """The (is forward, pipeline, stage, slot) of what a task takes in, as `_places` gives it for messages."""
    if not actions or not isinstance(actions[0], Run):
        return set()
    task, first_slot = actions[0].task, actions[0].first_slot
    if task.kind not in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return set()
    slots = range(first_slot, first_slot + actions[0].num_slots)
    return {(task.kind is Kind.FORWARD, task.pipeline, task.stage, slot) for slot in slots}


def _issued(entry: Entry, rank: int) -> Action:
    if isinstance(entry, (Reduce, Rest, Run)):
        return entry
    return Send(entry) if entry.source == rank else Receive(entry)
