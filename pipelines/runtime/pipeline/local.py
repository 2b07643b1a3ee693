"""The lowering pass that looks at one worker at a time: computations, updates, and the weight versions to free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...memory import version_lifetimes
from ...schedule import Kind, Schedule, ScheduleFrame, Task
from .actions import Action, Drop, Run, Update
from .holding import Holding
from .slots import slots_of, slots_per_micro_batch

__all__ = ["LocalActions", "backward_pieces", "local_actions", "run_of", "updates_last"]

#: The tasks of a worker in order, each with its actions (without communication).
LocalActions = tuple[tuple[Task, tuple[Action, ...]], ...]


def local_actions(schedule: Schedule, holding: Holding | None = None) -> tuple[LocalActions, ...]:
    """Return the actions of each worker, apart from communication.

    A forward pass is cut into the pieces of its backward passes. An update works in place if no later task reads the version that
    it starts from. Otherwise it keeps this version, which is dropped after the last task that reads it. The launch of an all-reduce
    has no action here: it only determines when the pass in `order` may issue the reduction.

    Args:
        schedule: A valid schedule.
        holding: Determines the ranks that communicate during a computation. If None, no ranks do.

    >>> from autoddl.pipelines import generate
    >>> for task, actions in local_actions(generate("1f1b", num_stages=2, num_micro_batches=1))[0]:
    ...     print(task, [str(action) for action in actions])
    0F0 ['run 0F0 v0']
    0B0 ['run 0B0 v0']
    0U0 ['update 0U0']
    """
    per_micro_batch = slots_per_micro_batch(schedule)
    # Drop a version after the last task that reads it, unless this task is the update that overwrites it.
    drops: dict[tuple[int, int], list[Drop]] = {}
    for lifetime in version_lifetimes(schedule):
        tasks = schedule.workers[lifetime.worker]
        if lifetime.last_needed_at < len(tasks):
            next_update = Task(Kind.UPDATE, lifetime.pipeline, lifetime.stage, lifetime.version)
            if tasks[lifetime.last_needed_at] != next_update:
                drop = Drop(lifetime.pipeline, lifetime.stage, lifetime.version)
                drops.setdefault((lifetime.worker, lifetime.last_needed_at), []).append(drop)
    outliving_versions = {drop for drops_after_task in drops.values() for drop in drops_after_task}

    result = []
    for worker, tasks in enumerate(schedule.workers):
        pieces = backward_pieces(tasks, per_micro_batch)
        tasks_with_actions: list[tuple[Task, tuple[Action, ...]]] = []
        for index, task in enumerate(tasks):
            actions: list[Action] = []
            if task.kind.is_compute:
                run = run_of(schedule, task, pieces, per_micro_batch)
                actions.append(run if holding is None else run._replace(ranks=holding.joint_ranks(task)))
            elif task.kind is Kind.UPDATE:
                old_version = Drop(task.pipeline, task.stage, task.micro_batch)
                actions.append(Update(task, keeps=old_version in outliving_versions))
            tasks_with_actions.append((task, (*actions, *drops.get((worker, index), ()))))
        result.append(tuple(tasks_with_actions))
    return tuple(result)


def updates_last(schedule: Schedule, actions: LocalActions) -> LocalActions:
    """Return a worker's tasks with the updates of each iteration of a synchronous schedule behind its other tasks.

    Args:
        schedule: The schedule.
        actions: The worker's tasks with their actions.
    """

    def key(item: tuple[Task, tuple[Action, ...]]) -> tuple[int, bool]:
        task = item[0]
        is_update = task.kind is Kind.UPDATE
        is_of_update = is_update or task.kind is Kind.ALL_REDUCE
        return (task.micro_batch if is_of_update else schedule.update_of(task.micro_batch)), is_update

    return tuple(sorted(actions, key=key))


def backward_pieces(tasks: Iterable[Task], per_micro_batch: int) -> dict[tuple[int, int, int], int]:
    """Return the number of slots of each backward pass of a worker, by (pipeline, stage, first slot).

    Args:
        tasks: Tasks of the worker.
        per_micro_batch: Slots of a micro-batch.
    """
    pieces = {}
    for task in tasks:
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            slots = slots_of(task, per_micro_batch)
            pieces[task.pipeline, task.stage, slots.start] = len(slots)
    return pieces


def run_of(
    schedule: ScheduleFrame, task: Task, pieces: Mapping[tuple[int, int, int], int], per_micro_batch: int
) -> Run:
    """Return the action of a compute task.

    Args:
        schedule: Schedule of the task.
        task: A compute task.
        pieces: Result of `backward_pieces` for the worker.
        per_micro_batch: Slots of a micro-batch.

    Raises:
        KeyError: the task is a forward pass without backward passes.
    """
    slots = slots_of(task, per_micro_batch)
    slots_per_piece = []
    slot = slots.start
    while slot < slots.stop:
        size = pieces[task.pipeline, task.stage, slot] if task.kind is Kind.FORWARD else len(slots)
        slots_per_piece.append(size)
        slot += size
    version, update = schedule.version_of(task), schedule.update_of(task.micro_batch)
    return Run(task, slots.start, tuple(slots_per_piece), version, update)
