"""The simulation of a schedule whose workers have one communication stream each, as in AutoDDL's runtime.

The simulator of :mod:`.simulator` lets every link carry its transfers, and all-reduces run, whatever else a worker communicates.
OneFlow runs all communication of a process one after the other, in whatever thread it is issued.  So here the transfers of a
worker, in both directions, and its all-reduces share one stream.  If the ranks of a stage communicate during its computations (a
*joint* stage), these computations need the stream too.  Communication e begins at

    start(e) = max( ready(e), end of the previous communication on the stream of each worker that takes part )

where ready(e) is the end of the task whose output is sent, the latest launch of an all-reduce, or the time at which a worker and
the inputs of a joint computation are ready.

**The order** on the streams is free, as long as all workers agree on it.  Sorted by start, it is the total order in which the
runtime issues communication (:func:`.communication.timeline_order`).  Four orders are simulated, and the shortest timeline is
taken:

1.  by the times at which communication begins in :func:`.simulator.simulate`;
2.  list scheduling: whenever streams become free, communication whose workers' streams are all free begins, the one that has
    waited longest first;
3.  the same, but first what the longest path to the end of the schedule follows;
4.  as 2., but a joint computation may overtake communication of its worker that waits for another worker.

Joint computations are long: one that overtakes may hold up the other end, one that does not may keep its own worker idle.  Not to
overtake is better for GPipe, whose workers wait for each other; to overtake is better for schedules whose workers are hardly idle
(interleaved 1F1B, zero-bubble).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .schedule import Kind, Schedule
from .simulator import simulate, task_durations, task_inputs, task_transfers
from .tasktable import NONE, tabulate
from .timeline import Timeline
from .times import Times

__all__ = ["simulate_one_stream"]


class _Entry(NamedTuple):
    """What occupies streams.

    Attributes:
        task: number of the task whose output is sent, of the joint computation, or of the last launch of an all-reduce.
        workers: the workers that take part.
        duration: how long it occupies their streams.
        is_joint: whether it is a joint computation.
        launches: numbers of all launches of an all-reduce; empty for others.
    """

    task: int
    workers: tuple[int, ...]
    duration: float
    is_joint: bool = False
    launches: tuple[int, ...] = ()


def simulate_one_stream(schedule: Schedule, times: Times, joint_stages: Collection[int] = ()) -> Timeline:
    """The start and the end of each task of a valid schedule, with one communication stream per worker.

    Args:
        schedule: the schedule.
        times: durations; transfers and all-reduces overlap computations, whatever ``times`` say of that.
        joint_stages: stages whose computations need the streams of their workers.

    >>> from autoddl.pipelines import generate
    >>> schedule = generate("chimera", num_stages=2, num_micro_batches=2)
    >>> times = Times.of(2, forward=1, backward=1, transfer=1)
    >>> simulate(schedule, times).makespan, simulate_one_stream(schedule, times).makespan
    (6.0, 7.0)
    """
    problem = _Problem(schedule, times, joint_stages)
    free = simulate(schedule, times)
    orders = (
        problem.order_of(free),
        _list_schedule(problem),
        _list_schedule(problem, problem.tails(free)),
        *([_list_schedule(problem, overtakes=True)] if joint_stages else []),
    )
    return min((_in_order(problem, order) for order in orders), key=lambda timeline: timeline.makespan)


class _Problem:
    """A schedule with its durations, by task number.

    Attributes:
        schedule: the schedule.
        table: its tasks.
        durations: how long each task occupies its worker.
        entries: for each joint computation and each launch, its entry.
        outputs: for each task whose output is sent, the entry of the transfer.
        sums: for each update that waits for an all-reduce, a launch of it.
    """

    def __init__(self, schedule: Schedule, times: Times, joint_stages: Collection[int]) -> None:
        self.schedule, self.table = schedule, tabulate(schedule)
        table = self.table
        self.durations = task_durations(table, times).tolist()
        transfers, targets = task_transfers(schedule, table, times)
        self._producer_of, self._several = task_inputs(schedule, table)
        workers, stages = table.worker.tolist(), table.stage.tolist()
        self.outputs = {
            number: _Entry(number, (workers[number], target), transfers[number])
            for number, target in enumerate(targets)
            if target != NONE
        }
        computes = np.flatnonzero((table.kind < Kind.ALL_REDUCE) & np.isin(table.stage, list(joint_stages)))
        self.entries = {
            number: _Entry(number, (workers[number],), self.durations[number], is_joint=True)
            for number in computes.tolist()
        }
        launches: dict[tuple[int, int], list[int]] = {}
        for number in table.of_kind(Kind.ALL_REDUCE).tolist():
            launches.setdefault((stages[number], int(table.micro_batch[number])), []).append(number)
        self.sums: dict[int, int] = {}
        for (stage, _), numbers in launches.items():
            members = tuple(workers[number] for number in numbers)
            entry = _Entry(numbers[-1], members, times.all_reduce[stage], launches=tuple(numbers))
            self.entries.update(dict.fromkeys(numbers, entry))
        for number in table.of_kind(Kind.UPDATE).tolist():
            of_update = launches.get((stages[number], int(table.micro_batch[number])))
            if of_update:
                self.sums[number] = of_update[0]

    def inputs(self, number: int) -> Sequence[int]:
        """What a task waits for: the tasks that make its inputs, or a launch of the all-reduce."""
        producer = self._producer_of[number]
        if producer >= 0:
            return (producer,)
        if producer != NONE:
            return self._several[producer]
        return (self.sums[number],) if number in self.sums else ()

    def tasks_of(self, worker: int) -> range:
        """The numbers of a worker's tasks."""
        return range(int(self.table.offsets[worker]), int(self.table.offsets[worker + 1]))

    def order_of(self, timeline: Timeline) -> list[_Entry]:
        """All entries, by the times at which they begin in a timeline; iterations of synchronous schedules one after the other."""
        assert timeline.departures is not None
        starts, departures = np.concatenate(timeline.starts), np.concatenate(timeline.departures)
        keyed: list[tuple[int, float, bool, int, _Entry]] = []
        for entries, begins in ((self.outputs, departures), (self.entries, starts)):
            for number, entry in entries.items():
                if not entry.launches or number == entry.task:
                    keyed.append((self._iteration(entry), float(begins[number]), entry.is_joint, len(keyed), entry))
        return [entry for *_, entry in sorted(keyed, key=lambda key: key[:4])]

    def tails(self, timeline: Timeline) -> list[float]:
        """For each task, the length of the longest path from its end to the end of the schedule if each link is on its own.

        Args:
            timeline: determines in which order tasks are visited: what follows a task starts later.
        """
        tails = [0.0] * self.table.num_tasks
        first_tasks = set(self.table.offsets[:-1].tolist())
        for number in np.argsort(np.concatenate(timeline.ends), kind="stable")[::-1].tolist():
            through = tails[number] + self.durations[number]
            if number not in first_tasks:
                tails[number - 1] = max(tails[number - 1], through)
            for source in self.inputs(number):
                entry = self.outputs.get(source) or self.entries.get(source)
                between = 0.0 if entry is None or entry.is_joint else entry.duration
                for each in entry.launches if entry is not None and entry.launches else (source,):
                    tails[each] = max(tails[each], through + between)
        return tails

    def _iteration(self, entry: _Entry) -> int:
        if not self.schedule.is_synchronous:
            return 0
        index = int(self.table.micro_batch[entry.task])
        return index if entry.launches else self.schedule.update_of(index)


