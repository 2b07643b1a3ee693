"""The communication of a schedule, and one total order of it.

A transfer carries the output of one task to the worker of its consumer; a collective averages a stage's weight
gradients over the workers that hold it. :func:`timeline_order` sorts all of them by the times at which they begin
in the simulation. If every worker issues its communication in that order, and its compute tasks at the simulated times in
between, the schedule cannot deadlock, even if every transfer blocks both its ends and every worker has a single thread:
the first pending item of the order has its inputs, and neither of its ends has anything else to do before it.
"""

from __future__ import annotations

from typing import NamedTuple, Union

import numpy as np

from .schedule import Kind, Schedule, Task
from .tasktable import tabulate
from .timeline import Timeline

__all__ = [
    "Communication",
    "GradientAllReduce",
    "Transfer",
    "boundary_crossings",
    "timeline_order",
]


class Transfer(NamedTuple):
    """The transfer of a task's output to the worker of its consumer.

    Attributes:
        task: Task whose output is sent.
        source: Worker that sends.
        destination: Worker that receives.
        begins: Simulated start.
    """

    task: Task
    source: int
    destination: int
    begins: float


class GradientAllReduce(NamedTuple):
    """The all-reduce that averages a stage's weight gradients for one update.

    Attributes:
        stage: Stage of the gradients.
        update: Index of the update.
        workers: Workers that hold the stage, in the order of ``schedule.replicas_of(stage)``.
        begins: Simulated start.
    """

    stage: int
    update: int
    workers: tuple[int, ...]
    begins: float


Communication = Union[Transfer, GradientAllReduce]


def timeline_order(schedule: Schedule, timeline: Timeline) -> tuple[Communication, ...]:
    """Return the communication of a timeline with recorded transfers, sorted by the time at which it begins."""
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
    """Return the numbers of micro-batches whose (activations, gradients) are sent to another worker, for each stage boundary."""
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
