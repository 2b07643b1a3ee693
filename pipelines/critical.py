"""The critical path of a timeline: the longest chain of tasks, which determines its makespan.

Every task begins the moment that the last of its predecessors ends: its worker's previous task, the arrival of an input
(which may itself have waited for its link), or an all-reduce. If several predecessors end at once, there are several
longest paths. The one with the most backwards is returned: it stays the longest as backwards become slower (C_f and C_b
of Chimera's performance model).
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
    """A longest chain of tasks, each of which begins the moment that the one before it ends or arrives.

    Attributes:
        tasks: its tasks in order.
        forward: number of forwards on it (a pair or a half counts once).
        backward: number of backwards on it (an input part or a weight part counts once).
    """

    tasks: tuple[Task, ...]
    transfers: tuple[Task, ...]
    """Those of them whose output's way to another worker is on it, too."""
    forward: int
    backward: int


def critical_path(timeline: Timeline) -> CriticalPath:
    """The critical path of a simulated timeline; O(tasks).

    Raises:
        TimelineError: if the timeline has no recorded transfers.
    """
    graph = _Predecessors(timeline)
    last = max(range(graph.num_tasks), key=lambda number: (graph.ends[number], -number), default=NONE)
    if last == NONE:
        return CriticalPath((), (), 0, 0)
    finals = [number for number in range(graph.num_tasks) if graph.same(graph.ends[number], graph.ends[last])]
    # Score each node by (backwards, forwards) on the best longest path that ends with it.
    score: dict[int, tuple[int, int]] = {}
    before: dict[int, int] = {}
    stack = list(finals)
    while stack:  # depth first: a node is scored after all of its predecessors
        node = stack[-1]
        if node in score:
            stack.pop()
            continue
        predecessors = graph.of(node)
        missing = [other for other in predecessors if other not in score]
        if missing:
            stack += missing
            continue
        stack.pop()
        best = max(predecessors, key=score.__getitem__, default=NONE)
        before[node] = best
        backwards, forwards = score[best] if best != NONE else (0, 0)
        kind = graph.kind_of(node)
        score[node] = (backwards + (kind in _BACKWARDS), forwards + (kind is Kind.FORWARD))
    # Follow the best path from its end to its start.
    node = max(finals, key=score.__getitem__)
    backwards, forwards = score[node]
    tasks: list[Task] = []
    transfers: list[Task] = []
    while node != NONE:
        if node < graph.num_tasks:
            tasks.append(graph.tasks[node])
        else:
            transfers.append(graph.tasks[node - graph.num_tasks])
        node = before[node]
    return CriticalPath(tuple(reversed(tasks)), tuple(reversed(transfers)), forwards, backwards)


class _Predecessors:
    """The predecessors of each node. Nodes are the tasks 0..n-1 and their transfers n..2n-1."""

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

        # The previous task that occupies the worker (a launch of an all-reduce does not).
        self._previous = [NONE] * self.num_tasks
        # The previous transfer on the same link.
        self._link_previous = [NONE] * self.num_tasks
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

    def of(self, node: int) -> list[int]:
        """The predecessors whose end determines this node's start: all those that are equally late."""
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
