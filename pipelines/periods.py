"""Schedules of many micro-batches by those of few: what is added to each worker's order, and where.

Let a longer schedule have u micro-batches more than a short one of the same kind.  Either of two maps takes the tasks of the short
one to tasks of the longer one, so that what comes before something there does so here:

* **Restriction.** Each task to itself; on every worker the tasks of the further micro-batches stand in runs between others.
  (GPipe, however its stages are grouped.)
* **Shift.** On every worker the tasks up to some place to themselves, those behind it to the same ones of u micro-batches later;
  between them stands what the worker does for u micro-batches.  Tasks of one stage and kind come in the order of their
  micro-batches, so what waits for a task waits for the same one of an earlier micro-batch, too.  (All others: they repeat
  themselves.)

What is added to a worker's order is done between two of its tasks: with k times that between them, the short schedule takes no
longer than one of k u micro-batches more. This is a lower bound for the long one, by a graph of few nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Kind, Schedule, Task

__all__ = ["Insertions", "insertions"]


@dataclass(frozen=True, eq=False)
class Insertions:
    """What a longer schedule has more than a short one.

    Attributes:
        tasks: per worker, before which of its tasks (by place) what is added stands.
        shifted_from: per worker the place of the first task that stands for one of later micro-batches; none of restrictions.
    """

    tasks: tuple[dict[int, tuple[Task, ...]], ...]
    shifted_from: tuple[int, ...] | None


def insertions(short: Schedule, longer: Schedule) -> Insertions | None:
    """What a schedule of more micro-batches adds; None where neither map takes the one to the other."""
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
                # Further micro-batches would stand elsewhere if these were not all of one run.
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
        if not _is_shifted(few[place:], many[place + more :]):
            return None
        places.append(place)
        added.append(tuple(many[place : place + more]))
    return places, added


def _is_shifted(few: Sequence[Task], many: Sequence[Task]) -> bool:
    """Whether tasks are the same but for their micro-batches, which are as many later for all of a pipeline."""
    by: dict[tuple[int, bool], int] = {}
    for one, other in zip(few, many):
        if (one.kind, one.pipeline, one.stage, one.part) != (other.kind, other.pipeline, other.stage, other.part):
            return False
        later = other.micro_batch - one.micro_batch
        if later < 0 or by.setdefault((one.pipeline, one.kind.is_compute), later) != later:
            return False
    return True
