"""One total order of all communication, and the programs of the ranks in this order.

**The order.** All communication is sorted by the times at which it begins in a simulation (:mod:`autoddl.pipelines.one_stream`),
and every rank issues its share of it in that order. This cannot deadlock, whatever the real durations are. Consider the first entry
of the order that is not complete. The tasks that compute its inputs can run, because all communication that they depend on comes
before it. None of its ranks has other communication to do before it. So it can proceed. Within the order, a rank issues each entry
as early as it can: a send as soon as its tensor is computed, and a receive at once, during earlier computations.

**Joint computations.** The ranks of a stage with an SBP plan may communicate with each other during a computation. All other
communication of these ranks must stand still meanwhile, because in OneFlow a pending receive blocks every collective of its
process, in whatever thread it is issued. So such a computation has a place in the order too, by its start time, as one piece of
communication between all ranks of the worker. Entries before it are issued and completed before it begins; entries after it are
issued when it has ended. The argument above then holds for it as well.

**Compressed messages** have a second part, which is sent only if the values need it (`compression`). The receiver knows whether
there is one when it has the first part. The second part therefore stands in the order where the consumer of the message begins: the
receiver must wait for the first part there anyway, and has issued before it everything that does not depend on this knowledge.

**Tied weights** are weights that several stages share. Their gradients are summed over all ranks of all these stages at the end of
an iteration, before the first update of any of the stages.

**Skipped updates.** If losses are scaled, an update is skipped if a gradient is not finite. In a synchronous schedule all ranks of
the job decide together, at the end of the iteration. In an asynchronous one the ranks of a worker decide for each stage when its
update begins. Replicas of the stage on other workers come to the same decision without communication: they have the same sums of
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Union

from autoddl.costmodel.errors import UserError

from ...communication import Transfer, timeline_order
from ...schedule import Kind, Schedule, Task
from ...timeline import Timeline
from .actions import Action, Agree, Message, Receive, Reduce, Rest, Run, Send, message_of
from .holding import Holding
from .local import LocalActions
from .slots import RankMap, slots_of

__all__ = ["OrderEntry", "communication", "messages", "participants", "rank_program"]


#: An entry of the total order. A `Run` is an entry only if ranks communicate during the computation.
OrderEntry = Union[Message, Rest, Reduce, Agree, Run]
#: What a computation takes from a neighbouring stage: (is forward, pipeline, stage of the computation, slot).
InputKey = tuple[bool, int, int, int]


def participants(entry: OrderEntry) -> tuple[int, ...]:
    """Return the ranks that take part in an entry."""
    if isinstance(entry, (Reduce, Agree, Run)):
        return entry.ranks
    message = entry.message if isinstance(entry, Rest) else entry
    return message.source, message.destination


# ---- The total order ---------------------------------------------------------------------------------------------------


def communication(
    holding: Holding,
    timeline: Timeline,
    actions: Sequence[LocalActions],
    tied: Collection[tuple[int, ...]] = (),
    *,
    compress: bool = False,
    agrees: bool = False,
) -> tuple[OrderEntry, ...]:
    """Return all messages, reductions and joint computations of a schedule in one total order.

    In a synchronous schedule, all entries of an iteration come before those of the next one. The reductions of tied weights come at
    the end of their iteration.

    Args:
        holding: The schedule, and the blocks that its ranks hold.
        timeline: Simulation of the schedule, with transfers.
        actions: Actions of each worker without communication, from `local_actions`.
        tied: For each group of weights that several stages share, these stages.
        compress: Whether messages have a second part.
        agrees: Whether ranks agree on each update whether it is skipped.

    Raises:
        UserError: stages share weights, but the schedule does not update them together.
    """
    schedule, ranks = holding.schedule, holding.ranks
    consumer_starts = _consumer_starts(schedule, timeline, holding.slots_per_micro_batch) if compress else {}
    # (iteration, start time, tie break, number, entry); the order sorts by the first four.
    keyed: list[tuple[int, float, int, int, OrderEntry]] = []

    def add(update: int, begins: float, entries: Iterable[OrderEntry]) -> None:
        iteration = update if schedule.is_synchronous else 0
        for entry in entries:
            # Of what begins at the same time, computations come last: they follow an update that takes no time.
            tie_break = {Rest: 1, Agree: 2, Run: 3}.get(type(entry), 0)
            keyed.append((iteration, begins, tie_break, len(keyed), entry))

    # Messages, with their second parts, and reductions of the gradients of single stages.
    for item in timeline_order(schedule, timeline):
        if isinstance(item, Transfer):
            parts = messages(item, holding)
            update = schedule.update_of(item.task.micro_batch)
            add(update, item.begins, parts)
            if compress:
                consumer_begins = min(consumer_starts[key] for key in _consumer_keys(parts[0]))
                add(update, consumer_begins, map(Rest, parts))
        else:
            holders = _holders(schedule, ranks, (item.stage,))
            add(item.update, item.begins, [Reduce((item.stage,), item.update, holders)])
    # Reductions of tied weights.
    for stages in sorted(set(tied)):
        if not schedule.is_synchronous:
            raise UserError(
                f"stages {' and '.join(map(str, stages))} share weights, which schedule {schedule.name} updates at "
                "different times; untie them, or take a synchronous schedule"
            )
        holders = _holders(schedule, ranks, stages)
        for update in range(schedule.num_updates):
            add(update, math.inf, [Reduce(stages, update, holders)])
    # Joint computations.
    for worker_actions, starts in zip(actions, timeline.starts):
        for (_, task_actions), start in zip(worker_actions, starts.tolist()):
            for action in task_actions:
                if isinstance(action, Run) and action.ranks:
                    add(action.update, start, [action])
    if agrees:
        _add_agreements(holding, timeline, add)
    return tuple(entry for *_, entry in sorted(keyed, key=lambda key: key[:4]))


def _add_agreements(
    holding: Holding, timeline: Timeline, add: Callable[[int, float, Iterable[OrderEntry]], None]
) -> None:
    """Add the decisions whether updates are skipped, as the module describes."""
    schedule, ranks = holding.schedule, holding.ranks
    if schedule.is_synchronous:
        everyone = tuple(range(ranks.num_ranks))
        for update in range(schedule.num_updates):
            add(update, math.inf, [Agree(None, update, everyone)])
        return
    for worker, (tasks, starts) in enumerate(zip(schedule.workers, timeline.starts)):
        members = tuple(ranks.ranks_of(worker))
        for task, start in zip(tasks, starts.tolist()):
            if task.kind is Kind.UPDATE:
                add(task.micro_batch, start, [Agree(task.stage, task.micro_batch, members)])


def messages(transfer: Transfer, holding: Holding) -> list[Message]:
    """Return the messages of a transfer between two workers.

    Each message is the intersection of the block that a rank of the sending worker holds and the block that a rank of the receiving
    worker needs. If both workers have the same layout, each rank sends to one rank. From one rank to several, the tensor is split;
    from several ranks to one, it is concatenated.
    """
    task = transfer.task
    sources, destinations = holding.ranks.ranks_of(transfer.source), holding.ranks.ranks_of(transfer.destination)
    shape = holding.shape(min(task.stage, _consumer_stage(task)))
    pieces = holding.pieces(task, transfer.source, transfer.destination)
    return [message_of(task, holding.slots_per_micro_batch, piece, sources, destinations, shape) for piece in pieces]


def _consumer_starts(schedule: Schedule, timeline: Timeline, per_micro_batch: int) -> dict[InputKey, float]:
    """Return the start times of the tasks that take inputs from other stages."""
    return {
        (task.kind is Kind.FORWARD, task.pipeline, task.stage, slot): start
        for tasks, starts in zip(schedule.workers, timeline.starts)
        for task, start in zip(tasks, starts.tolist())
        if schedule.source_of(task) is not None
        for slot in slots_of(task, per_micro_batch)
    }


def _consumer_keys(message: Message) -> list[InputKey]:
    """Return the keys of the inputs that a message is a part of, one for each slot."""
    task = message.task
    slots = range(message.first_slot, message.first_slot + message.num_slots)
    return [(task.kind is Kind.FORWARD, task.pipeline, _consumer_stage(task), slot) for slot in slots]


def _consumer_stage(task: Task) -> int:
    """Return the stage that consumes the output of a task."""
    return task.stage + (1 if task.kind is Kind.FORWARD else -1)


def _holders(schedule: Schedule, ranks: RankMap, stages: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks that hold any of these stages, ascending."""
    workers = {replica.worker for stage in stages for replica in schedule.replicas_of(stage)}
    return tuple(sorted(rank for worker in workers for rank in ranks.ranks_of(worker)))


