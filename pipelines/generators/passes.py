"""Passes from a draft (compute tasks) to a schedule: recomputation, updates, gradient all-reduces, repetition.

Where all-reduces are launched (Chimera's gradient synchronisation), for the replicated stages of a synchronous scheme:

- ``none``: after all of the worker's compute;
- ``eager``: right after the stage's last backward on the worker;
- ``eager-sync-opt``: eager where the stage's completion is followed by a bubble on that worker (the outer stages), after all
  compute where it is not. Bubbles are those of unit times.

Collectives run in launch order on each worker, so workers that share two stages must launch them in the same order: all launch
in one global order of the stages (by when a stage is complete everywhere), and none before its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from ..schedule import Kind, Part, Schedule, Task
from ..simulator import execute
from ..tasktable import tabulate
from ..times import Times
from .draft import Draft, GeneratorError

__all__ = ["ALL_REDUCE_POLICIES", "EAGER_SYNC_OPT", "check_all_reduce_policy", "finish"]

EAGER_SYNC_OPT = "eager-sync-opt"
ALL_REDUCE_POLICIES = ("none", "eager", EAGER_SYNC_OPT)
_YIELDS_WEIGHT_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def check_all_reduce_policy(policy: str) -> None:
    if policy not in ALL_REDUCE_POLICIES:
        raise GeneratorError(f"all_reduce is {policy!r}; give one of {', '.join(ALL_REDUCE_POLICIES)}")


def finish(
    name: str,
    draft: Draft,
    *,
    repeats: int,
    width: int,
    recompute: bool,
    all_reduce: str,
    activation_limit: Optional[float],
) -> Schedule:
    """Turn a draft into a (not yet validated) schedule."""
    workers: Sequence[list[Task]] = draft.workers
    if recompute:
        workers = [_with_recompute(tasks) for tasks in workers]
    replicated = len(draft.placement) * width > 1
    synchronous = draft.update_period == draft.num_micro_batches and not any(draft.delays)
    if not synchronous:
        workers = [_with_updates_in_turn(tasks, draft.update_period, replicated) for tasks in workers]
    elif replicated:
        workers = _with_all_reduces(draft, workers, all_reduce)
    else:
        workers = [_with_updates_at_end(tasks) for tasks in workers]
    if repeats > 1:
        workers = [_repeated(tasks, draft.num_micro_batches, repeats) for tasks in workers]
    return _schedule(name, draft, workers, repeats, width, activation_limit)


def _schedule(
    name: str, draft: Draft, workers: Sequence[list[Task]], repeats: int, width: int, limit: Optional[float]
) -> Schedule:
    return Schedule(
        name=name,
        num_stages=draft.num_stages,
        num_micro_batches=draft.num_micro_batches * repeats,
        placement=draft.placement,
        workers=tuple(map(tuple, workers)),
        update_period=draft.update_period,
        delays=draft.delays,
        widths=(width,) * len(workers),
        activation_limits=None if limit is None else (float(limit),) * len(workers),
    )


def _with_recompute(tasks: list[Task]) -> list[Task]:
    """A recomputation right before each backward (or its input part)."""
    result: list[Task] = []
    for task in tasks:
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            result.append(task._replace(kind=Kind.RECOMPUTE))
        result.append(task)
    return result


def _last_gradients(tasks: list[Task], period: int) -> dict[tuple[int, int, int], int]:
    """(pipeline, stage, update) -> index of the task that completes that gradient on this worker, in list order."""
    last: dict[tuple[int, int, int], int] = {}
    for index, task in enumerate(tasks):
        if task.kind in _YIELDS_WEIGHT_GRADIENT:
            newest = task.micro_batch + (task.part == Part.PAIR)
            key = (task.pipeline, task.stage, newest // period)
            last.pop(key, None)
            last[key] = index
    return last


def _with_updates_in_turn(tasks: list[Task], period: int, replicated: bool) -> list[Task]:
    """Asynchronous schemes: each stage is updated as soon as the gradient of the period is complete."""
    completes = {index: key for key, index in _last_gradients(tasks, period).items()}
    result: list[Task] = []
    for index, task in enumerate(tasks):
        result.append(task)
        if index in completes:
            pipeline, stage, update = completes[index]
            if replicated:
                result.append(Task(Kind.ALL_REDUCE, pipeline, stage, update))
            result.append(Task(Kind.UPDATE, pipeline, stage, update))
    return result


def _with_updates_at_end(tasks: list[Task]) -> list[Task]:
    """Synchronous schemes without replicas: all updates after all compute, in the order of completion."""
    order = _last_gradients(tasks, _ONE_ITERATION)
    return tasks + [Task(Kind.UPDATE, pipeline, stage, 0) for pipeline, stage, _ in order]


_ONE_ITERATION = 1 << 60
"""A period longer than any iteration: everything counts towards update 0."""


def _with_all_reduces(draft: Draft, workers: Sequence[list[Task]], policy: str) -> list[list[Task]]:
    """Synchronous schemes with replicas: launches as the policy says, updates at the end."""
    bare = _schedule("draft", draft, workers, repeats=1, width=1, limit=None)
    table = tabulate(bare)
    unit = Times.of(draft.num_stages, forward=1, backward=1, backward_input=0.5, recompute=1)
    outcome = execute(bare, table, unit)
    offsets = table.offsets.tolist()

    completed_at = [0.0] * draft.num_stages
    last_of: list[dict[tuple[int, int], int]] = []
    for worker, tasks in enumerate(workers):
        last = {key[:2]: index for key, index in _last_gradients(tasks, _ONE_ITERATION).items()}
        for (_, stage), index in last.items():
            completed_at[stage] = max(completed_at[stage], outcome.ends[offsets[worker] + index])
        last_of.append(last)
    turn = sorted(range(draft.num_stages), key=lambda stage: (completed_at[stage], -stage))
    rank = {stage: position for position, stage in enumerate(turn)}

    result = []
    for worker, tasks in enumerate(workers):
        begin, end = offsets[worker], offsets[worker + 1]
        held = sorted(bare.stages_on(worker), key=lambda key: (rank[key[1]], key[0]))
        launches: dict[int, list[Task]] = {}
        earliest = 0
        for key in held:
            done = last_of[worker].get(key, NOWHERE) + 1
            position = len(tasks)
            if policy == "eager" or (
                policy == EAGER_SYNC_OPT and _bubble_follows(outcome.starts[begin:end], outcome.ends[begin:end], done)
            ):
                position = done
            earliest = position = max(position, earliest)
            launches.setdefault(position, []).append(Task(Kind.ALL_REDUCE, *key, 0))
        merged: list[Task] = []
        for index, task in enumerate(tasks):
            merged += launches.get(index, ())
            merged.append(task)
        merged += launches.get(len(tasks), ())
        result.append(merged + [Task(Kind.UPDATE, *key, 0) for key in held])
    return result


NOWHERE = -1
"""The index of the last gradient of a replica that gets no micro-batch: before the first task."""


def _bubble_follows(starts: list[float], ends: list[float], index: int) -> bool:
    """Whether the worker idles between the task before ``index`` and its last one."""
    if index == 0:
        return bool(starts) and (starts[0] > 0 or _bubble_follows(starts, ends, 1))
    return any(starts[after] > ends[after - 1] for after in range(index, len(starts)))


def _repeated(tasks: list[Task], num_micro_batches: int, repeats: int) -> list[Task]:
    """The iteration again and again, with its micro-batches and its update numbered on."""
    result = list(tasks)
    for iteration in range(1, repeats):
        shift = iteration * num_micro_batches
        result += [
            task._replace(micro_batch=task.micro_batch + (shift if task.kind < Kind.ALL_REDUCE else iteration))
            for task in tasks
        ]
    return result
