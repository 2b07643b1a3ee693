"""The step time of a synchronous schedule as a longest path: fast to evaluate for any times, and it yields the path itself.

The simulator (:mod:`.simulator`) computes the longest path of a directed acyclic graph that depends only on the schedule. Its
nodes are tasks, transfers and all-reduces. A node begins when its last predecessor has ended and takes a multiple of one of the
*terms*: forward, backward, recomputation and all-reduce of a stage, forward and backward transfer over a boundary. The all-reduce
of a stage includes its optimizer step, also if there is nothing to reduce. So the step time is

    step(t) = max over paths P of  sum over terms k of  n(P, k) t(k)                                                          (1)

where n(P, k) counts how often P passes through term k (a pair counts twice, a half counts 1/2). A path that is the longest for
some times is a lower bound for all times, linear in them: a cutting plane.

This holds if transfers and all-reduces overlap compute (the defaults of :class:`.times.Times`).

The *level* of a node is the number of nodes on the longest chain that ends with it. All nodes of one level begin independently of
each other, so that they are computed together, level by level.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np

from .periods import Insertions
from .schedule import Kind, Schedule, Task
from .tasktable import NONE, producers, tabulate

__all__ = ["StepGraph", "Terms"]

#: Mean number of nodes on a level from which a level at once takes less time than its nodes one by one.
_WIDE = 12


class Terms:
    """Positions of the terms of S stages in a vector of 6 S - 2 numbers: forward, backward, recompute, all-reduce (S each), then
    forward and backward transfers (S - 1 each).

    >>> terms = Terms(4)
    >>> terms.recompute, terms.transfer_forward, terms.count
    (slice(8, 12, None), slice(16, 19, None), 22)
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.forward, self.backward, self.recompute, self.all_reduce = (
            slice(k * num_stages, (k + 1) * num_stages) for k in range(4)
        )
        first = 4 * num_stages
        self.transfer_forward = slice(first, first + num_stages - 1)
        self.transfer_backward = slice(first + num_stages - 1, first + 2 * (num_stages - 1))
        self.count = first + 2 * (num_stages - 1)
        # The terms of stages: forward, backward, recompute, all-reduce.
        self.of_stages = (self.forward, self.backward, self.recompute, self.all_reduce)


