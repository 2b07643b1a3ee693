"""The step of a synchronous schedule as a longest path, for any times: fast to evaluate, with the path itself.

What the simulator works out (:mod:`.simulator`) is the longest path of a directed acyclic graph that the schedule alone decides on:
tasks, transfers and all-reduces are its nodes, each begins when the last of what lets it has ended, and takes a multiple of one of
the *terms*: forward, backward, recomputation and all-reduce of a stage, transfer over a boundary there and back.  So a step is

    step(t) = max over paths P of  sum over terms k of  n(P, k) t(k)                                                          (1)

with n(P, k) how often P passes through the term (a pair counts twice, a half half).  A path that is the longest for some times is a
lower bound, linear in the times, for all: a cutting plane.

Holds where transfers and all-reduces run beside compute (the defaults of :class:`.times.Times`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from .periods import Insertions
from .schedule import Kind, Schedule, Task
from .tasktable import NONE, producers, tabulate

__all__ = ["StepGraph", "Terms"]


class Terms:
    """Where the terms of S stages stand in a vector of 6 S - 2 numbers: forward, backward, recompute, all-reduce, S each, then
    transfers forward and back, S - 1 each."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.forward, self.backward, self.recompute, self.all_reduce = (
            slice(k * num_stages, (k + 1) * num_stages) for k in range(4)
        )
        first = 4 * num_stages
        self.transfer_forward = slice(first, first + num_stages - 1)
        self.transfer_backward = slice(first + num_stages - 1, first + 2 * (num_stages - 1))
        self.count = first + 2 * (num_stages - 1)
        #: The terms of stages: forward, backward, recompute, all-reduce.
        self.of_stages = (self.forward, self.backward, self.recompute, self.all_reduce)


