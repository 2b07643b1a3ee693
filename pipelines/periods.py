"""How the schedule of more micro-batches extends the schedule of fewer: the tasks inserted into each worker's order.

Let a longer schedule have u micro-batches more than a short one of the same kind. One of two maps takes the tasks of the
short one to tasks of the longer one such that dependencies are kept:

* **Restriction.** Each task maps to itself. On every worker, the tasks of the additional micro-batches form runs between the
  others. (GPipe, however its stages are grouped.)
* **Shift.** On every worker, the tasks up to some position map to themselves, and the tasks behind it to the same tasks u
  micro-batches later; the tasks of u micro-batches are inserted between. Tasks of one stage and kind are ordered by
  micro-batch, so a task that depends on another one also depends on the same one of an earlier micro-batch. (All other
  families: their pattern repeats.)

A run of inserted tasks is executed between two tasks of the short schedule. Repeating each run k times gives a lower bound of
the makespan with k u additional micro-batches, from a graph with few nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Kind, Schedule, Task

__all__ = ["Insertions", "insertions", "micro_batch_shifts"]


@dataclass(frozen=True, eq=False)
class Insertions:
    """The tasks that a longer schedule has in addition to a short one.

    Attributes:
        tasks: per worker, the inserted tasks by the index of the task of the short schedule that they precede.
        shifted_from: per worker, the index of the first task that maps to one of later micro-batches; None for restrictions.
    """

    tasks: tuple[dict[int, tuple[Task, ...]], ...]
    shifted_from: tuple[int, ...] | None


def insertions(short: Schedule, longer: Schedule) -> Insertions | None:
    """The tasks that a schedule of more micro-batches adds; None if neither map takes ``short`` to ``longer``."""
    shifted = _shift(short, longer)
    if shifted is not None:
        places, added = shifted
        return Insertions(tuple({place: tasks} for place, tasks in zip(places, added)), tuple(places))
    restricted = _restriction(short, longer)
    return None if restricted is None else Insertions(tuple(restricted), None)


def _restriction(short: Schedule, longer: Schedule) -> list[dict[int, tuple[Task, ...]]] | None:
    found = []
    for few, many in zip(short.workers, longer.workers):
        added: dict[int, tuple[Task, ...]] = {}
        place = 0
        for task in many:
            if place < len(few) and task == few[place]:
                place += 1
            elif task.kind.is_compute and task.micro_batch >= short.num_micro_batches:
                run = added.get(place, ())
                # A run holds one kind of pass of one stage: otherwise further micro-batches would go elsewhere.
                if any((task.kind == Kind.FORWARD, task.stage) != (one.kind == Kind.FORWARD, one.stage) for one in run):
                    return None
                added[place] = (*run, task)
            else:
                return None
        if place < len(few):
            return None
        found.append(added)
    return found


def _shift(short: Schedule, longer: Schedule) -> tuple[list[int], list[tuple[Task, ...]]] | None:
    places, added = [], []
    for few, many in zip(short.workers, longer.workers):
        more, place = len(many) - len(few), 0
        while place < len(few) and few[place] == many[place]:
            place += 1
        if micro_batch_shifts(few[place:], many[place + more :]) is None:
            return None
        places.append(place)
        added.append(tuple(many[place : place + more]))
    return places, added


def micro_batch_shifts(few: Sequence[Task], many: Sequence[Task]) -> dict[tuple[int, bool], int] | None:
    """By how many micro-batches tasks are later, if they differ in nothing else, by pipeline and whether they compute.

    None if they differ in something else, or not by one non-negative shift for each of these.
    """
    shifts: dict[tuple[int, bool], int] = {}
    for one, other in zip(few, many):
        if (one.kind, one.pipeline, one.stage, one.part) != (other.kind, other.pipeline, other.stage, other.part):
            return None
        later = other.micro_batch - one.micro_batch
        if later < 0 or shifts.setdefault((one.pipeline, one.kind.is_compute), later) != later:
            return None
    return shifts
