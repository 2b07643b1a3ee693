"""The makespan of a schedule for many times at once, from the rules of :mod:`autoddl.pipelines.simulator`, written down anew.

All orders of a schedule are fixed: those of each worker's tasks, of the transfers on each link between two workers, of the
all-reduces on each worker.  So its tasks are put in one order that works for all times, once, and every start is a maximum of ends.
Times are arrays with one entry for each configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Union

import numpy as np

from autoddl.pipelines.generators import generate
from autoddl.pipelines.schedule import Kind, Part, Schedule, Task

__all__ = ["Family", "Program", "TaskTimes", "program_of"]

#: Seconds of one stage (boundary) in every configuration.
Seconds = Union[np.ndarray, float]


@dataclass(frozen=True)
class Family:
    """A schedule but for its numbers: name and options of the generator, stages per worker, pipelines."""

    name: str
    options: tuple[tuple[str, int | str], ...] = ()
    groups: int = 1
    num_pipelines: int = 1

    @property
    def splits_backwards(self) -> bool:
        """Whether a backward pass comes in two parts."""
        return self.name == "zero-bubble"

    @property
    def halves(self) -> bool:
        """Whether backward passes are of half a micro-batch."""
        return ("concatenation", "halving") in self.options

    def schedule(self, depth: int, count: int, widths: Sequence[int], again: bool) -> Schedule:
        return generate(
            self.name,
            num_stages=depth,
            num_micro_batches=count,
            iterations=1,
            width=widths,
            recompute=again,
            **dict(self.options),
        )


@dataclass(frozen=True)
class TaskTimes:
    """Seconds of a whole micro-batch per stage, and per boundary of what crosses it.

    ``backward_input`` is the part of ``backward`` until the gradient of the input is there; ``again`` of the forward pass that is
    run again, 0 where it is not.
    """

    forward: Sequence[Seconds]
    backward: Sequence[Seconds]
    backward_input: Sequence[Seconds]
    again: Sequence[Seconds]
    all_reduce: Sequence[Seconds]
    update: Sequence[Seconds]
    there: Sequence[Seconds]
    back: Sequence[Seconds]

    def of(self, task: Task) -> Seconds:
        """Of a task."""
        stage, whole, part = task.stage, self.backward, self.backward_input
        if task.kind is Kind.FORWARD:
            return self.forward[stage] * task.part.size
        if task.kind is Kind.RECOMPUTE:
            return self.again[stage] * task.part.size
        if task.kind is Kind.BACKWARD:
            return whole[stage] * task.part.size
        if task.kind is Kind.BACKWARD_INPUT:
            return part[stage] * task.part.size
        assert task.kind is Kind.BACKWARD_WEIGHT
        return (whole[stage] - part[stage]) * task.part.size

    def transfer(self, task: Task) -> Seconds:
        """Of a task's output to the next stage, or back to the one before."""
        sent = self.there[task.stage] if task.kind is Kind.FORWARD else self.back[task.stage - 1]
        return sent * task.part.size