# ---- Programs ----------------------------------------------------------------------------------------------------------


def rank_program(rank: int, actions: LocalActions, share: Sequence[OrderEntry]) -> tuple[Action, ...]:
    """Insert a rank's communication into its actions. Each entry is issued as early as its inputs and the order allow.

    Args:
        rank: The rank.
        actions: Actions of its worker without communication.
        share: The entries that the rank takes part in, in the total order.
    """
    # The backward passes that a gradient sum over several stages waits for, by (stage, update).
    backward_passes: dict[tuple[int, int], set[Task]] = {}
    for task, task_actions in actions:
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            update = task_actions[0].update  # type: ignore[union-attr]
            backward_passes.setdefault((task.stage, update), set()).add(task)
    stages = {stage for stage, _ in backward_passes}
    done: set[Task] = set()
    launched: set[tuple[int, int]] = set()  # (stage, update) of all-reduces
    next_inputs: set[InputKey] = set()

    def is_ready(entry: OrderEntry) -> bool:
        """Whether the entry can be issued before the next task."""
        if isinstance(entry, Message):
            return entry.destination == rank or entry.task in done
        if isinstance(entry, Rest):
            return entry.message.source == rank or not next_inputs.isdisjoint(_consumer_keys(entry.message))
        if isinstance(entry, Run):
            return False  # it is issued as an action of its task
        if isinstance(entry, Agree):  # sums of the gradients come before it in the order
            concerned = stages if entry.stage is None else {entry.stage}
            return all(backward_passes.get((stage, entry.update), set()) <= done for stage in concerned)
        if len(entry.stages) == 1:
            return (entry.stages[0], entry.update) in launched
        return all(backward_passes.get((stage, entry.update), set()) <= done for stage in entry.stages)

    program: list[Action] = []
    position = 0
    for task, task_actions in actions:
        next_inputs = _input_keys(task_actions)
        while position < len(share) and is_ready(share[position]):
            program.append(_action_of(share[position], rank))
            position += 1
        if position < len(share) and share[position] in task_actions:
            position += 1
        program += task_actions
        done.add(task)
        if task.kind is Kind.ALL_REDUCE:
            launched.add((task.stage, task.micro_batch))
    # Issue the communication that is left after the last task.
    for entry in share[position:]:
        if not isinstance(entry, Run):
            program.append(_action_of(entry, rank))
    return tuple(program)


def _input_keys(actions: Sequence[Action]) -> set[InputKey]:
    """Return the keys of the inputs of a task, given its actions."""
    if not actions or not isinstance(actions[0], Run):
        return set()
    run = actions[0]
    task = run.task
    if task.kind not in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return set()
    slots = range(run.first_slot, run.first_slot + run.num_slots)
    return {(task.kind is Kind.FORWARD, task.pipeline, task.stage, slot) for slot in slots}


def _action_of(entry: OrderEntry, rank: int) -> Action:
    """Return the action by which a rank takes part in an entry."""
    if isinstance(entry, (Reduce, Rest, Run, Agree)):
        return entry
    return Send(entry) if entry.source == rank else Receive(entry)