def _in_order(problem: _Problem, order: Iterable[_Entry]) -> Timeline:
    """The timeline if streams carry communication in an order.

    Raises:
        RuntimeError: the order contradicts the schedule.
    """
    schedule, total = problem.schedule, problem.table.num_tasks
    starts, ends = np.zeros(total), np.zeros(total)
    departures, arrivals = np.zeros(total), np.full(total, np.inf)
    next_task = [problem.tasks_of(worker).start for worker in range(schedule.num_workers)]
    worker_free, stream_free = [0.0] * schedule.num_workers, [0.0] * schedule.num_workers

    def advance(worker: int, stop: int) -> None:
        """Run a worker's tasks before ``stop``, all of whose inputs are there."""
        for number in range(next_task[worker], stop):
            start = max([worker_free[worker], *(arrivals[source] for source in problem.inputs(number))])
            entry = problem.entries.get(number)
            is_joint = entry is not None and entry.is_joint
            if is_joint:
                start = max(start, stream_free[worker])
            if start == np.inf:  # an input has not been sent
                raise RuntimeError(f"the order of communication contradicts schedule {schedule.name}")
            end = start + problem.durations[number]
            starts[number], ends[number], worker_free[worker] = start, end, end
            if is_joint:
                stream_free[worker] = end
            if entry is None or not entry.launches:
                departures[number] = end
                arrivals[number] = np.inf if number in problem.outputs else end
        next_task[worker] = max(next_task[worker], stop)

    for entry in order:
        if entry.is_joint:
            advance(entry.workers[0], entry.task + 1)
            continue
        senders = entry.launches or (entry.task,)
        for number in senders:
            advance(int(problem.table.worker[number]), number + 1)
        start = max(
            *(float(ends[number]) for number in senders), *(stream_free[worker] for worker in entry.workers), 0.0
        )
        end = start + entry.duration
        for worker in entry.workers:
            stream_free[worker] = end
        for number in senders:
            departures[number], arrivals[number] = start, end
            if entry.launches:
                starts[number], ends[number] = start, end
    for worker in range(schedule.num_workers):
        advance(worker, problem.tasks_of(worker).stop)
    cuts = problem.table.offsets[1:-1]
    columns = (tuple(np.split(values, cuts)) for values in (starts, ends, departures, arrivals))
    return Timeline(schedule, *columns)  # type: ignore[arg-type]


