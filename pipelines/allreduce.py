"""Gradient all-reduces inside the simulation: when they are launched, when they run and when they end.

The all-reduce of a stage for one update is a *group*: one launch on each worker that holds a replica of the stage.
Every worker has one communication stream, which runs its groups in launch order. Let S be the latest of the members'
launches and of the ends of the previous groups on their streams. A group of duration a ends

- at S + a if all-reduces overlap compute;
- otherwise, when the last of its members has had a seconds without compute since S: all-reduces then progress only in
  the free regions. The end is known once each member has no more compute to run before it must wait, so the group is
  settled at that point.
"""

from __future__ import annotations

import numpy as np

from .schedule import Kind
from .tasktable import NONE, TaskTable
from .times import Times

__all__ = ["AllReduces"]


class AllReduces:
    """The all-reduces of one simulation run.

    Attributes:
        is_launch: per task, whether it launches an all-reduce.
        group_of: per task, the group of an all-reduce and of the update that waits for it; -1 for other tasks.
    """

    def __init__(self, table: TaskTable, times: Times) -> None:
        self._overlaps = times.all_reduce_overlaps_compute
        launches = table.of_kind(Kind.ALL_REDUCE)
        self.is_launch = (table.kind == Kind.ALL_REDUCE).tolist()
        self.group_of: list[int] = [NONE] * table.num_tasks
        self._members: list[list[int]] = []
        self._time: list[float] = []
        groups: dict[tuple[int, int], int] = {}
        for number in launches.tolist():
            key = (int(table.stage[number]), int(table.micro_batch[number]))
            group = groups.setdefault(key, len(groups))
            if group == len(self._members):
                self._members.append([])
                self._time.append(times.all_reduce[key[0]])
            self._members[group].append(number)
            self.group_of[number] = group
        for number in table.of_kind(Kind.UPDATE).tolist() if groups else ():
            key = (int(table.stage[number]), int(table.micro_batch[number]))
            self.group_of[number] = groups.get(key, NONE)

        self._worker_of = {number: int(table.worker[number]) for number in launches.tolist()}
        self._stop_of = {number: int(table.offsets[worker + 1]) for number, worker in self._worker_of.items()}
        stream_next = _following(launches, table)
        self._next = stream_next
        follows = set(stream_next.values())
        # A group waits, per member, for the launch, the stream's previous group and, without overlap, the worker's
        # last compute task before it must wait.
        per_member = 1 if self._overlaps else 2
        self._pending = [sum(per_member + (number in follows) for number in members) for members in self._members]
        self._launched_at: dict[int, float] = {}
        self._stream_free: dict[int, float] = {}
        self._undrained: dict[int, list[int]] = {}
        self._drained_until: dict[int, int] = {}
        self._done: dict[int, float] = {}
        self._waiting: dict[int, list[int]] = {}

    def is_done(self, group: int) -> bool:
        return group in self._done

    def done_at(self, group: int) -> float:
        return self._done[group]

    def launch(self, number: int, now: float, starts: list[float], ends: list[float]) -> list[int]:
        """Launch a member of a group at time ``now``; return the workers that this wakes up."""
        self._launched_at[number] = now
        self._undrained.setdefault(self._worker_of[number], []).append(number)
        return self._count_down([self.group_of[number]], starts, ends)

    def wait(
        self, number: int, worker: int, starts: list[float], ends: list[float], finished: bool = False
    ) -> list[int]:
        """Let a worker wait at task ``number`` for that task's group, or mark the end of its list (``finished``).

        Returns the workers that this wakes up.
        """
        if not finished:
            self._waiting.setdefault(self.group_of[number], []).append(worker)
        if self._overlaps:
            return []
        drained = self._undrained.pop(worker, [])
        for launch in drained:
            self._drained_until[launch] = number
        return self._count_down([self.group_of[launch] for launch in drained], starts, ends)

    def _count_down(self, groups: list[int], starts: list[float], ends: list[float]) -> list[int]:
        """Remove one pending condition of each group, settle the groups that have none left, and return the woken workers."""
        woken: list[int] = []
        while groups:
            group = groups.pop()
            self._pending[group] -= 1
            if self._pending[group]:
                continue
            self._settle(group, starts, ends)
            woken += self._waiting.pop(group, [])
            groups += [self.group_of[self._next[member]] for member in self._members[group] if member in self._next]
        return woken

    def _settle(self, group: int, starts: list[float], ends: list[float]) -> None:
        """Compute the start and the end of a group whose members can all run."""
        members, needed = self._members[group], self._time[group]
        workers = [self._worker_of[member] for member in members]
        begin = max(
            max(self._launched_at[member], self._stream_free.get(worker, 0.0))
            for member, worker in zip(members, workers)
        )
        end = begin + needed
        if not self._overlaps:
            end = max(self._end_in_free_regions(member, begin, needed, starts, ends) for member in members)
        self._done[group] = end
        for member, worker in zip(members, workers):
            starts[member], ends[member] = begin, end
            self._stream_free[worker] = end

    def _end_in_free_regions(
        self, member: int, begin: float, needed: float, starts: list[float], ends: list[float]
    ) -> float:
        """The time at which the member's worker has had ``needed`` seconds without compute since ``begin``."""
        free_from = begin
        for number in range(member + 1, self._drained_until[member]):
            if self.is_launch[number] or ends[number] <= free_from:
                continue
            gap = starts[number] - free_from
            if gap >= needed:
                break
            needed -= max(0.0, gap)
            free_from = ends[number]
        return free_from + needed


def _following(launches: np.ndarray, table: TaskTable) -> dict[int, int]:
    """Each launch's successor on the same worker's communication stream."""
    numbers, workers = launches.tolist(), table.worker[launches].tolist()
    return {
        number: numbers[index + 1] for index, number in enumerate(numbers[:-1]) if workers[index + 1] == workers[index]
    }
