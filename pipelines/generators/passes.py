"""Passes from a draft (compute tasks) to a schedule: recomputation, updates, gradient all-reduces, repetition.

Policies for the launch of all-reduces of replicated stages in a synchronous scheme (Chimera's gradient synchronisation):

- ``none``: after all of the worker's compute;
- ``eager``: right after the stage's last backward on the worker;
- ``eager-sync-opt``: eager if the stage's last backward is followed by a bubble on that worker (the outer stages), after
  all compute otherwise. Bubbles are those of unit times.

Collectives run in launch order on each worker, so workers that share two stages must launch them in the same order. All
workers launch in one global order of the stages, by when a stage is complete everywhere, and never ahead of that order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..schedule import Kind, Part, Schedule, Task
from ..simulator import execute
from ..tasktable import tabulate
from ..times import Times
from .draft import GeneratorError, ScheduleDraft

__all__ = ["ALL_REDUCE_POLICIES", "EAGER_SYNC_OPT", "check_all_reduce_policy", "finish"]

EAGER_SYNC_OPT = "eager-sync-opt"
ALL_REDUCE_POLICIES = ("none", "eager", EAGER_SYNC_OPT)
_YIELDS_WEIGHT_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def check_all_reduce_policy(policy: str) -> None:
    if policy not in ALL_REDUCE_POLICIES:
        raise GeneratorError(f"all_reduce is {policy!r}; give one of {', '.join(ALL_REDUCE_POLICIES)}")


def finish(
    name: str,
    draft: ScheduleDraft,
    *,
    repeats: int,
    widths: tuple[int, ...],
    recompute: bool,
    all_reduce: str,
    activation_limit: float | None,
) -> Schedule:
    """Turn a draft into a (not yet validated) schedule."""
    workers: Sequence[list[Task]] = draft.workers
    if recompute:
        workers = [_with_recompute(tasks) for tasks in workers]
    replicated = {
        stage for stage in range(draft.num_stages) if sum(widths[placement[stage]] for placement in draft.placement) > 1
    }
    synchronous = draft.update_period == draft.num_micro_batches and not any(draft.delays)
    if not synchronous:
        workers = [_with_updates_in_turn(tasks, draft.update_period, replicated) for tasks in workers]
    elif replicated:
        workers = _with_all_reduces(draft, workers, all_reduce, replicated)
    else:
        workers = [_with_updates_at_end(tasks) for tasks in workers]
    if repeats > 1:
        workers = [_repeated(tasks, draft.num_micro_batches, repeats) for tasks in workers]
    return _schedule(name, draft, workers, repeats, widths, activation_limit)


def _schedule(
    name: str,
    draft: ScheduleDraft,
    workers: Sequence[list[Task]],
    repeats: int,
    widths: tuple[int, ...],
    limit: float | None,
) -> Schedule:
    return Schedule(
        name=name,
        num_stages=draft.num_stages,
        num_micro_batches=draft.num_micro_batches * repeats,
        placement=draft.placement,
        workers=tuple(map(tuple, workers)),
        update_period=draft.update_period,
        delays=draft.delays,
        widths=widths,
        activation_limits=None if limit is None else (float(limit),) * len(workers),
    )


def _with_recompute(tasks: list[Task]) -> list[Task]:
    """Insert a recomputation right before each backward (or its input part)."""
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


def _with_updates_in_turn(tasks: list[Task], period: int, replicated: set[int]) -> list[Task]:
    """Asynchronous schemes: update each stage as soon as the gradient of the period is complete."""
    completes = {index: key for key, index in _last_gradients(tasks, period).items()}
    result: list[Task] = []
    for index, task in enumerate(tasks):
        result.append(task)
        if index in completes:
            pipeline, stage, update = completes[index]
            if stage in replicated:
                result.append(Task(Kind.ALL_REDUCE, pipeline, stage, update))
            result.append(Task(Kind.UPDATE, pipeline, stage, update))
    return result


def _with_updates_at_end(tasks: list[Task]) -> list[Task]:
    """Synchronous schemes without replicas: append all updates after all compute, in the order of completion."""
    order = _last_gradients(tasks, _ONE_ITERATION)
    return tasks + [Task(Kind.UPDATE, pipeline, stage, 0) for pipeline, stage, _ in order]


#: A period longer than any iteration: all micro-batches belong to update 0.
_ONE_ITERATION = 1 << 60


def _with_all_reduces(
    draft: ScheduleDraft, workers: Sequence[list[Task]], policy: str, replicated: set[int]
) -> list[list[Task]]:
    """Synchronous schemes with replicas: launch all-reduces by the policy, append the updates."""
    bare = _schedule("draft", draft, workers, repeats=1, widths=(1,) * len(workers), limit=None)
    table = tabulate(bare)
    # Recomputation takes no time here: launches are at the same positions whether stages recompute or not.
    unit = Times.of(draft.num_stages, forward=1, backward=1, backward_input=0.5, recompute=0)
    outcome = execute(bare, table, unit)
    offsets = table.offsets.tolist()

    # The global order of the stages: by when a stage's last backward ends on any worker.
    completed_at = [0.0] * draft.num_stages
    last_of: list[dict[tuple[int, int], int]] = []
    for worker, tasks in enumerate(workers):
        last = {key[:2]: index for key, index in _last_gradients(tasks, _ONE_ITERATION).items()}
        for (_, stage), index in last.items():
            completed_at[stage] = max(completed_at[stage], outcome.ends[offsets[worker] + index])
        last_of.append(last)
    turn = sorted(range(draft.num_stages), key=lambda stage: (completed_at[stage], -stage))
    rank = {stage: position for position, stage in enumerate(turn)}

    # Per worker, each launch goes to the position of its policy, but not before the previous launch of the global order.
    result = []
    for worker, tasks in enumerate(workers):
        begin, end = offsets[worker], offsets[worker + 1]
        held = sorted(bare.stages_on(worker), key=lambda key: (rank[key[1]], key[0]))
        last_bubble = _last_bubble(outcome.starts[begin:end], outcome.ends[begin:end])
        launches: dict[int, list[Task]] = {}
        earliest = 0
        for key in held:
            if key[1] not in replicated:
                continue
            done = last_of[worker].get(key, NOWHERE) + 1
            is_eager = policy == "eager" or (policy == EAGER_SYNC_OPT and done <= last_bubble)
            earliest = position = max(earliest, done if is_eager else len(tasks))
            launches.setdefault(position, []).append(Task(Kind.ALL_REDUCE, *key, 0))
        merged: list[Task] = []
        for index, task in enumerate(tasks):
            merged += launches.get(index, ())
            merged.append(task)
        merged += launches.get(len(tasks), ())
        result.append(merged + [Task(Kind.UPDATE, *key, 0) for key in held])
    return result


#: The index of the last gradient of a replica that gets no micro-batch: before the first task.
NOWHERE = -1


def _last_bubble(starts: list[float], ends: list[float]) -> int:
    """The index of the last task that the worker idles before; -1 if there is none."""
    for index in range(len(starts) - 1, 0, -1):
        if starts[index] > ends[index - 1]:
            return index
    return 0 if starts and starts[0] > 0 else NOWHERE


def _repeated(tasks: list[Task], num_micro_batches: int, repeats: int) -> list[Task]:
    """Repeat the iteration, with micro-batches and updates renumbered."""
    result = list(tasks)
    for iteration in range(1, repeats):
        shift = iteration * num_micro_batches
        result += [
            task._replace(micro_batch=task.micro_batch + (shift if task.kind < Kind.ALL_REDUCE else iteration))
            for task in tasks
        ]
    return result
