"""The start and the end of every task, as predicted by the simulator or measured by the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.errors import UserError

from .schedule import Kind, Schedule, Task

__all__ = ["SteadyState", "Timeline", "TimelineError", "free_regions", "steady_state"]


class TimelineError(UserError):
    """A timeline that lacks the records an analysis needs."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every task, in seconds (or the unit of the times).

    Attributes:
        schedule: the schedule that was run.
        starts: per worker, an array aligned with ``schedule.workers``. An all-reduce's start is that of the collective, not
            of its launch.
        ends: like ``starts``.
        departures: when the transfer of a task's output began (its end if it does not travel); None if not recorded.
        arrivals: when the output reached its consumer's worker (its end if it does not travel); None if not recorded.
        blocking_sends: whether a worker is busy until its output has arrived.
    """

    schedule: Schedule
    starts: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]
    departures: tuple[np.ndarray, ...] | None = None
    arrivals: tuple[np.ndarray, ...] | None = None
    blocking_sends: bool = False

    @property
    def makespan(self) -> float:
        """Time from 0 to the end of the last task."""
        return max((float(ends.max()) for ends in self.ends if len(ends)), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per worker, the time spent in forwards, backwards and recomputations."""
        return tuple(
            float((ends - starts)[_is_compute(tasks)].sum())
            for tasks, starts, ends in zip(self.schedule.workers, self.starts, self.ends)
        )

    @property
    def bubble_ratios(self) -> tuple[float, ...]:
        """Per worker, the fraction of the makespan in which it does not compute."""
        makespan = self.makespan
        return tuple(1 - busy / makespan if makespan else 0.0 for busy in self.busy)

    @property
    def bubble_ratio(self) -> float:
        """Mean of :attr:`bubble_ratios` over the workers."""
        ratios = self.bubble_ratios
        return sum(ratios) / len(ratios)


@dataclass(frozen=True)
class SteadyState:
    """The steady state of an asynchronous schedule, between its warm-up and its end.

    Attributes:
        period: time from one update of the last stage to the next one.
        bubble_ratio: mean over the workers, within the measured window of updates.
    """

    period: float
    bubble_ratio: float


def _is_compute(tasks: Sequence[Task]) -> np.ndarray:
    return np.fromiter((task[0] for task in tasks), dtype=np.int64, count=len(tasks)) < Kind.ALL_REDUCE


def free_regions(timeline: Timeline) -> tuple[tuple[float, ...], ...]:
    """Per worker, for each (pipeline, stage) in the order of ``schedule.stages_on``, the idle time between the stage's last
    backward and the end of the worker's computing.

    These gaps can hide the stage's gradient all-reduce.
    """
    regions = []
    for worker, tasks in enumerate(timeline.schedule.workers):
        compute = np.flatnonzero(_is_compute(tasks))
        starts, ends = timeline.starts[worker][compute], timeline.ends[worker][compute]
        idle_before = np.concatenate([[0.0], np.cumsum(starts[1:] - ends[:-1])]) if len(compute) else np.zeros(1)
        last: dict[tuple[int, int], int] = {}
        for index, number in enumerate(compute.tolist()):
            last[tasks[number].pipeline, tasks[number].stage] = index
        regions.append(
            tuple(
                float(idle_before[-1] - idle_before[last[key]]) if key in last else float("inf")
                for key in timeline.schedule.stages_on(worker)
            )
        )
    return tuple(regions)


def steady_state(timeline: Timeline) -> SteadyState:
    """Period and bubble ratio over the middle third of an asynchronous schedule's updates.

    Raises:
        TimelineError: if the schedule has fewer than three updates.
    """
    schedule = timeline.schedule
    count = schedule.num_updates
    if count < 3:
        raise TimelineError(f"a steady state needs at least 3 updates, schedule {schedule.name} has {count}")
    first, last = (count - 1) // 3, (count - 1) - (count - 1) // 3
    if first == last:
        first -= 1
    stage = schedule.num_stages - 1
    moments = {}
    for worker, tasks in enumerate(schedule.workers):
        for index, task in enumerate(tasks):
            if task.kind is Kind.UPDATE and task.stage == stage and task.pipeline == 0:
                moments[task.micro_batch] = float(timeline.ends[worker][index])
    begin, end = moments[first], moments[last]
    ratios = []
    for worker, tasks in enumerate(schedule.workers):
        compute = _is_compute(tasks)
        starts, ends = timeline.starts[worker][compute], timeline.ends[worker][compute]
        inside = np.clip(np.minimum(ends, end) - np.maximum(starts, begin), 0.0, None).sum()
        ratios.append(1 - float(inside) / (end - begin) if end > begin else 0.0)
    return SteadyState(period=(end - begin) / (last - first), bubble_ratio=sum(ratios) / len(ratios))