def _list_schedule(problem: _Problem, tails: Sequence[float] | None = None, overtakes: bool = False) -> list[_Entry]:
    """The order of list scheduling.

    Args:
        problem: the schedule and its durations.
        tails: first comes what the longest path follows (:meth:`_Problem.tails`); by default what has waited longest.
        overtakes: whether a joint computation may overtake what waits for its worker and for another one.
    """
    return list(_ListScheduling(problem, tails, overtakes).run())


class _ListScheduling:
    """An event-driven simulation that decides at each event what begins on the streams; arguments as of `_list_schedule`."""

    def __init__(self, problem: _Problem, tails: Sequence[float] | None, overtakes: bool) -> None:
        self._problem, self._tails, self._overtakes = problem, tails, overtakes
        num_workers = problem.schedule.num_workers
        self._workers = problem.table.worker.tolist()
        self._next = [problem.tasks_of(worker).start for worker in range(num_workers)]
        self._stops = [problem.tasks_of(worker).stop for worker in range(num_workers)]
        self._is_working, self._is_streaming = [False] * num_workers, [False] * num_workers
        #: Tasks whose output is at its consumer, and launches whose all-reduce has ended.
        self._arrived = [False] * problem.table.num_tasks
        self._launches_left = {entry.task: len(entry.launches) for entry in problem.entries.values()}
        #: Entries that are ready, the one that has waited longest first.
        self._waiting: list[_Entry] = []
        # Ends to come: (time, number of the event, task, its entry that ends, or None if the task itself ends).
        self._events: list[tuple[float, int, int, _Entry | None]] = []
        self._num_events = 0
        self._now = 0.0

    def run(self) -> Iterator[_Entry]:
        """Yield the entries as they begin."""
        for worker in range(len(self._next)):
            self._proceed(worker)
        yield from self._begin_entries()
        while self._events:
            self._now = self._events[0][0]
            touched: set[int] = set()
            while self._events and self._events[0][0] == self._now:
                _, _, number, entry = heapq.heappop(self._events)
                touched.update(self._end_of_task(number) if entry is None else self._end_of_entry(entry))
            for worker in sorted(touched):
                self._proceed(worker)
            yield from self._begin_entries()

    def _end_of_task(self, number: int) -> Iterable[int]:
        """A computation has ended; returns the workers that may proceed."""
        worker = self._workers[number]
        self._is_working[worker] = False
        output = self._problem.outputs.get(number)
        if output is None:
            self._arrived[number] = True
        else:
            self._waiting.append(output)
        return (worker,)

    def _end_of_entry(self, entry: _Entry) -> Iterable[int]:
        """An entry has ended; returns the workers that may proceed."""
        for worker in entry.workers:
            self._is_streaming[worker] = False
        if entry.is_joint:
            return self._end_of_task(entry.task)
        for number in entry.launches or (entry.task,):
            self._arrived[number] = True
        return entry.workers

    def _proceed(self, worker: int) -> None:
        """Start the worker's next task, if its inputs are there; a joint computation waits for the stream."""
        problem = self._problem
        while not self._is_working[worker] and self._next[worker] < self._stops[worker]:
            number = self._next[worker]
            if not all(self._arrived[source] for source in problem.inputs(number)):
                return
            self._next[worker] += 1
            entry = problem.entries.get(number)
            if entry is None:
                self._is_working[worker] = True
                self._schedule(problem.durations[number], number, None)
            elif entry.is_joint:
                self._is_working[worker] = True
                self._waiting.append(entry)
            else:
                self._launches_left[entry.task] -= 1
                if not self._launches_left[entry.task]:
                    self._waiting.append(entry)

    def _begin_entries(self) -> Iterator[_Entry]:
        """Begin what waits for streams that are free, in the order of their urgency."""
        if self._tails is not None:  # a stable sort: of equal ones, the one that has waited longest
            self._waiting.sort(key=self._remaining, reverse=True)
        overtaken: set[int] = set()
        left = []
        for entry in self._waiting:
            is_free = not any(self._is_streaming[worker] for worker in entry.workers)
            if is_free and (self._overtakes or not (entry.is_joint and entry.workers[0] in overtaken)):
                for worker in entry.workers:
                    self._is_streaming[worker] = True
                self._schedule(entry.duration, entry.task, entry)
                yield entry
            else:
                overtaken.update(entry.workers)
                left.append(entry)
        self._waiting = left

    def _remaining(self, entry: _Entry) -> float:
        """The length of the longest path from the time at which an entry is ready."""
        assert self._tails is not None
        return self._tails[entry.task] + (entry.duration if entry.is_joint else 0.0)

    def _schedule(self, after: float, number: int, entry: _Entry | None) -> None:
        heapq.heappush(self._events, (self._now + after, self._num_events, number, entry))
        self._num_events += 1