class StepGraph:
    """The longest-path graph of one schedule.

    Args:
        schedule: A synchronous and valid schedule.
        passes: Per stage, number of autograd passes of a whole backward pass; times are per autograd pass.
        input_passes: Per stage, number of autograd passes after which the gradient of the input is available.
        added: Tasks that a longer schedule has in addition; the step times are then lower bounds on those of the longer schedule
            (:meth:`with_repeated_insertions`).

    >>> from autoddl.pipelines.single_stage import single_stage_schedule
    >>> graph = StepGraph(single_stage_schedule(3), passes=[1], input_passes=[1])
    >>> step, path = graph.step(np.array([1.0, 2.0, 0.0, 0.5]))  # forward, backward, recompute, all-reduce
    >>> step, path.tolist()
    (9.5, [3.0, 3.0, 0.0, 1.0])
    """

    def __init__(
        self,
        schedule: Schedule,
        passes: Sequence[int],
        input_passes: Sequence[int],
        added: Insertions | None = None,
    ) -> None:
        assert schedule.is_synchronous
        self.terms = Terms(schedule.num_stages)
        builder = _Builder(schedule, self.terms, passes, input_passes, added)
        nodes = builder.by_level()
        self._first, self._second, self._term, self._times, self._is_added, self._origin, self._levels = nodes
        self.num_nodes = len(self._term)
        self._task_of = builder.task_of
        self._is_wide = self.num_nodes >= _WIDE * len(self._levels)

    def with_repeated_insertions(self, count: int) -> StepGraph:
        """The graph in which every inserted run of tasks is executed ``count`` times."""
        graph = copy(self)
        graph._times = np.where(self._is_added, count * self._times, self._times)
        return graph

    def step(self, times: np.ndarray) -> tuple[float, np.ndarray]:
        """Compute the makespan and a longest path P.

        Args:
            times: Seconds of every term, in the order of :class:`Terms`; shape (terms,).

        Returns:
            The makespan, and the counts n(P, .) in the order of :class:`Terms`; shape (terms,).
        """
        step, path = self.longest_path(times)
        return step, self.counts(path)

    def counts(self, nodes: Sequence[int]) -> np.ndarray:
        """How often some nodes take each term, in the order of :class:`Terms`; shape (terms,)."""
        chosen = np.array(nodes, dtype=np.intp)
        return np.bincount(self._term[chosen], weights=self._times[chosen], minlength=self.terms.count + 1)[:-1]

    def terms_of(self, nodes: Sequence[int]) -> np.ndarray:
        """The term of each node; the number of terms for nodes that take no time."""
        return np.asarray(self._term[np.array(nodes, dtype=np.intp)])

    def seconds_of(self, nodes: Sequence[int], times: np.ndarray) -> np.ndarray:
        """The seconds of each node; ``times`` as :meth:`step`."""
        chosen = np.array(nodes, dtype=np.intp)
        return np.asarray(np.append(times, 0.0)[self._term[chosen]] * self._times[chosen])

    def tasks_of(self, nodes: Sequence[int]) -> list[int]:
        """The task of each node: its number in the order of :func:`.tasktable.tabulate`, of a transfer that of the task that sends;
        :data:`.tasktable.NONE` for all-reduces, inserted tasks and nodes of zero duration that only join others."""
        origins = [self._origin[node] for node in nodes]
        return [NONE if origin == NONE else self._task_of[origin] for origin in origins]

    def longest_path(self, times: np.ndarray) -> tuple[float, list[int]]:
        """Compute the makespan and the nodes of a longest path, from its beginning to its end; arguments as :meth:`step`."""
        durations = np.append(times, 0.0)[self._term] * self._times
        return self._path(self._ends_by_level(durations) if self._is_wide else self._ends(durations))

    def longest_paths(self, times: np.ndarray) -> list[tuple[float, np.ndarray]]:
        """As :meth:`step`, for many vectors of times at once; shape (vectors, terms)."""
        if len(times) * self.num_nodes < _WIDE * len(self._levels):
            return [self.step(one) for one in times]
        ends = np.ascontiguousarray(self._ends_of_many(times.T).T)
        return [(step, self.counts(path)) for step, path in map(self._path, ends)]

    def _path(self, ends: np.ndarray | list[float]) -> tuple[float, list[int]]:
        """The makespan and the nodes of a longest path, by when the nodes end (:meth:`_ends`)."""
        node = int(np.argmax(ends))
        step, path = float(ends[node]), []
        # Single elements are read faster through memory views.
        first, second, end = self._first.data, self._second.data, ends if isinstance(ends, list) else ends.data
        while node:
            path.append(node - 1)
            one, other = first[node - 1], second[node - 1]
            node = other if end[other] > end[one] else one
        return step, path[::-1]

    def _ends(self, durations: np.ndarray) -> list[float]:
        """When the nodes end that take ``durations``, shape (nodes,); the first element is 0."""
        ends = [0.0] * (self.num_nodes + 1)
        rows = zip(self._first.tolist(), self._second.tolist(), durations.tolist())
        for node, (first, second, duration) in enumerate(rows, start=1):
            start, other = ends[first], ends[second]
            ends[node] = (other if other > start else start) + duration
        return ends

    def _ends_by_level(self, durations: np.ndarray) -> np.ndarray:
        """As :meth:`_ends`; also for many vectors at once, shape (nodes, vectors)."""
        ends = np.zeros((self.num_nodes + 1, *durations.shape[1:]))
        later, first, second = ends[1:], self._first, self._second
        for level in self._levels:
            out = later[level]
            np.maximum(ends.take(first[level], axis=0), ends.take(second[level], axis=0), out=out)
            out += durations[level]
        return ends

    def steps(self, times: np.ndarray) -> np.ndarray:
        """Compute the makespans for many vectors of times at once; shape (terms, vectors) -> (vectors,)."""
        return np.asarray(self._ends_of_many(times).max(axis=0))

    def _ends_of_many(self, times: np.ndarray) -> np.ndarray:
        """When the nodes end, for many vectors of times; shape (terms, vectors) -> (nodes + 1, vectors), the first row is 0."""
        padded = np.vstack([times, np.zeros((1, times.shape[1]))])
        return self._ends_by_level(padded[self._term] * self._times[:, None])


class _Nodes(NamedTuple):
    """The nodes of a graph in the order of their levels.

    Attributes:
        first, second: Per node its predecessors, numbered from 1; 0 for none.
        term: Per node its term.
        times: Per node how often it takes the term.
        is_added: Per node whether it is an inserted task.
        origin: Per node its index before it was ordered; NONE for nodes that merge others.
        levels: The nodes of each level.
    """

    first: np.ndarray
    second: np.ndarray
    term: np.ndarray
    times: np.ndarray
    is_added: np.ndarray
    origin: list[int]
    levels: list[slice]


