"""The critical path of a timeline: the chain of tasks that makes it as long as it is.

Going back from the last task, every task began the moment that something let it: its worker's previous task, or the
arrival of an input (which may itself have waited for its link), or an all-reduce. Where several let it at once there
are several longest paths; the one with the most backwards is given, which is the one that stays longest as backwards
grow (C_f and C_b of Chimera's performance model).
"""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import Kind, Task
from .tasktable import NONE, producers, tabulate
from .timeline import Timeline, TimelineError

__all__ = ["CriticalPath", "critical_path"]

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class CriticalPath:
    """A longest chain of tasks each of which begins the moment that the one before it lets it."""

    tasks: tuple[Task, ...]
    forward: int
    """Forwards on it (a pair or a half counts once)."""
    backward: int
    """Backwards on it (an input part or a weight part counts once)."""


def critical_path(timeline: Timeline) -> CriticalPath:
    """The critical path of a simulated timeline; O(tasks), and linear in the tasks on longest paths after that.

    Raises:
        TimelineError: if the timeline has no record of its transfers.
    """
    graph = _Releases(timeline)
    last = max(range(graph.num_tasks), key=lambda number: (graph.ends[number], -number), default=NONE)
    if last == NONE:
        return CriticalPath((), 0, 0)
    finals = [number for number in range(graph.num_tasks) if graph.same(graph.ends[number], graph.ends[last])]
    score: dict[int, tuple[int, int]] = {}
    before: dict[int, int] = {}
    stack = list(finals)
    while stack:  # depth first, so that a node is scored after all that released it
        node = stack[-1]
        if node in score:
            stack.pop()
            continue
        releasing = graph.released_by(node)
        missing = [other for other in releasing if other not in score]
        if missing:
            stack += missing
            continue
        stack.pop()
        best = max(releasing, key=score.__getitem__, default=NONE)
        before[node] = best
        backwards, forwards = score[best] if best != NONE else (0, 0)
        kind = graph.kind_of(node)
        score[node] = (backwards + (kind in _BACKWARDS), forwards + (kind is Kind.FORWARD))
    node = max(finals, key=score.__getitem__)
    backwards, forwards = score[node]
    tasks: list[Task] = []
    while node != NONE:
        if node < graph.num_tasks:
            tasks.append(graph.tasks[node])
        node = before[node]
    return CriticalPath(tuple(reversed(tasks)), forwards, backwards)


class _Releases:
    """What let each node begin. Nodes are the tasks 0..n-1 and their transfers n..2n-1."""

    def __init__(self, timeline: Timeline) -> None:
        if timeline.departures is None or timeline.arrivals is None:
            raise TimelineError("the critical path needs the transfers' times, which this timeline lacks")
        schedule = timeline.schedule
        table = tabulate(schedule)
        self.num_tasks = table.num_tasks
        self.tasks = [task for tasks in schedule.workers for task in tasks]
        self.starts = [time for times in timeline.starts for time in times.tolist()]
        self.ends = [time for times in timeline.ends for time in times.tolist()]
        self.departures = [time for times in timeline.departures for time in times.tolist()]
        self.arrivals = [time for times in timeline.arrivals for time in times.tolist()]
        self._blocking = timeline.blocking_sends
        self._tolerance = 1e-9 * max(self.ends, default=0.0)

        self._previous = [NONE] * self.num_tasks
        """The worker's previous task that occupies it (a launch of an all-reduce does not)."""
        self._link_previous = [NONE] * self.num_tasks
        """The transfer before a task's own on the same link."""
        self._stream_previous = [NONE] * self.num_tasks
        self._groups: dict[tuple[int, int], list[int]] = {}
        number = 0
        for worker, tasks in enumerate(schedule.workers):
            previous = stream = NONE
            on_link: dict[int, int] = {}
            for task in tasks:
                self._previous[number] = previous
                if task.kind is Kind.ALL_REDUCE:
                    self._stream_previous[number], stream = stream, number
                    self._groups.setdefault((task.stage, task.micro_batch), []).append(number)
                else:
                    previous = number
                    destination = schedule.destination_of(task)
                    if destination is not None and destination != worker:
                        self._link_previous[number] = on_link.get(destination, NONE)
                        on_link[destination] = number
                number += 1
        self._inputs: dict[int, list[int]] = {}
        for source, target in zip(*(column.tolist() for column in producers(schedule, table))):
            self._inputs.setdefault(target, []).append(source)

    def same(self, left: float, right: float) -> bool:
        return abs(left - right) <= self._tolerance

    def kind_of(self, node: int) -> Kind | None:
        return self.tasks[node].kind if node < self.num_tasks else None

    def released_by(self, node: int) -> list[int]:
        """The nodes whose end let this one begin, all those that are equally late."""
        candidates = list(self._candidates(node))
        latest = max((time for _, time in candidates), default=0.0)
        return [other for other, time in candidates if self.same(time, latest)] if latest > self._tolerance else []

    def _candidates(self, node: int) -> list[tuple[int, float]]:
        if node >= self.num_tasks:
            number = node - self.num_tasks
            result = [(number, self.ends[number])]
            earlier = self._link_previous[number]
            if earlier != NONE:
                result.append((earlier + self.num_tasks, self.arrivals[earlier]))
            return result
        task = self.tasks[node]
        if task.kind is Kind.ALL_REDUCE:
            members = self._groups[task.stage, task.micro_batch]
            result = [(p, self.ends[p]) for p in (self._previous[member] for member in members) if p != NONE]
            return result + [(p, self.ends[p]) for p in (self._stream_previous[m] for m in members) if p != NONE]
        result = []
        previous = self._previous[node]
        if previous != NONE:
            travels = self._blocking and self.arrivals[previous] > self.ends[previous]
            result.append(
                (previous + self.num_tasks, self.arrivals[previous]) if travels else (previous, self.ends[previous])
            )
        for source in self._inputs.get(node, ()):
            travels = self.arrivals[source] > self.ends[source]
            result.append((source + self.num_tasks if travels else source, self.arrivals[source]))
        if task.kind is Kind.UPDATE:
            group = self._groups.get((task.stage, task.micro_batch), ())
            result += [(member, self.ends[member]) for member in group]
        return result
