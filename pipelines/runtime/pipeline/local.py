"""The pass that looks at one worker alone: what each of its tasks is for a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...memory import version_lifetimes
from ...schedule import Kind, Schedule, ScheduleFrame, Task
from .actions import Action, Drop, Run, Update
from .holding import Holding
from .slots import slots_of, slots_per_micro_batch

__all__ = ["LocalActions", "backward_pieces", "local_actions", "run_of"]

#: A worker's tasks, each with its actions.
LocalActions = tuple[tuple[Task, tuple[Action, ...]], ...]


def local_actions(schedule: Schedule, holding: Holding | None = None) -> tuple[LocalActions, ...]:
    """Per worker, aligned with its list, each task with its computation or update, and the versions of weights to drop after it.

    A forward is cut in the pieces that its backwards take. An update works in place where the version it starts from has no
    later reader; else that version is kept, and dropped after its last one. The launch of an all-reduce has no action: it says
    from when on the reduction can be issued, which is a matter of communication.

    Args:
        holding: says which ranks communicate while they compute; by default none do.
    """
    per_micro_batch = slots_per_micro_batch(schedule)
    drops: dict[tuple[int, int], list[Drop]] = {}
    for life in version_lifetimes(schedule):
        tasks = schedule.workers[life.worker]
        if life.last_needed_at < len(tasks):
            own_update = Task(Kind.UPDATE, life.pipeline, life.stage, life.version)
            if tasks[life.last_needed_at] != own_update:
                drop = Drop(life.pipeline, life.stage, life.version)
                drops.setdefault((life.worker, life.last_needed_at), []).append(drop)
    outlives_its_update = {drop for there in drops.values() for drop in there}

    result = []
    for worker, tasks in enumerate(schedule.workers):
        pieces = backward_pieces(tasks, per_micro_batch)
        aligned: list[tuple[Task, tuple[Action, ...]]] = []
        for index, task in enumerate(tasks):
            actions: list[Action] = []
            if task.kind.is_compute:
                run = run_of(schedule, task, pieces, per_micro_batch)
                actions.append(run if holding is None else run._replace(ranks=holding.joint_ranks(task)))
            elif task.kind is Kind.UPDATE:
                actions.append(Update(task, Drop(task.pipeline, task.stage, task.micro_batch) in outlives_its_update))
            aligned.append((task, (*actions, *drops.get((worker, index), ()))))
        result.append(tuple(aligned))
    return tuple(result)


def backward_pieces(tasks: Iterable[Task], per_micro_batch: int) -> dict[tuple[int, int, int], int]:
    """(pipeline, stage, first slot) of everything that goes back on its own -> how many slots it is."""
    pieces = {}
    for task in tasks:
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            slots = slots_of(task, per_micro_batch)
            pieces[task.pipeline, task.stage, slots.start] = len(slots)
    return pieces


def run_of(
    schedule: ScheduleFrame, task: Task, pieces: Mapping[tuple[int, int, int], int], per_micro_batch: int
) -> Run:
    slots = slots_of(task, per_micro_batch)
    sizes, first = [], slots.start
    while first < slots.stop:
        sizes.append(pieces[task.pipeline, task.stage, first] if task.kind is Kind.FORWARD else len(slots))
        first += sizes[-1]
    return Run(task, slots.start, tuple(sizes), schedule.version_of(task), schedule.update_of(task.micro_batch))