class StepGraph:
    """The graph of one schedule.

    Args:
        schedule: synchronous and valid.
        passes: per stage how often a whole backward pass goes through it; times are of one.
        input_passes: per stage how often before the gradient of its input is there.
        added: what a longer schedule has more: the graph's steps are lower bounds of that one's, then (:meth:`with_added`).
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
        self._first, self._second, self._term, self._times, self._is_added = builder.sorted()
        self.num_nodes = len(self._term)

    def with_added(self, times: int) -> StepGraph:
        """The same with what was added once added so often."""
        found = copy(self)
        found._times = np.where(self._is_added, times * self._times, self._times)
        return found

    def step(self, times: np.ndarray) -> tuple[float, np.ndarray]:
        """The makespan, and n(P, .) of a longest path P; both of shape and order of :class:`Terms`."""
        durations = (np.append(times, 0.0)[self._term] * self._times).tolist()
        ends, before = [0.0] * (len(durations) + 1), [0] * (len(durations) + 1)
        for node, (first, second, duration) in enumerate(zip(self._first, self._second, durations), start=1):
            start, other = ends[first], ends[second]
            ends[node] = (other if other > start else start) + duration
            before[node] = second if other > start else first
        node = max(range(len(ends)), key=ends.__getitem__)
        step, path = ends[node], []
        while node:
            path.append(node - 1)
            node = before[node]
        counts = np.bincount(self._term[path], weights=self._times[path], minlength=self.terms.count + 1)
        return step, counts[:-1]

    def steps(self, times: np.ndarray) -> np.ndarray:
        """The makespans for many times at once; shape (terms, many) -> (many,)."""
        padded = np.vstack([times, np.zeros((1, times.shape[1]))])
        ends = np.zeros((self.num_nodes + 1, times.shape[1]))
        rows = zip(self._first, self._second, self._term.tolist(), self._times.tolist())
        for end, (first, second, term, count) in zip(ends[1:], rows):
            np.maximum(ends[first], ends[second], out=end)
            if count == 1.0:
                end += padded[term]
            elif count:
                end += count * padded[term]
        return np.asarray(ends.max(axis=0))


class _Builder:
    """Nodes with at most two that let them, in an order in which these come first (see :meth:`sorted`)."""

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
        self.before: list[list[int]] = []
        self.term: list[int] = []
        self.times: list[float] = []
        self.is_added: list[bool] = []
        size = np.where(
            self.table.kind < Kind.ALL_REDUCE, self.table.num_slots / self.table.slots_per_micro_batch, 1.0
        ).tolist()
        self._tasks(terms, size)
        self._inputs(terms, size)

    def _node(self, term: int, times: float) -> int:
        self.before.append([])
        self.term.append(term)
        self.times.append(times)
        self.is_added.append(False)
        return len(self.term) - 1

    def _tasks(self, terms: Terms, size: Sequence[float]) -> None:
        """Tasks behind each other on their workers, and the all-reduces that they launch and wait for."""
        self.node_of: list[int] = []
        self.groups: dict[tuple[int, int], int] = {}
        number = 0
        for worker, tasks in enumerate(self.schedule.workers):
            previous = stream = NONE
            for place, (kind, _, stage, micro_batch, _) in enumerate(tasks):
                if self.added is not None and place in self.added.tasks[worker]:
                    previous = self._chain(self.added.tasks[worker][place], previous)
                if kind == Kind.ALL_REDUCE:
                    group = self._group(terms, stage, micro_batch)
                    self.before[group] += [node for node in (previous, stream) if node != NONE]
                    stream = group
                    self.node_of.append(group)
                elif kind == Kind.UPDATE:
                    node = self._node(terms.count, 0.0)
                    self.before[node] += [previous] * (previous != NONE)
                    if (stage, micro_batch) in self.groups:
                        self.before[node].append(self.groups[stage, micro_batch])
                    previous = node
                    self.node_of.append(node)
                else:
                    term, times = self._duration(kind, stage)
                    node = self._node(term, size[number] * times)
                    self.before[node] += [previous] * (previous != NONE)
                    previous = node
                    self.node_of.append(node)
                number += 1

    def _duration(self, kind: Kind, stage: int) -> tuple[int, float]:
        """The term of a task that works on a micro-batch, and how often it takes it."""
        terms = self.terms
        if kind == Kind.FORWARD:
            return terms.forward.start + stage, 1.0
        if kind == Kind.RECOMPUTE:
            return terms.recompute.start + stage, 1.0
        whole, part = self.passes[stage], self.input_passes[stage]
        count = whole if kind == Kind.BACKWARD else part if kind == Kind.BACKWARD_INPUT else whole - part
        return terms.backward.start + stage, float(count)

    def _chain(self, tasks: Sequence[Task], previous: int) -> int:
        """What is added to a worker's order, behind a node; its last node."""
        sums: dict[int, float] = {}
        for task in tasks:
            term, count = self._duration(task.kind, task.stage)
            sums[term] = sums.get(term, 0.0) + count * task.part.size
        for term, count in sums.items():
            node = self._node(term, count)
            self.is_added[node] = True
            self.before[node] += [previous] * (previous != NONE)
            previous = node
        return previous

    def _group(self, terms: Terms, stage: int, update: int) -> int:
        if (stage, update) not in self.groups:
            self.groups[stage, update] = self._node(terms.all_reduce.start + stage, 1.0)
        return self.groups[stage, update]

    def _inputs(self, terms: Terms, size: Sequence[float]) -> None:
        """What arrives from other stages, on links that carry one transfer at a time in the sender's order."""
        schedule, arrival = self.schedule, list(self.node_of)
        number = 0
        for worker, tasks in enumerate(schedule.workers):
            on_link: dict[int, int] = {}
            for task in tasks:
                destination = schedule.destination_of(task)
                if destination is not None and destination != worker:
                    if task.kind is Kind.FORWARD:
                        term = terms.transfer_forward.start + task.stage
                    else:
                        term = terms.transfer_backward.start + task.stage - 1
                    node = self._node(term, size[number])
                    self.before[node].append(self.node_of[number])
                    if destination in on_link:
                        self.before[node].append(on_link[destination])
                    on_link[destination] = arrival[number] = node
                number += 1
        later = self._later()
        for source, target in zip(*(column.tolist() for column in producers(schedule, self.table))):
            # What stands for a task of later micro-batches is nothing that an earlier one waits for.
            if later is None or later[target] or not later[source]:
                self.before[self.node_of[target]].append(arrival[source])

    def _later(self) -> list[bool] | None:
        """Which tasks stand for those of later micro-batches."""
        if self.added is None or self.added.shifted_from is None:
            return None
        return [
            place >= first
            for tasks, first in zip(self.schedule.workers, self.added.shifted_from)
            for place in range(len(tasks))
        ]

    def sorted(self) -> tuple[list[int], list[int], np.ndarray, np.ndarray, np.ndarray]:
        """Per node the two (numbered from 1; 0: none) that let it, its term, how often it takes it, and whether it was added.

        Where more than two let a node, others of no duration stand before it.
        """
        after: list[list[int]] = [[] for _ in self.before]
        waiting = [len(nodes) for nodes in self.before]
        for node, nodes in enumerate(self.before):
            for other in nodes:
                after[other].append(node)
        ready = [node for node, count in enumerate(waiting) if not count]
        place = [0] * len(self.before)
        first: list[int] = []
        second: list[int] = []
        term: list[int] = []
        times: list[float] = []
        is_added: list[bool] = []
        none = 6 * self.schedule.num_stages - 2

        def put(a: int, b: int, of: int, count: float, added: bool) -> int:
            is_added.append(added)
            first.append(a)
            second.append(b)
            term.append(of)
            times.append(count)
            return len(first)

        while ready:
            node = ready.pop()
            lets = [place[other] for other in self.before[node]]
            while len(lets) > 2:
                lets.append(put(lets.pop(), lets.pop(), none, 0.0, False))
            lets += [0] * (2 - len(lets))
            place[node] = put(lets[0], lets[1], self.term[node], self.times[node], self.is_added[node])
            for later in after[node]:
                waiting[later] -= 1
                if not waiting[later]:
                    ready.append(later)
        assert all(place), "the schedule comes to a standstill"
        return first, second, np.array(term, dtype=np.intp), np.array(times), np.array(is_added)