@dataclass(frozen=True)
class Program:
    """A schedule in one order that works for all times.

    Attributes:
        schedule: with a recomputation before every backward pass.
        order: (worker, task) as they are run; of a stage's all-reduce the workers' launches, and then its run with worker None.
    """

    schedule: Schedule
    order: tuple[tuple[int | None, Task], ...]

    @cached_property
    def micro_batches(self) -> tuple[dict[int, float], ...]:
        """Per worker and stage on it the micro-batches that it puts through."""
        found: list[dict[int, float]] = [defaultdict(float) for _ in self.schedule.workers]
        for worker, _, task in self.schedule.tasks():
            found[worker][task.stage] += task.part.size * (task.kind is Kind.FORWARD)
        return tuple(found)

    @cached_property
    def most_in_flight(self) -> tuple[dict[tuple[int, int], float], ...]:
        """Per worker and (pipeline, stage) on it the most micro-batches whose backward pass is not over."""
        found = []
        for worker, tasks in enumerate(self.schedule.workers):
            alive = dict.fromkeys(self.schedule.stages_on(worker), 0.0)
            most = dict(alive)
            for task in tasks:
                key = (task.pipeline, task.stage)
                if task.kind is Kind.FORWARD:
                    alive[key] += task.part.size
                    most[key] = max(most[key], alive[key])
                elif task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    alive[key] -= task.part.size
            found.append(most)
        return tuple(found)

    @cached_property
    def moments(self) -> tuple[list[dict[tuple[int, int], tuple[float, float]]], ...]:
        """Per worker the different moments: of each (pipeline, stage) on it the micro-batches in flight, and those that run.

        Those run, if the whole stage is run again, that are in their forward pass or between their second one and the end of
        their backward pass.
        """
        found = []
        for worker, tasks in enumerate(self.schedule.workers):
            alive = dict.fromkeys(self.schedule.stages_on(worker), (0.0, 0.0))
            moments = []
            for task in tasks:
                key, size = (task.pipeline, task.stage), task.part.size
                flying, running = alive.get(key, (0.0, 0.0))
                if task.kind is Kind.FORWARD:
                    moments.append({**alive, key: (flying + size, running + size)})
                    alive[key] = (flying + size, running)
                elif task.kind is Kind.RECOMPUTE:
                    alive[key] = (flying, running + size)
                    moments.append(dict(alive))
                elif task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    alive[key] = (flying - size, running - size)
            found.append([dict(one) for one in {tuple(moment.items()): moment for moment in moments}.values()])
        return tuple(found)

    @cached_property
    def _producers(self) -> dict[Task, tuple[Task, ...]]:
        """The tasks of neighbouring stages whose outputs a task takes."""
        makers: dict[object, Task] = {}
        tasks = [task for _, task in self.order if _sends(task)]
        for task in tasks:
            for slot in _slots(task):
                makers[task.kind is Kind.FORWARD, task.pipeline, task.stage, slot] = task
        found = {}
        for task in tasks:
            ahead = task.kind is Kind.FORWARD
            neighbour = task.stage - 1 if ahead else task.stage + 1
            if 0 <= neighbour < self.schedule.num_stages:
                needed = (makers[ahead, task.pipeline, neighbour, slot] for slot in _slots(task))
                found[task] = tuple(dict.fromkeys(needed))
        return found

    def makespans(self, times: TaskTimes) -> np.ndarray:
        """When the last task ends, in every configuration."""
        schedule, producers = self.schedule, self._producers
        free: list[Seconds] = [0.0] * schedule.num_workers
        stream_free: list[Seconds] = [0.0] * schedule.num_workers
        link_free: dict[tuple[int, int], Seconds] = defaultdict(float)
        arrivals: dict[Task, Seconds] = {}
        launched: dict[int, list[tuple[int, Seconds]]] = defaultdict(list)
        reduced: dict[int, Seconds] = {}
        for worker, task in self.order:
            if worker is None:
                members = launched[task.stage]
                end = _latest(*(at for _, at in members), *(stream_free[member] for member, _ in members))
                # The optimizer step of a stage follows its all-reduce, whatever the worker does for other stages.
                end = end + times.all_reduce[task.stage] + times.update[task.stage]
                reduced[task.stage] = end
                for member, _ in members:
                    stream_free[member] = end
            elif task.kind is Kind.ALL_REDUCE:
                launched[task.stage].append((worker, free[worker]))
            elif task.kind is Kind.UPDATE:
                if task.stage in reduced:
                    free[worker] = _latest(free[worker], reduced[task.stage])
                else:
                    # A stage on one device may share a weight with another, whose gradients both exchange.
                    free[worker] = free[worker] + times.all_reduce[task.stage] + times.update[task.stage]
            else:
                start = _latest(free[worker], *(arrivals[maker] for maker in producers.get(task, ())))
                end = free[worker] = start + times.of(task)
                target = schedule.destination_of(task) if _sends(task) else None
                if target is not None and target != worker:
                    end = _latest(end, link_free[worker, target]) + times.transfer(task)
                    link_free[worker, target] = end
                arrivals[task] = end
        return np.asarray(_latest(*free))


def _latest(first: Seconds, *others: Seconds) -> Seconds:
    for other in others:
        first = np.maximum(first, other)
    return first


def _sends(task: Task) -> bool:
    return task.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)


def _slots(task: Task) -> range:
    """The halves of micro-batches that a task works on, counted over all of them."""
    first = 2 * task.micro_batch + (task.part is Part.SECOND_HALF)
    return range(first, first + round(2 * task.part.size))


@cache
def program_of(family: Family, depth: int, count: int, replicated: tuple[bool, ...]) -> Program:
    """Of a family's schedule on workers of several devices each or of one."""
    schedule = family.schedule(depth, count, [2 if wide else 1 for wide in replicated], again=True)
    return Program(schedule, tuple(_in_order(schedule)))


def _in_order(schedule: Schedule) -> Iterator[tuple[int | None, Task]]:
    """Worker by worker as far as each gets, again and again."""
    cursors = [0] * schedule.num_workers
    made: set[tuple[bool, int, int, int]] = set()
    streams: list[list[int]] = [[] for _ in schedule.workers]
    members = {
        stage: {worker for worker, _, task in schedule.tasks() if task.kind is Kind.ALL_REDUCE and task.stage == stage}
        for stage in range(schedule.num_stages)
    }
    done = {stage for stage in members if not members[stage]}
    left = schedule.num_tasks
    while left:
        before = left
        for worker, tasks in enumerate(schedule.workers):
            while cursors[worker] < len(tasks) and _is_ready(schedule, tasks[cursors[worker]], made, done):
                task = tasks[cursors[worker]]
                yield worker, task
                cursors[worker], left = cursors[worker] + 1, left - 1
                if _sends(task):
                    ahead = task.kind is Kind.FORWARD
                    made |= {(ahead, task.pipeline, task.stage, slot) for slot in _slots(task)}
                if task.kind is Kind.ALL_REDUCE:
                    streams[worker].append(task.stage)
                    while True:
                        firsts = {stream[0] for stream in streams if stream}
                        runs = [s for s in firsts if all(streams[m] and streams[m][0] == s for m in members[s])]
                        if not runs:
                            break
                        for stage in runs:
                            yield None, task._replace(stage=stage)
                            done.add(stage)
                            for member in members[stage]:
                                streams[member].pop(0)
        assert left < before, f"{schedule.name} comes to a standstill"


def _is_ready(schedule: Schedule, task: Task, made: set[tuple[bool, int, int, int]], done: set[int]) -> bool:
    if task.kind is Kind.UPDATE:
        return task.stage in done
    if not _sends(task):
        return True
    ahead = task.kind is Kind.FORWARD
    neighbour = task.stage - 1 if ahead else task.stage + 1
    if not 0 <= neighbour < schedule.num_stages:
        return True
    return all((ahead, task.pipeline, neighbour, slot) in made for slot in _slots(task))
