"""From a schedule to each rank's list of actions, by passes that know nothing of OneFlow.

==================  =====================================================================================================
`slots`             which ranks a worker is, and which rows each has
`local`             per worker: computations with their pieces and weight versions, updates, versions to drop
`order`             all messages between ranks and all reductions of gradients in one total order; per rank its actions with its
                    share of the communication
`dryrun`            the proof that the result gets through
==================  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...schedule import Schedule
from ...simulator import simulate
from ...times import Times
from ...validate import validate
from .actions import Action, Message, Reduce
from .dryrun import check_programs
from .local import local_actions
from .order import communication, members, rank_program
from .slots import RankMap, rows_of_slots, slots_per_micro_batch

__all__ = ["Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """A schedule in the form in which ranks execute it."""

    schedule: Schedule
    ranks: RankMap
    slots_per_micro_batch: int
    slot_rows: int
    """Rows of a slot, over all ranks of a worker."""
    programs: tuple[tuple[Action, ...], ...]
    """Per rank its actions in order."""


def lower(
    schedule: Schedule,
    micro_batch_rows: int,
    *,
    times: Times | None = None,
    tied: Collection[tuple[int, ...]] = (),
) -> Lowered:
    """All passes, one after the other; linear in the number of tasks (but for sorting).

    Args:
        schedule: any; it is validated.
        micro_batch_rows: samples in a micro-batch.
        times: what to order communication by. An order that is right for some times can be followed whatever the real ones are, but
            ranks wait least where they are alike. None: a unit of time for each computation.
        tied: for each group of weights that several stages share, these stages.

    Raises:
        InvalidScheduleError: the schedule breaks a rule.
        UserError: rows do not divide over ranks, or weights are tied where they cannot be.
    """
    validate(schedule)
    slot_rows = rows_of_slots(schedule, micro_batch_rows)
    ranks = RankMap(schedule.widths)
    if times is None:
        times = Times.of(
            schedule.num_stages, forward=1, backward=1, backward_input=0.5, transfer=0.125, all_reduce=0.125
        )
    timeline = simulate(schedule, times)
    shares: list[list[Message | Reduce]] = [[] for _ in range(ranks.num_ranks)]
    for entry in communication(schedule, timeline, slot_rows, tied):
        for rank in members(entry):
            shares[rank].append(entry)
    programs: list[tuple[Action, ...]] = []
    for worker, actions in enumerate(local_actions(schedule)):
        programs += [rank_program(rank, actions, shares[rank]) for rank in ranks.ranks_of(worker)]
    check_programs(schedule, programs, slot_rows)
    return Lowered(schedule, ranks, slots_per_micro_batch(schedule), slot_rows, tuple(programs))