class _Builder:
    """Collects the nodes and their predecessors, then orders them (see :meth:`by_level`)."""

    def __init__(
        self,
        schedule: Schedule,
        terms: Terms,
        passes: Sequence[int],
        input_passes: Sequence[int],
        added: Insertions | None,
    ) -> None:
        self.schedule, self.table, self.added = schedule, tabulate(schedule), added
        self.terms, self.passes, self.input_passes = terms, passes, input_passes
        self.predecessors: list[list[int]] = []
        self.term: list[int] = []
        self.times: list[float] = []
        self.is_added: list[bool] = []
        #: Per node its task, or that which sends; NONE for all others.
        self.task_of: list[int] = []
        # Per task the part of a micro-batch that it computes.
        size = np.where(self.table.kind < Kind.ALL_REDUCE, self.table.num_slots / self.table.slots_per_micro_batch, 1.0)
        self._add_tasks(size)
        self._add_transfers(size)

    def _add_node(self, term: int, times: float, task: int = NONE) -> int:
        """Add a node that takes a term ``times`` times, of a task if it is given; return its index."""
        self.predecessors.append([])
        self.task_of.append(task)
        self.term.append(term)
        self.times.append(times)
        self.is_added.append(False)
        return len(self.term) - 1

    def _add_tasks(self, size: np.ndarray) -> None:
        """Add the tasks in the order of their workers, and the all-reduces that they launch and wait for.

        Args:
            size: Per task, the part of a micro-batch that it computes, shape (tasks,).
        """
        terms, added = self.terms, self.added
        self.node_of: list[int] = []
        self.all_reduces: dict[tuple[int, int], int] = {}
        # The term of a compute task of each (kind, stage), and the number of times that a whole one takes it.
        durations = {
            kind: [self._duration(kind, stage) for stage in range(terms.num_stages)]
            for kind in Kind
            if kind < Kind.ALL_REDUCE
        }
        number = 0
        for worker, (tasks, sizes) in enumerate(
            zip(self.schedule.workers, np.split(size, self.table.offsets[1:-1].tolist()))
        ):
            previous = stream = NONE
            for place, ((kind, _, stage, micro_batch, _), part) in enumerate(zip(tasks, sizes.tolist())):
                if added is not None and place in added.tasks[worker]:
                    previous = self._add_chain(added.tasks[worker][place], previous)
                if kind == Kind.ALL_REDUCE:
                    # All-reduces run beside the tasks, on a stream of their own: one after the other per worker.
                    node = self._all_reduce_node(stage, micro_batch)
                    self.predecessors[node] += [one for one in (previous, stream) if one != NONE]
                    stream = node
                elif kind == Kind.UPDATE:
                    is_reduced = (stage, micro_batch) in self.all_reduces
                    # The term of the all-reduce includes the optimizer step, which follows it.
                    node = self._add_node(
                        terms.count if is_reduced else terms.all_reduce.start + stage, float(not is_reduced)
                    )
                    self.predecessors[node] += [previous] * (previous != NONE)
                    if is_reduced:
                        self.predecessors[node].append(self.all_reduces[stage, micro_batch])
                    previous = node
                else:
                    term, times = durations[kind][stage]
                    node = self._add_node(term, part * times, number)
                    if previous != NONE:
                        self.predecessors[node].append(previous)
                    previous = node
                self.node_of.append(node)
                number += 1

    def _duration(self, kind: Kind, stage: int) -> tuple[int, float]:
        """The term of a compute task, and the number of times that the task takes it."""
        terms = self.terms
        if kind == Kind.FORWARD:
            return terms.forward.start + stage, 1.0
        if kind == Kind.RECOMPUTE:
            return terms.recompute.start + stage, 1.0
        passes, input_passes = self.passes[stage], self.input_passes[stage]
        if kind == Kind.BACKWARD:
            count = passes
        elif kind == Kind.BACKWARD_INPUT:
            count = input_passes
        else:
            count = passes - input_passes
        return terms.backward.start + stage, float(count)

    def _add_chain(self, tasks: Sequence[Task], previous: int) -> int:
        """Add the inserted tasks behind a node, one node per term; return the last node."""
        sums: dict[int, float] = {}
        for task in tasks:
            term, count = self._duration(task.kind, task.stage)
            sums[term] = sums.get(term, 0.0) + count * task.part.size
        for term, count in sums.items():
            node = self._add_node(term, count)
            self.is_added[node] = True
            self.predecessors[node] += [previous] * (previous != NONE)
            previous = node
        return previous

    def _all_reduce_node(self, stage: int, update: int) -> int:
        """The node of the all-reduce of a stage's gradients, which all its workers launch and wait for."""
        if (stage, update) not in self.all_reduces:
            self.all_reduces[stage, update] = self._add_node(self.terms.all_reduce.start + stage, 1.0)
        return self.all_reduces[stage, update]

    def _add_transfers(self, size: np.ndarray) -> None:
        """Add the transfers between stages, on links that carry one transfer at a time in the sender's order; ``size`` as
        :meth:`_add_tasks`."""
        schedule, table, terms, arrival = self.schedule, self.table, self.terms, list(self.node_of)
        # The receiver of each task's activation or gradient, and the term of the transfer.
        is_forward = table.kind == Kind.FORWARD
        sends = is_forward & (table.stage < schedule.num_stages - 1)
        sends |= np.isin(table.kind, (Kind.BACKWARD, Kind.BACKWARD_INPUT)) & (table.stage > 0)
        receiving = np.where(sends, table.stage + np.where(is_forward, 1, -1), 0)
        receiver = np.array(schedule.placement)[np.where(sends, table.pipeline, 0), receiving]
        term = np.where(
            is_forward, terms.transfer_forward.start + table.stage, terms.transfer_backward.start + receiving
        )
        numbers = np.flatnonzero(sends & (receiver != table.worker))
        on_link: dict[tuple[int, int], int] = {}
        columns = (column[numbers].tolist() for column in (table.worker, receiver, term, size))
        for number, worker, to, of_link, part in zip(numbers.tolist(), *columns):
            node = self._add_node(of_link, part, number)
            self.predecessors[node].append(self.node_of[number])
            if (worker, to) in on_link:
                self.predecessors[node].append(on_link[worker, to])
            on_link[worker, to] = arrival[number] = node
        shifted = self._shifted_tasks()
        for source, target in zip(*(column.tolist() for column in producers(schedule, table))):
            # A task that stands for one of later micro-batches does not delay one of earlier micro-batches.
            if shifted is None or shifted[target] or not shifted[source]:
                self.predecessors[self.node_of[target]].append(arrival[source])

    def _shifted_tasks(self) -> list[bool] | None:
        """Per task, whether it stands for one of later micro-batches; None if no task does."""
        if self.added is None or self.added.shifted_from is None:
            return None
        return [
            place >= first
            for tasks, first in zip(self.schedule.workers, self.added.shifted_from)
            for place in range(len(tasks))
        ]

    def by_level(self) -> _Nodes:
        """Order the nodes by levels, with at most two predecessors each.

        Nodes of zero duration merge the predecessors of nodes that have more than two.
        """
        predecessors, term = self.predecessors, [*self.term]
        for before in predecessors:  # also those that are added
            while len(before) > 2:
                predecessors.append([before.pop(), before.pop()])
                term.append(self.terms.count)
                before.append(len(predecessors) - 1)
        level = self._level_of_each()
        num_others = len(term) - len(self.term)
        order = np.argsort(level, kind="stable")
        # Numbers from 1, by the index before; the last element is that of no predecessor.
        number = np.zeros(len(order) + 1, dtype=np.intp)
        number[order] = np.arange(1, len(order) + 1)
        first, second = np.array([(*before, NONE, NONE)[:2] for before in predecessors], dtype=np.intp)[order].T
        ends = np.cumsum(np.bincount(level)).tolist()
        return _Nodes(
            first=number[first],
            second=number[second],
            term=np.array(term, dtype=np.intp)[order],
            times=np.array([*self.times, *[0.0] * num_others])[order],
            is_added=np.array([*self.is_added, *[False] * num_others])[order],
            origin=np.where(order < len(self.term), order, NONE).tolist(),
            levels=[slice(begin, end) for begin, end in zip([0, *ends], ends)],
        )

    def _level_of_each(self) -> list[int]:
        """The level of each node, from 0."""
        successors: list[list[int]] = [[] for _ in self.predecessors]
        waiting = [len(nodes) for nodes in self.predecessors]
        for node, nodes in enumerate(self.predecessors):
            for other in nodes:
                successors[other].append(node)
        ready = [node for node, count in enumerate(waiting) if not count]
        level, num_placed = [0] * len(waiting), 0
        while ready:
            node = ready.pop()
            num_placed += 1
            next_level = level[node] + 1
            for successor in successors[node]:
                if level[successor] < next_level:
                    level[successor] = next_level
                waiting[successor] -= 1
                if not waiting[successor]:
                    ready.append(successor)
        assert num_placed == len(level), "the schedule deadlocks"
        return level
