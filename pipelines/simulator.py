"""The event-driven simulator of all schedules.

A worker executes its list in order. A task starts when its worker is free and its inputs have arrived:

    start(i) = max( free(worker(i)), arrival(p) for the producers p of i )
    arrival(p) = end(p)                                            if producer and consumer share the worker
    arrival(p) = max( end(p), free(link) ) + transfer(p)           otherwise

Each directed link between two workers carries one transfer at a time, in the sender's order. Without overlap the sender
is busy until its transfer has arrived. The launch of an all-reduce (``A``) does not block: the all-reduce runs on its
members' communication streams, one at a time and in launch order on each, and the update (``U``) of its stage waits for
it. The lists fix all of these orders, so the result is the longest path of a directed acyclic graph and does not depend
on the order in which workers are visited: each worker is followed until it lacks an input, and resumed when the input
has arrived. Every task and every transfer is handled once: the time is linear in the number of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .allreduce import AllReduces
from .schedule import Kind, Schedule
from .tasktable import NONE, TaskTable, producers, tabulate
from .timeline import Timeline
from .times import Times, TimesError

__all__ = ["Execution", "execute", "simulate", "task_durations", "task_inputs", "task_transfers"]


@dataclass
class Execution:
    """The result of a run; lists over task numbers (see :mod:`.tasktable`).

    Attributes:
        starts: start of each task.
        ends: end of each task.
        arrivals: when a task's output reached its consumer's worker; its end if it does not travel.
        departures: when the transfer of a task's output began.
        cursors: per worker the number of the task at which it stopped; the end of its list if it completed.
    """

    starts: list[float]
    ends: list[float]
    arrivals: list[float]
    departures: list[float]
    cursors: list[int] = field(default_factory=list)


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """The start and the end of each task of a valid schedule; O(tasks).

    >>> from autoddl.pipelines import generate
    >>> simulate(generate("gpipe", num_stages=2, num_micro_batches=2), Times.of(2, forward=1, backward=1)).makespan
    6.0

    Raises:
        TimesError: if the number of stages of the times differs from the schedule's.
        RuntimeError: if the schedule deadlocks, which a validated one does not.
    """
    if times.num_stages != schedule.num_stages:
        raise TimesError(
            f"the times are for {times.num_stages} stages, the schedule {schedule.name} has {schedule.num_stages}"
        )
    table = tabulate(schedule)
    result = execute(schedule, table, times)
    if result.cursors != table.offsets[1:].tolist():
        raise RuntimeError(f"schedule {schedule.name} deadlocks; validate it before simulating it")
    bounds = list(zip(table.offsets[:-1].tolist(), table.offsets[1:].tolist()))
    return Timeline(
        schedule=schedule,
        starts=tuple(np.array(result.starts[a:b]) for a, b in bounds),
        ends=tuple(np.array(result.ends[a:b]) for a, b in bounds),
        departures=tuple(np.array(result.departures[a:b]) for a, b in bounds),
        arrivals=tuple(np.array(result.arrivals[a:b]) for a, b in bounds),
        blocking_sends=not times.overlap_transfers,
    )


def execute(schedule: Schedule, table: TaskTable, times: Times) -> Execution:
    """Run a schedule as far as possible; if it deadlocks, some cursor is before the end of its list."""
    duration = task_durations(table, times).tolist()
    transfer, targets = task_transfers(schedule, table, times)
    link = _links(schedule, table, targets)
    producer_of, several_producers = task_inputs(schedule, table)
    reduces = AllReduces(table, times)
    group_of = reduces.group_of

    total = table.num_tasks
    starts, ends = [0.0] * total, [0.0] * total
    departures, arrivals = [0.0] * total, [NONE * 1.0] * total
    waiting: list[int] = [NONE] * total  # per task, the worker that waits for its output
    stops = table.offsets[1:].tolist()
    cursors = table.offsets[:-1].tolist()
    worker_free = [0.0] * len(stops)
    link_free = [0.0] * (1 + max(link, default=NONE))
    blocking = not times.overlap_transfers

    # Follow each worker until it lacks an input; resume it when the input has arrived.
    runnable = list(range(len(stops) - 1, -1, -1))
    while runnable:
        worker = runnable.pop()
        now, stop = worker_free[worker], stops[worker]
        number = cursors[worker]
        while number < stop:
            # Wait for the task's producers.
            start = now
            producer = producer_of[number]
            if producer >= 0:
                arrival = arrivals[producer]
                if arrival < 0:
                    waiting[producer] = worker
                    break
                if arrival > start:
                    start = arrival
            elif producer != NONE:
                sources = several_producers[producer]
                blocked = next((source for source in sources if arrivals[source] < 0), NONE)
                if blocked != NONE:
                    waiting[blocked] = worker
                    break
                start = max(start, max(arrivals[source] for source in sources))
            group = group_of[number]
            if group != NONE:  # an all-reduce, or the update that waits for it
                if reduces.is_launch[number]:
                    starts[number] = ends[number] = departures[number] = arrivals[number] = now
                    runnable.extend(reduces.launch(number, now, starts, ends))
                    number += 1
                    continue
                if not reduces.is_done(group):
                    runnable.extend(reduces.wait(number, worker, starts, ends))
                    if not reduces.is_done(group):
                        break
                start = max(start, reduces.done_at(group))
            # Execute the task and send its output.
            end = start + duration[number]
            starts[number], ends[number] = start, end
            now = end
            channel = link[number]
            if channel == NONE:
                arrivals[number] = departures[number] = end
            else:
                departure = link_free[channel]
                if departure < end:
                    departure = end
                departures[number] = departure
                arrivals[number] = link_free[channel] = departure + transfer[number]
                if blocking:
                    now = arrivals[number]
            # Wake up the worker that waits for the output.
            if waiting[number] != NONE:
                runnable.append(waiting[number])
                waiting[number] = NONE
            number += 1
        cursors[worker], worker_free[worker] = number, now
        if number == stop:
            runnable.extend(reduces.wait(number, worker, starts, ends, finished=True))
    return Execution(starts, ends, arrivals, departures, cursors)


def task_durations(table: TaskTable, times: Times) -> np.ndarray:
    """How long each task occupies its worker; 0 for the launch of an all-reduce."""
    backward, backward_input = np.array(times.backward), np.array(times.backward_input)
    per_kind = np.zeros((len(Kind), times.num_stages))
    per_kind[Kind.FORWARD] = times.forward
    per_kind[Kind.BACKWARD] = backward
    per_kind[Kind.BACKWARD_INPUT] = backward_input
    per_kind[Kind.BACKWARD_WEIGHT] = backward - backward_input
    per_kind[Kind.RECOMPUTE] = times.recompute
    per_kind[Kind.UPDATE] = times.update
    return per_kind[table.kind, table.stage] * _sizes(table)


def _sizes(table: TaskTable) -> np.ndarray:
    return np.where(table.kind < Kind.ALL_REDUCE, table.num_slots / table.slots_per_micro_batch, 1.0)


def task_transfers(schedule: Schedule, table: TaskTable, times: Times) -> tuple[list[float], list[int]]:
    """Per task the transfer time of its output and the worker that it travels to (-1 for none)."""
    num_stages = schedule.num_stages
    placement = np.array(schedule.placement)
    forward = table.kind == Kind.FORWARD
    backward = (table.kind == Kind.BACKWARD) | (table.kind == Kind.BACKWARD_INPUT)
    sends = (forward & (table.stage < num_stages - 1)) | (backward & (table.stage > 0))
    neighbour = np.clip(table.stage + np.where(forward, 1, -1), 0, num_stages - 1)
    target = placement[table.pipeline, neighbour]
    sends &= target != table.worker
    padded_forward = np.array([*times.transfer_forward, 0.0])
    padded_backward = np.array([0.0, *times.transfer_backward])
    per_whole = np.where(forward, padded_forward[table.stage], padded_backward[table.stage])
    return (times.transfer_latency + per_whole * _sizes(table)).tolist(), np.where(sends, target, NONE).tolist()


def _links(schedule: Schedule, table: TaskTable, targets: list[int]) -> list[int]:
    """Per task the directed link that its output takes (-1 for none)."""
    target = np.array(targets, dtype=np.int64)
    link, sends = np.full(table.num_tasks, NONE), target != NONE
    link[sends] = np.unique(table.worker[sends] * schedule.num_workers + target[sends], return_inverse=True)[1].ravel()
    return link.tolist()


def task_inputs(schedule: Schedule, table: TaskTable) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """Per task its producer, -1 for none. A task with several has a key below -1, which the dictionary maps to all of them."""
    producer, consumer = producers(schedule, table)
    producer_of = np.full(table.num_tasks, NONE)
    producer_of[consumer] = producer
    several: dict[int, tuple[int, ...]] = {}
    for number in np.unique(consumer[1:][consumer[1:] == consumer[:-1]]).tolist():
        begin, end = np.searchsorted(consumer, [number, number + 1])
        key = NONE - 1 - len(several)
        several[key] = tuple(producer[begin:end].tolist())
        producer_of[number] = key
    return producer_of.tolist(), several
