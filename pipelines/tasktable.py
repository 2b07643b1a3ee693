"""A schedule's tasks as integer arrays, and the producers of each task: the data of validator and simulator.

Tasks are numbered 0..n-1, worker by worker in the order of their lists, so that on one worker "earlier" is "smaller".
A micro-batch is one *slot*, or two if the schedule works on halves; a pair covers the slots of both its micro-batches.
Tables over (stage, slot) give the task that does a piece of work in O(1), without a dictionary. All functions are linear
in the number of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from .schedule import Kind, Part, Schedule

__all__ = ["NONE", "TaskTable", "producers", "slot_table", "tabulate"]

#: Entry of a table of tasks for "no task".
NONE = -1


@dataclass(frozen=True, eq=False)
class TaskTable:
    """Columns of all tasks of a schedule (shape ``(n,)`` each).

    Attributes:
        kind: :class:`~autoddl.pipelines.schedule.Kind` of each task.
        pipeline: its pipeline.
        stage: its stage.
        micro_batch: its micro-batch, or its update.
        part: its :class:`~autoddl.pipelines.schedule.Part`.
        worker: its worker.
        offsets: shape (workers + 1,): worker w has the tasks ``offsets[w]`` to ``offsets[w + 1] - 1``.
        slots_per_micro_batch: 1, or 2 if the schedule works on halves.
        first_slot: first slot that a compute task covers.
        num_slots: number of slots that it covers.
    """

    kind: np.ndarray
    pipeline: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray
    part: np.ndarray
    worker: np.ndarray
    offsets: np.ndarray
    slots_per_micro_batch: int
    first_slot: np.ndarray
    num_slots: np.ndarray

    @property
    def num_tasks(self) -> int:
        return len(self.kind)

    def of_kind(self, *kinds: Kind) -> np.ndarray:
        """The numbers of the tasks of these kinds, ascending."""
        return np.flatnonzero(np.isin(self.kind, [int(kind) for kind in kinds]))

    def locate(self, number: int) -> tuple[int, int]:
        """(worker, index in its list) of a task."""
        worker = int(self.worker[number])
        return worker, int(number - self.offsets[worker])


def tabulate(schedule: Schedule) -> TaskTable:
    """The tasks of a schedule as columns; O(tasks)."""
    lengths = np.array([len(tasks) for tasks in schedule.workers], dtype=np.int64)
    total = int(lengths.sum())
    flat = np.fromiter(chain.from_iterable(chain.from_iterable(schedule.workers)), dtype=np.int64, count=5 * total)
    kind, pipeline, stage, micro_batch, part = np.ascontiguousarray(flat.reshape(total, 5).T)
    halves = (part == Part.FIRST_HALF) | (part == Part.SECOND_HALF)
    slots = 2 if halves.any() else 1
    num_slots = np.full(total, slots)
    num_slots[halves] = 1
    num_slots[part == Part.PAIR] = 2 * slots
    return TaskTable(
        kind=kind,
        pipeline=pipeline,
        stage=stage,
        micro_batch=micro_batch,
        part=part,
        worker=np.repeat(np.arange(len(lengths)), lengths),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        slots_per_micro_batch=slots,
        first_slot=micro_batch * slots + (part == Part.SECOND_HALF),
        num_slots=num_slots,
    )


def slot_table(schedule: Schedule, table: TaskTable, numbers: np.ndarray) -> np.ndarray:
    """For each (stage, slot), the one of the given tasks that covers it, or -1; shape (stages, slots).

    If several do, the last one is entered.
    """
    owner = np.full((schedule.num_stages, schedule.num_micro_batches * table.slots_per_micro_batch), NONE)
    first, count, stage = table.first_slot[numbers], table.num_slots[numbers], table.stage[numbers]
    for step in range(int(count.max(initial=0))):
        covered = count > step
        owner[stage[covered], first[covered] + step] = numbers[covered]
    return owner


def producers(schedule: Schedule, table: TaskTable) -> tuple[np.ndarray, np.ndarray]:
    """The dependencies between stages: (producer, consumer) pairs of task numbers, sorted by consumer.

    A forward of stage s > 0 takes the output of the forwards of stage s - 1 that cover its slots; a backward of stage
    s < S - 1 the gradients of the backwards (or their input parts) of stage s + 1. The schedule must be complete.
    """
    consumer_list, producer_list = [], []
    for kinds, towards in (((Kind.FORWARD,), -1), ((Kind.BACKWARD, Kind.BACKWARD_INPUT), 1)):
        numbers = table.of_kind(*kinds)
        owner = slot_table(schedule, table, numbers)
        neighbour = table.stage[numbers] + towards
        inside = (neighbour >= 0) & (neighbour < schedule.num_stages)
        numbers, neighbour = numbers[inside], neighbour[inside]
        first, count = table.first_slot[numbers], table.num_slots[numbers]
        previous = np.full(len(numbers), NONE)
        for step in range(int(count.max(initial=0))):
            slot = np.minimum(first + step, first + count - 1)
            source = owner[neighbour, slot]
            fresh = source != previous
            consumer_list.append(numbers[fresh])
            producer_list.append(source[fresh])
            previous = source
    consumer = np.concatenate(consumer_list) if consumer_list else np.empty(0, dtype=np.int64)
    producer = np.concatenate(producer_list) if producer_list else np.empty(0, dtype=np.int64)
    order = np.argsort(consumer, kind="stable")
    return producer[order], consumer[order]
