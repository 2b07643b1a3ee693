"""One total order of everything that ranks send each other, and each rank's list with its share of it.

All communication is ordered by the times at which it begins in a simulation, and every rank issues its share of it in that order.
Of everything that has not happened yet, the first has its inputs, because whatever these need comes before, and both its ends
have nothing else before it: so there is no deadlock, whatever the real times are. Within that order a rank issues communication
as early as it can, a send as soon as its tensor is there and a receive at once, beside its computations.

Weights that several stages share are *tied*: their gradients are summed over all ranks of all these stages at the end of an
iteration, before the first update of any of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from autoddl.costmodel.errors import UserError

from ...communication import Transfer, ordered
from ...schedule import Kind, Schedule, Task
from ...timeline import Timeline
from .actions import Action, Message, Receive, Reduce, Send
from .local import LocalActions
from .slots import RankMap, slots_of, slots_per_micro_batch

__all__ = ["communication", "members", "messages", "rank_program"]


def members(entry: Message | Reduce) -> tuple[int, ...]:
    """The ranks that a piece of communication takes place on."""
    return (entry.source, entry.destination) if isinstance(entry, Message) else entry.ranks


def communication(
    schedule: Schedule, timeline: Timeline, slot_rows: int, tied: Collection[tuple[int, ...]] = ()
) -> tuple[Message | Reduce, ...]:
    """All messages and reductions in one order.

    An iteration of a synchronous schedule comes wholly before the next one, its reductions of tied weights at its end.

    Args:
        timeline: a simulation of the schedule, with transfers.
        slot_rows: rows of a slot.
        tied: for each group of weights that several stages share, these stages.

    Raises:
        UserError: weights are tied in a schedule whose stages are not updated together.
    """
    ranks = RankMap(schedule.widths)
    per_micro_batch = slots_per_micro_batch(schedule)
    keyed: list[tuple[int, float, int, Message | Reduce]] = []

    def add(update: int, begins: float, entries: Iterable[Message | Reduce]) -> None:
        for entry in entries:
            keyed.append((update if schedule.is_synchronous else 0, begins, len(keyed), entry))

    for item in ordered(schedule, timeline):
        if isinstance(item, Transfer):
            sent = messages(item, ranks, per_micro_batch, slot_rows)
            add(schedule.update_of(item.task.micro_batch), item.begins, sent)
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
    return tuple(entry for _, _, _, entry in sorted(keyed, key=lambda key: key[:3]))


def _holders(schedule: Schedule, ranks: RankMap, stages: Iterable[int]) -> tuple[int, ...]:
    """The ranks that hold any of these stages, ascending."""
    workers = {replica.worker for stage in stages for replica in schedule.replicas_of(stage)}
    return tuple(sorted(rank for worker in workers for rank in ranks.ranks_of(worker)))


def messages(transfer: Transfer, ranks: RankMap, per_micro_batch: int, slot_rows: int) -> list[Message]:
    """The messages that a transfer between workers is: one for each pair of ranks that have rows in common.

    Equal widths: rank to rank. One to many is a split, many to one a concatenation, else both.
    """
    slots = slots_of(transfer.task, per_micro_batch)
    result = []
    for source in ranks.ranks_of(transfer.source):
        theirs = ranks.rows_of(source, slot_rows)
        for destination in ranks.ranks_of(transfer.destination):
            wanted = ranks.rows_of(destination, slot_rows)
            common = range(max(theirs.start, wanted.start), min(theirs.stop, wanted.stop))
            if common:
                whole = len(common) == slot_rows
                what = (transfer.task, source, destination, slots.start, len(slots), common.start, len(common), whole)
                result.append(Message(*what))
    return result


def rank_program(rank: int, actions: LocalActions, share: Sequence[Message | Reduce]) -> tuple[Action, ...]:
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

    def is_ready(entry: Message | Reduce) -> bool:
        if isinstance(entry, Message):
            return entry.destination == rank or entry.task in done
        if len(entry.stages) == 1:
            return (entry.stages[0], entry.update) in launched
        return all(gradients.get((stage, entry.update), set()) <= done for stage in entry.stages)

    program: list[Action] = []
    position = 0
    for task, own in actions:
        while position < len(share) and is_ready(share[position]):
            program.append(_issued(share[position], rank))
            position += 1
        program += own
        done.add(task)
        if task.kind is Kind.ALL_REDUCE:
            launched.add((task.stage, task.micro_batch))
    return (*program, *(_issued(entry, rank) for entry in share[position:]))


def _issued(entry: Message | Reduce, rank: int) -> Action:
    if isinstance(entry, Reduce):
        return entry
    return Send(entry) if entry.source == rank else Receive(entry)
