"""Lowering: compiles a schedule into a list of actions per rank, in several passes. Needs no OneFlow.

==================  =====================================================================================================
pass                result
==================  =====================================================================================================
`slots`             the ranks of each worker, and the rows of each rank
`holding`           the block of each boundary tensor that a rank holds, and the ranks that communicate during computations
`local`             for each worker, its computations with their pieces and weight versions, its updates, and the versions to drop
`order`             all messages and all reductions of gradients in one total order; for each rank its actions, with its share of
                    the communication inserted
`dryrun`            a check that the programs neither deadlock nor compute without their inputs
==================  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...one_stream import simulate_one_stream
from ...schedule import Schedule
from ...timeline import Timeline
from ...times import Times
from ...validate import validate
from .actions import Action, Program
from .dryrun import check_programs
from .holding import Holding, StageLayout, make_holding
from .local import local_actions, updates_last
from .order import OrderEntry, communication, participants, rank_program
from .slots import RankMap

__all__ = ["Lowered", "lower", "lower_with_timeline"]


@dataclass(frozen=True)
class Lowered:
    """A schedule in the form that ranks execute.

    Attributes:
        holding: The schedule, and the blocks that its ranks hold.
        programs: For each rank its actions in order.
        compresses: Whether messages are compressed if their values allow it.
    """

    holding: Holding
    programs: tuple[tuple[Action, ...], ...]
    compresses: bool = False

    def program(self, rank: int) -> Program:
        """Return the program of a rank."""
        worker, last_stage = self.ranks.worker_of(rank), self.schedule.num_stages - 1
        blocks = {}
        for _, stage in self.schedule.stages_on(worker):
            if stage > 0:
                blocks[stage, False] = self.holding.block(rank, stage, is_leaving=False)
            if stage < last_stage:
                blocks[stage, True] = self.holding.block(rank, stage, is_leaving=True)
        return Program(rank, worker, self.schedule, self.slots_per_micro_batch, blocks, self.programs[rank])

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.holding.schedule

    @property
    def ranks(self) -> RankMap:
        """The ranks of each worker."""
        return self.holding.ranks

    @property
    def slots_per_micro_batch(self) -> int:
        """Slots of a micro-batch, 1 or 2."""
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
    agrees: bool = False,
) -> Lowered:
    """Compile a schedule into programs for its ranks, by all passes. Linear in the number of tasks, apart from sorting.

    Args:
        schedule: The schedule. It is validated.
        micro_batch_rows: Rows (samples) of a micro-batch.
        times: Durations of tasks and transfers. Communication is ordered by the times at which it begins in a simulation with these
            durations, where a worker communicates one after the other (:mod:`autoddl.pipelines.one_stream`). The order is free of
            deadlocks whatever the real durations are, but ranks wait least if the real durations are similar. If None, one unit of
            time for each computation.
        tied: For each group of weights that several stages share, these stages.
        compress: Whether to compress messages if their values allow it (see `compression`).
        layouts: Layouts of stages with SBP plans. If None, the ranks of a worker share the rows evenly.
        agrees: Whether updates are skipped if gradients are not finite, on which ranks agree (see `order`).

    Raises:
        InvalidScheduleError: the schedule breaks a rule.
        UserError: rows are not divisible by the ranks; or layouts do not fit the workers; or stages share weights, but the schedule
            does not update them together.

    >>> from autoddl.pipelines import generate
    >>> lowered = lower(generate("gpipe", num_stages=2, num_micro_batches=1), micro_batch_rows=4)
    >>> for action in lowered.programs[0]:
    ...     print(action)
    run 0F0 v0
    send 0F0 to 1
    receive 1B0 from 1
    run 0B0 v0
    update 0U0
    """
    validate(schedule)
    holding = make_holding(schedule, micro_batch_rows, layouts)
    if times is None:
        times = Times.of(
            schedule.num_stages, forward=1, backward=1, backward_input=0.5, transfer=0.125, all_reduce=0.125
        )
    joint_stages = [stage for stage, layout in enumerate(holding.layouts or ()) if layout.is_joint]
    timeline = simulate_one_stream(schedule, _positive_durations(times), joint_stages)
    return lower_with_timeline(holding, timeline, tied=tied, compress=compress, agrees=agrees)


def lower_with_timeline(
    holding: Holding,
    timeline: Timeline,
    *,
    tied: Collection[tuple[int, ...]] = (),
    compress: bool = False,
    agrees: bool = False,
) -> Lowered:
    """Compile a schedule into programs, with its communication in the order of a given timeline.

    Args:
        holding: The schedule, which must be valid, and the blocks that its ranks hold.
        timeline: Simulation of the schedule, with transfers. Computations should have positive durations.
        tied: For each group of weights that several stages share, these stages.
        compress: Whether to compress messages if their values allow it.
        agrees: As for `lower`.

    Raises:
        UserError: stages share weights, but the schedule does not update them together.
    """
    # Actions of each worker without communication.
    actions = local_actions(holding.schedule, holding)
    if agrees and holding.schedule.is_synchronous:
        actions = tuple(updates_last(holding.schedule, worker_actions) for worker_actions in actions)
    # One total order of all communication, of which each rank gets its share.
    shares: list[list[OrderEntry]] = [[] for _ in range(holding.ranks.num_ranks)]
    for entry in communication(holding, timeline, actions, tied, compress=compress, agrees=agrees):
        for rank in participants(entry):
            shares[rank].append(entry)
    # Insert the communication of each rank into the actions of its worker.
    programs: list[tuple[Action, ...]] = []
    for worker, worker_actions in enumerate(actions):
        for rank in holding.ranks.ranks_of(worker):
            programs.append(rank_program(rank, worker_actions, shares[rank]))
    check_programs(holding, programs, compress)
    return Lowered(holding, tuple(programs), compress)


def _positive_durations(times: Times) -> Times:
    """Raise the durations of computations to a small positive value, so that a task begins before the consumers of its output."""
    minimum = 1e-3 * max(*times.forward, *times.backward, 1e-9)

    def raised(durations: Sequence[float]) -> tuple[float, ...]:
        return tuple(max(duration, minimum) for duration in durations)

    backward_input = raised(times.backward_input)
    # The weight part of a backward pass takes the difference of both durations, which must be positive too.
    backward = tuple(max(whole, part + minimum) for whole, part in zip(times.backward, backward_input))
    return replace(
        times,
        forward=raised(times.forward),
        backward=backward,
        backward_input=backward_input,
        recompute=raised(times.recompute),
    )
