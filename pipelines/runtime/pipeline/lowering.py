"""From a schedule to each rank's list of actions, by passes that know nothing of OneFlow.

==================  =====================================================================================================
`slots`             which ranks a worker is, and which rows each has
`holding`           which part of what passes between stages each rank has, and which ranks compute together
`local`             per worker: computations with their pieces and weight versions, updates, versions to drop
`order`             all messages between ranks and all reductions of gradients in one total order; per rank its actions with its
                    share of the communication
`dryrun`            the proof that the result gets through
==================  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from ...times import Times
from ...validate import validate
from .actions import Action, Program
from .dryrun import check_programs
from .holding import Holding, StageLayout, hold
from .local import local_actions
from .order import Entry, communication, members, rank_program
from .slots import RankMap

__all__ = ["Lowered", "lower", "lower_along"]


@dataclass(frozen=True)
class Lowered:
    """A schedule in the form in which ranks execute it."""

    holding: Holding
    """The schedule, and what its ranks hold."""
    programs: tuple[tuple[Action, ...], ...]
    """Per rank its actions in order."""
    compresses: bool = False
    """Whether messages are compressed where their values allow it."""

    def program(self, rank: int) -> Program:
        """What a rank does, with what it has to know for it."""
        worker, last = self.ranks.worker_of(rank), self.schedule.num_stages - 1
        ends = [(stage, at_end) for _, stage in self.schedule.stages_on(worker) for at_end in (False, True)]
        blocks = {
            (stage, at_end): self.holding.block(rank, stage, at_end)
            for stage, at_end in ends
            if (stage < last if at_end else stage > 0)
        }
        return Program(rank, worker, self.schedule, self.slots_per_micro_batch, blocks, self.programs[rank])

    @property
    def schedule(self) -> Schedule:
        return self.holding.schedule

    @property
    def ranks(self) -> RankMap:
        return self.holding.ranks

    @property
    def slots_per_micro_batch(self) -> int:
        return self.holding.slots_per_micro_batch

    @property
    def slot_rows(self) -> int:
        """Rows of a slot, over all ranks of a worker."""
        return self.holding.slot_rows


def lower(
    schedule: Schedule,
    micro_batch_rows: int,
    *,
    times: Times | None = None,
    tied: Collection[tuple[int, ...]] = (),
    compress: bool = False,
    layouts: Sequence[StageLayout] | None = None,
) -> Lowered:
    """All passes, one after the other; linear in the number of tasks (but for sorting).

    Args:
        schedule: any; it is validated.
        micro_batch_rows: samples in a micro-batch.
        times: what to order communication by. An order that is right for some times can be followed whatever the real ones are, but
            ranks wait least where they are alike. None: a unit of time for each computation.
        tied: for each group of weights that several stages share, these stages.
        compress: whether to compress messages where their values allow it (see `compression`).
        layouts: of stages that have plans of their own; by default the ranks of a worker share the rows.

    Raises:
        InvalidScheduleError: the schedule breaks a rule.
        UserError: rows do not divide over ranks, layouts do not fit the workers, or weights are tied where they cannot be.
    """
    validate(schedule)
    holding = hold(schedule, micro_batch_rows, layouts)
    if times is None:
        times = Times.of(
            schedule.num_stages, forward=1, backward=1, backward_input=0.5, transfer=0.125, all_reduce=0.125
        )
    return lower_along(holding, simulate(schedule, _positive(times)), tied=tied, compress=compress)


def lower_along(
    holding: Holding, timeline: Timeline, *, tied: Collection[tuple[int, ...]] = (), compress: bool = False
) -> Lowered:
    """The passes behind `hold`, with communication in the order of a simulation of the (valid) schedule.

    Raises:
        UserError: weights are tied where they cannot be.
    """
    actions = local_actions(holding.schedule, holding)
    shares: list[list[Entry]] = [[] for _ in range(holding.ranks.num_ranks)]
    for entry in communication(holding, timeline, actions, tied, compress=compress):
        for rank in members(entry):
            shares[rank].append(entry)
    programs: list[tuple[Action, ...]] = []
    for worker, own in enumerate(actions):
        programs += [rank_program(rank, own, shares[rank]) for rank in holding.ranks.ranks_of(worker)]
    check_programs(holding, programs, compress)
    return Lowered(holding, tuple(programs), compress)


def _positive(times: Times) -> Times:
    """Computations that take some time at least, so that an order by beginnings has each before what it makes."""
    least = 1e-3 * max(*times.forward, *times.backward, 1e-9)

    def at_least(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(max(value, least) for value in values)

    inputs = at_least(times.backward_input)
    whole = tuple(max(value, part + least) for value, part in zip(times.backward, inputs))
    return replace(
        times,
        forward=at_least(times.forward),
        backward=whole,
        backward_input=inputs,
        recompute=at_least(times.recompute),
    )
