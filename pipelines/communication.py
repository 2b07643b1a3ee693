"""The communication of a schedule, and one total order of it.

A transfer carries the output of one task to the worker of its consumer; a collective averages a stage's weight
gradients over the workers that hold it. :func:`communication_order` sorts all of them by the times at which they begin
in the simulation. If every worker issues its communication in that order, and its compute tasks at the simulated times in
between, the schedule cannot deadlock, even if every transfer blocks both its ends and every worker has a single thread:
the first pending item of the order has its inputs, and neither of its ends has anything else to do before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Union

import numpy as np

from .schedule import Kind, Schedule, Task
from .simulator import simulate
from .tasktable import tabulate
from .timeline import Timeline
from .times import Times

__all__ = [
    "Communication",
    "GradientAllReduce",
    "Transfer",
    "boundary_crossings",
    "communication_bytes",
    "communication_order",
]


class Transfer(NamedTuple):
    """The transfer of a task's output to the worker of its consumer.

    Attributes:
        task: whose output is sent.
        source: worker that sends.
        destination: worker that receives.
        begins: simulated start.
    """

    task: Task
    source: int
    destination: int
    begins: float


class GradientAllReduce(NamedTuple):
    """The all-reduce that averages a stage's weight gradients for one update.

    Attributes:
        stage: of the gradients.
        update: index of the update.
        workers: workers that hold the stage, in the order of ``schedule.replicas_of(stage)``.
        begins: simulated start.
    """

    stage: int
    update: int
    workers: tuple[int, ...]
    begins: float


Communication = Union[Transfer, GradientAllReduce]


def communication_order(schedule: Schedule, times: Times | None = None) -> tuple[Communication, ...]:
    """All communication of a valid schedule, in one order that every worker can follow.

    Args:
        times: durations to order by; by default one unit for each task and 1/8 unit for each transfer. An order that is
            valid for one set of times can be followed whatever the actual times are.
    """
    if times is None:
        times = Times.of(
            schedule.num_stages, forward=1, backward=1, backward_input=0.5, transfer=0.125, all_reduce=0.125
        )
    return timeline_order(schedule, simulate(schedule, times))


def timeline_order(schedule: Schedule, timeline: Timeline) -> tuple[Communication, ...]:
    """The communication of a timeline with recorded transfers, sorted by the time at which it begins."""
    assert timeline.departures is not None
    entries: list[tuple[float, int, Communication]] = []
    collectives: dict[tuple[int, int], float] = {}
    for worker, tasks in enumerate(schedule.workers):
        starts, departures = timeline.starts[worker].tolist(), timeline.departures[worker].tolist()
        for index, task in enumerate(tasks):
            destination = schedule.destination_of(task)
            if destination is not None and destination != worker:
                begins = departures[index]
                entries.append((begins, len(entries), Transfer(task, worker, destination, begins)))
            elif task.kind is Kind.ALL_REDUCE:
                collectives[task.stage, task.micro_batch] = starts[index]
    for (stage, update), begins in collectives.items():
        workers = tuple(replica.worker for replica in schedule.replicas_of(stage))
        entries.append((begins, len(entries), GradientAllReduce(stage, update, workers, begins)))
    return tuple(entry for _, _, entry in sorted(entries))


def boundary_crossings(schedule: Schedule) -> tuple[tuple[float, float], ...]:
    """Per boundary between stages, how many micro-batches' (activations, gradients) cross to another worker there."""
    table = tabulate(schedule)
    placement = np.array(schedule.placement)
    size = table.num_slots / table.slots_per_micro_batch
    crossings = np.zeros((max(0, schedule.num_stages - 1), 2))
    for column, (kinds, shift) in enumerate((((Kind.FORWARD,), 0), ((Kind.BACKWARD, Kind.BACKWARD_INPUT), -1))):
        numbers = table.of_kind(*kinds)
        boundary = table.stage[numbers] + shift
        numbers = numbers[(boundary >= 0) & (boundary < schedule.num_stages - 1)]
        boundary = table.stage[numbers] + shift
        pipeline = table.pipeline[numbers]
        crosses = placement[pipeline, boundary] != placement[pipeline, boundary + 1]
        np.add.at(crossings[:, column], boundary[crosses], size[numbers][crosses])
    return tuple((float(forward), float(backward)) for forward, backward in crossings)


def communication_bytes(
    schedule: Schedule, boundary_bytes: Sequence[float], gradient_bytes: Sequence[float] | None = None
) -> tuple[float, float]:
    """Bytes sent over the whole schedule: (between stages, in gradient all-reduces).

    Args:
        boundary_bytes: bytes of one micro-batch's activation at each boundary; its gradient has the same size.
        gradient_bytes: bytes of each stage's weight gradients. An all-reduce over r replicas sends 2 (r - 1) times as much,
            as a ring does, the least possible if the replicas share the work evenly. None: all-reduces are not counted.
    """
    between = sum(
        (forward + backward) * size for (forward, backward), size in zip(boundary_crossings(schedule), boundary_bytes)
    )
    if gradient_bytes is None:
        return between, 0.0
    reduced = sum(
        2 * (schedule.num_replicas_of(stage) - 1) * size * schedule.num_updates
        for stage, size in enumerate(gradient_bytes)
    )
    return between, reduced
