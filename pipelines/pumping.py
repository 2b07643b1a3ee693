"""Long paths of a long schedule, from a short one that it repeats.

A schedule of N' micro-batches is extended to N = N' + k p of them by repeating the same tasks every p micro-batches
(:mod:`.periods`).  On each worker w there is a *zone*: the tasks at its places a(w) to b(w) - 1 of the short schedule, such that

-   the long schedule begins with the same tasks as the short one, up to place b(w), and
-   it ends with the same tasks as the short one from place a(w) on, k p micro-batches later.

Let a path of the short schedule's graph pass a node u, and later the same node v of p micro-batches later: the same kind of task,
or transfer, of the same stage.  Let all nodes up to v be before b(w) on their workers, and all nodes from u on be at a(w) or behind
it.  Then the part from u to v can be repeated:

    beginning to u,  k + 1 times u to v, p micro-batches later each time,  v to the end, k p micro-batches later

is a chain of nodes of the long schedule in which each one waits for the one before: nodes of one worker have kept their order, and
so have transfers over one link; dependencies between stages connect equal micro-batches.  So it is a lower bound on the long
schedule's step, which counts the part k times more.

The longest path of the short schedule is repeated where this makes it the longest.  Chains that no part of is repeated are those of
the condensed graph (:class:`.stepgraph.StepGraph` with insertions), which repeats tasks of one worker only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .periods import micro_batch_shifts
from .schedule import Schedule, Task
from .stepgraph import StepGraph, Terms
from .tasktable import NONE, TaskTable

__all__ = ["PumpedGraph", "Zones", "zones_between"]


@dataclass(frozen=True, eq=False)
class Zones:
    """What repeats in a short schedule.

    Attributes:
        first, stop: Per worker the first place of its zone, and the place behind its last one.
        shifts: By pipeline, how many micro-batches later a task is in the next period.
    """

    first: tuple[int, ...]
    stop: tuple[int, ...]
    shifts: dict[int, int]


def zones_between(short: Schedule, longer: Schedule) -> Zones | None:
    """Return the zones of a schedule by comparison with the one that has a period more; None if nothing repeats."""
    stop, shifts = [], dict[int, int]()
    for few, many in zip(short.workers, longer.workers):
        same = (one == other for one, other in zip(few, many))
        stop.append(next((place for place, is_same in enumerate(same) if not is_same), len(few)))
        found = micro_batch_shifts(few[stop[-1] :], many[stop[-1] + len(many) - len(few) :])
        if found is None:
            return None
        for (pipeline, is_compute), later in found.items():
            if is_compute and shifts.setdefault(pipeline, later) != later:
                return None
    first, is_whole = [], False
    for few, many, place in zip(short.workers, longer.workers, stop):
        more = len(many) - len(few)
        while place and _is_later(few[place - 1], many[place - 1 + more], shifts):
            place -= 1
        first.append(place)
        is_whole |= stop[len(first) - 1] - place >= more
    return Zones(tuple(first), tuple(stop), shifts) if is_whole else None


def _is_later(one: Task, other: Task, shifts: Mapping[int, int]) -> bool:
    """Whether a task is another one, a period later."""
    later = shifts.get(one.pipeline)
    return later is not None and other == one._replace(micro_batch=one.micro_batch + later)


class PumpedGraph:
    """Lower bounds on the step of a long schedule, with the interface of :class:`.stepgraph.StepGraph`.

    Args:
        condensed: The condensed graph of the long schedule.
        short: The graph of a short schedule.
        table: The tasks of the short schedule.
        zones: What repeats in it.
        num_periods: By how many periods the long schedule is longer.
    """

    def __init__(
        self, condensed: StepGraph, short: StepGraph, table: TaskTable, zones: Zones, num_periods: int
    ) -> None:
        self.condensed, self.short, self.num_periods = condensed, short, num_periods
        self.terms: Terms = short.terms
        self.num_nodes = condensed.num_nodes
        place = np.arange(len(table.kind)) - table.offsets[table.worker]
        self._is_before_stop = place < np.array(zones.stop)[table.worker]
        self._is_behind_first = place >= np.array(zones.first)[table.worker]
        later = np.array([zones.shifts.get(pipeline, 0) for pipeline in range(int(table.pipeline.max()) + 1)])
        self._micro_batch, self._later = table.micro_batch, later[table.pipeline]
        self._identity = np.column_stack([table.kind, table.pipeline, table.part])

    def step(self, times: np.ndarray) -> tuple[float, np.ndarray]:
        """Compute a lower bound on the makespan, and how often the chain of nodes that proves it passes each term; as
        :meth:`.StepGraph.step`."""
        best = self.condensed.step(times)
        pumped = self._pumped(times)
        return best if pumped is None or pumped[0] <= best[0] else pumped

    def longest_paths(self, times: np.ndarray) -> list[tuple[float, np.ndarray]]:
        """As :meth:`step`, for many vectors of times; shape (vectors, terms)."""
        return [self.step(one) for one in times]

    def steps(self, times: np.ndarray) -> np.ndarray:
        """Compute lower bounds for many vectors of times at once, by the condensed graph alone; as :meth:`.StepGraph.steps`."""
        return self.condensed.steps(times)

    def _pumped(self, times: np.ndarray) -> tuple[float, np.ndarray] | None:
        """The longest path of the short graph with the part repeated that makes it the longest; None if none can be."""
        step, nodes = self.short.longest_path(times)
        tasks = np.array(self.short.tasks_of(nodes))
        is_task = tasks != NONE
        # Nodes without a task are all-reduces at the end, which no part that repeats may come behind, or join others.
        terms = self.short.terms_of(nodes)
        seconds = self.short.seconds_of(nodes, times)
        ends_at = np.cumsum(seconds)
        fits_before = np.logical_and.accumulate(
            np.where(is_task, self._is_before_stop[tasks], terms == self.terms.count)
        )
        fits_behind = np.logical_and.accumulate(np.where(is_task, self._is_behind_first[tasks], True)[::-1])[::-1]
        opened: dict[tuple[tuple[int, ...], int], int] = {}
        best_s, best = 0.0, (0, 0)
        for number in np.flatnonzero(is_task & (fits_before | fits_behind)).tolist():
            task = int(tasks[number])
            kind = (int(terms[number]), *self._identity[task].tolist())
            micro_batch = int(self._micro_batch[task])
            begin = opened.get((kind, micro_batch - int(self._later[task])))
            if begin is not None and fits_before[number] and ends_at[number] - ends_at[begin] > best_s:
                best_s, best = float(ends_at[number] - ends_at[begin]), (begin, number)
            if fits_behind[number]:
                opened[kind, micro_batch] = number
        if not best_s:
            return None
        part = nodes[best[0] + 1 : best[1] + 1]
        counts = self.short.counts(nodes) + self.num_periods * self.short.counts(part)
        return step + self.num_periods * best_s, counts
