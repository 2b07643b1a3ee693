"""The rules of a valid schedule, in the order in which they are checked.

1. *Form.* Numbers are in range; every task is on the worker that its pipeline places its stage on.
2. *Completeness.* Every micro-batch runs through one pipeline. At every stage it has one forward and one backward (or
   one input part and one weight part); a stage recomputes all micro-batches or none. Every replica of every stage has
   every update once, and an all-reduce before it if the stage has several replicas.
3. *Order on a worker.* Forward before recomputation before backward; input part before weight part; all gradients of an
   update before its all-reduce before the update; updates in ascending order.
4. *Weight versions.* The version that a task uses (:meth:`Schedule.version_of`) has been made before. In a synchronous
   schedule there is one version per iteration, so no task of an iteration precedes the updates of the previous iteration.
5. *No deadlock.* A dry run reaches the end of every list, with collectives in launch order on every worker. This also
   excludes a deadlock under blocking pairwise sends: see :mod:`.communication`.
6. *Memory.* No worker's activations exceed its limit.

All checks are linear in the number of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from autoddl.costmodel.errors import UserError

from .grid import excerpt
from .memory import activations_alive
from .schedule import Kind, Part, Schedule, Task
from .simulator import execute
from .tasktable import NONE, TaskTable, slot_table, tabulate
from .times import Times

__all__ = ["InvalidScheduleError", "validate"]

_INPUT_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_WEIGHT_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


class InvalidScheduleError(UserError):
    """A schedule that breaks a rule. The first line of the message names the rule; the grid below it marks the invalid tasks.

    Attributes:
        reason: the first line.
        cells: (worker, index in its list) of the invalid tasks.
    """

    def __init__(self, schedule: Schedule, reason: str, cells: Sequence[tuple[int, int]] = ()) -> None:
        self.reason = f"schedule {schedule.name}: {reason}"
        self.cells = tuple(cells)
        super().__init__(f"{self.reason}\n{excerpt(schedule, self.cells)}" if cells else self.reason)


def validate(schedule: Schedule) -> None:
    """Check all the rules; O(tasks).

    Raises:
        InvalidScheduleError: for the first violation found, with the invalid tasks.
    """
    _check_header(schedule)
    table = tabulate(schedule)
    checker = _Checker(schedule, table)
    checker.check_form()
    checker.check_pipelines()
    checker.check_micro_batches()
    checker.check_updates()
    checker.check_versions()
    checker.check_progress()
    checker.check_memory()


def _check_header(schedule: Schedule) -> None:
    """Check the fields that the other rules index with."""

    def require(condition: bool, reason: str) -> None:
        if not condition:
            raise InvalidScheduleError(schedule, reason)

    require(schedule.num_stages >= 1, f"num_stages is {schedule.num_stages}, must be at least 1")
    require(schedule.num_micro_batches >= 1, f"num_micro_batches is {schedule.num_micro_batches}, must be at least 1")
    require(schedule.update_period >= 1, f"update_period is {schedule.update_period}, must be at least 1")
    require(schedule.num_workers >= 1 and schedule.num_pipelines >= 1, "there is no worker or no pipeline")
    for pipeline, workers in enumerate(schedule.placement):
        require(
            len(workers) == schedule.num_stages,
            f"pipeline {pipeline} places {len(workers)} stages, the model has {schedule.num_stages}",
        )
        for stage, worker in enumerate(workers):
            require(
                0 <= worker < schedule.num_workers,
                f"pipeline {pipeline} places stage {stage} on worker {worker}, there are {schedule.num_workers}",
            )
    for stage in range(schedule.num_stages):
        holders = [workers[stage] for workers in schedule.placement]
        require(len(set(holders)) == len(holders), f"two pipelines place stage {stage} on one worker: {holders}")
    for name, values, count in (
        ("delays", schedule.delays, schedule.num_stages),
        ("widths", schedule.widths, schedule.num_workers),
        ("activation_limits", schedule.activation_limits, schedule.num_workers),
    ):
        if values is not None:
            require(len(values) == count, f"{name} has {len(values)} entries, must have {count}")
    require(min(schedule.delays) >= 0, f"delays are {schedule.delays}, must be at least 0")
    require(min(schedule.widths) >= 1, f"widths are {schedule.widths}, must be at least 1")


class _Checker:
    """The rules over a schedule's tasks as columns."""

    def __init__(self, schedule: Schedule, table: TaskTable) -> None:
        self.schedule = schedule
        self.table = table

    def task(self, number: int) -> Task:
        worker, index = self.table.locate(number)
        return self.schedule.workers[worker][index]

    def fail(self, reason: str, numbers: Iterable[int] = ()) -> None:
        raise InvalidScheduleError(self.schedule, reason, [self.table.locate(int(number)) for number in numbers])

    def fail_missing(self, name: str, task: Task) -> None:
        worker = self.schedule.worker_of(task)
        cell = (worker, len(self.schedule.workers[worker]))
        raise InvalidScheduleError(self.schedule, f"{name} {task} is missing on worker {worker}", [cell])

    def check_form(self) -> None:
        schedule, table = self.schedule, self.table
        is_compute = table.kind < Kind.ALL_REDUCE
        last_micro_batch = table.micro_batch + (table.part == Part.PAIR)
        limit = np.where(is_compute, schedule.num_micro_batches, schedule.num_updates)
        for bad, what in (
            ((table.pipeline < 0) | (table.pipeline >= schedule.num_pipelines), "a pipeline that does not exist"),
            ((table.stage < 0) | (table.stage >= schedule.num_stages), "a stage that does not exist"),
            ((table.micro_batch < 0) | (last_micro_batch >= limit), "a micro-batch or update that does not exist"),
            (~is_compute & (table.part != Part.WHOLE), "a part, which an all-reduce or update cannot have"),
        ):
            for number in np.flatnonzero(bad)[:1]:
                worker, _ = table.locate(number)
                self.fail(f"task {self.task(number)} of worker {worker} names {what}", [number])
        owner = np.array(schedule.placement)[table.pipeline, table.stage]
        for number in np.flatnonzero(owner != table.worker)[:1]:
            worker, _ = table.locate(number)
            self.fail(f"task {self.task(number)} is on worker {worker}, its stage is on {owner[number]}", [number])
        pairs = table.part == Part.PAIR
        split = pairs & (table.micro_batch // schedule.update_period != last_micro_batch // schedule.update_period)
        for number in np.flatnonzero(split)[:1]:
            self.fail(f"task {self.task(number)} is a pair of micro-batches of different updates", [number])

    def check_pipelines(self) -> None:
        """Every micro-batch runs through one pipeline."""
        schedule, table = self.schedule, self.table
        compute = np.flatnonzero(table.kind < Kind.ALL_REDUCE)
        pipeline_of = np.full(schedule.num_micro_batches, NONE)
        for shift in (0, 1):
            numbers = compute[table.part[compute] == Part.PAIR] if shift else compute
            pipeline_of[table.micro_batch[numbers] + shift] = table.pipeline[numbers]
        for number in compute[pipeline_of[table.micro_batch[compute]] != table.pipeline[compute]][:1]:
            task = self.task(number)
            self.fail(f"task {task} runs micro-batch {task.micro_batch} through a second pipeline", [number])
        for micro_batch in np.flatnonzero(pipeline_of == NONE)[:1]:
            self.fail(f"no task works on micro-batch {micro_batch}")
        self.pipeline_of = pipeline_of

    def _cover(self, *kinds: Kind, name: str) -> np.ndarray:
        """(stage, slot) -> the task that covers it; fails if two tasks do."""
        schedule, table = self.schedule, self.table
        numbers = table.of_kind(*kinds)
        owner = slot_table(schedule, table, numbers)
        first, count, stage = table.first_slot[numbers], table.num_slots[numbers], table.stage[numbers]
        for step in range(int(count.max(initial=0))):
            covers = count > step
            lost = numbers[covers][owner[stage[covers], first[covers] + step] != numbers[covers]]
            for number in lost[:1]:
                task = self.task(number)
                other = owner[task.stage, table.first_slot[number] + step]
                self.fail(f"{name} {task} is done twice", [number, other])
        return owner

    def _require_all(self, owner: np.ndarray, name: str, kind: Kind) -> None:
        missing = np.flatnonzero(owner.ravel() == NONE)
        for flat in missing[:1]:
            stage, slot = divmod(int(flat), owner.shape[1])
            micro_batch = slot // self.table.slots_per_micro_batch
            task = Task(kind, int(self.pipeline_of[micro_batch]), stage, micro_batch)
            self.fail_missing(name, task)

    def _require_order(self, earlier: np.ndarray, later: np.ndarray) -> None:
        """Where both tables have a task, the first one's must precede the second's on their worker."""
        wrong = (earlier != NONE) & (later != NONE) & (earlier > later)
        for flat in np.flatnonzero(wrong.ravel())[:1]:
            before, after = int(earlier.ravel()[flat]), int(later.ravel()[flat])
            self.fail(f"task {self.task(after)} comes before {self.task(before)}, which it needs", [after, before])

    def check_micro_batches(self) -> None:
        """Forward, recomputation and backward of every micro-batch at every stage once, in this order."""
        forward = self._cover(Kind.FORWARD, name="forward")
        backward = self._cover(*_INPUT_GRADIENT, name="backward")
        weight = self._cover(*_WEIGHT_GRADIENT, name="backward")
        recompute = self._cover(Kind.RECOMPUTE, name="recomputation")
        self._require_all(forward, "forward", Kind.FORWARD)
        self._require_all(backward, "backward", Kind.BACKWARD)
        self._require_all(weight, "weight part of backward", Kind.BACKWARD_WEIGHT)
        recomputes = (recompute != NONE).any(axis=1)
        self._require_all(
            np.where(recomputes[:, None], recompute, 0), "the stage recomputes, but recomputation", Kind.RECOMPUTE
        )
        self._require_order(forward, recompute)
        self._require_order(forward, backward)
        self._require_order(recompute, backward)
        self._require_order(backward, weight)

    def check_updates(self) -> None:
        """Every update of every replica once and in ascending order, after its gradients and their all-reduce."""
        schedule, table = self.schedule, self.table
        shape = (schedule.num_pipelines, schedule.num_stages, schedule.num_updates)
        self.update = self._per_update(Kind.UPDATE, shape, "update")
        reduce = self._per_update(Kind.ALL_REDUCE, shape, "all-reduce")
        replicated = np.array([schedule.num_replicas_of(stage) > 1 for stage in range(schedule.num_stages)])
        needed = np.broadcast_to(replicated[None, :, None], shape)
        for kind, found, expected in (
            (Kind.UPDATE, self.update, np.ones(shape, bool)),
            (Kind.ALL_REDUCE, reduce, needed),
        ):
            name = "update" if kind is Kind.UPDATE else "all-reduce"
            for pipeline, stage, update in np.argwhere((found == NONE) & expected)[:1]:
                task = Task(kind, int(pipeline), int(stage), int(update))
                self.fail_missing(name, task)
        for number in reduce[(reduce != NONE) & ~needed][:1]:
            self.fail(f"all-reduce {self.task(number)} is of a stage that has a single replica", [number])

        gradients = table.of_kind(*_WEIGHT_GRADIENT)
        last_gradient = np.full(shape, NONE)
        where = (
            table.pipeline[gradients],
            table.stage[gradients],
            table.micro_batch[gradients] // schedule.update_period,
        )
        np.maximum.at(last_gradient, where, gradients)
        self._require_order(last_gradient, self.update)
        self._require_order(last_gradient, reduce)
        self._require_order(reduce, self.update)
        self._require_order(self.update[:, :, :-1], self.update[:, :, 1:])

    def _per_update(self, kind: Kind, shape: tuple[int, ...], name: str) -> np.ndarray:
        table = self.table
        numbers = table.of_kind(kind)
        where = (table.pipeline[numbers], table.stage[numbers], table.micro_batch[numbers])
        owner = np.full(shape, NONE)
        owner[where] = numbers
        for number in numbers[owner[where] != numbers][:1]:
            other = owner[tuple(column[number] for column in (table.pipeline, table.stage, table.micro_batch))]
            self.fail(f"{name} {self.task(number)} is done twice", [number, other])
        return owner

    def check_versions(self) -> None:
        """The version that a task uses has been made before on its worker."""
        schedule, table = self.schedule, self.table
        compute = np.flatnonzero(table.kind < Kind.ALL_REDUCE)
        delays = np.array(schedule.delays)
        version = table.micro_batch[compute] // schedule.update_period - delays[table.stage[compute]]
        compute, version = compute[version > 0], version[version > 0]
        maker = self.update[table.pipeline[compute], table.stage[compute], version - 1]
        for number in compute[maker > compute][:1]:
            task = self.task(number)
            wanted = schedule.version_of(task)
            self.fail(
                f"task {task} uses version {wanted} of its weights before update {wanted - 1} has made it",
                [number, self.update[task.pipeline, task.stage, wanted - 1]],
            )

    def check_progress(self) -> None:
        """A dry run reaches the end of every list."""
        schedule, table = self.schedule, self.table
        unit = Times.of(schedule.num_stages, forward=1, backward=1, backward_input=0.5)
        cursors = execute(schedule, table, unit).cursors
        stuck = [cursor for cursor, stop in zip(cursors, table.offsets[1:].tolist()) if cursor < stop]
        if stuck:
            waits = ", ".join(
                f"worker {table.locate(cursor)[0]} at {self.task(cursor)}" for cursor in stuck[:_SHOWN_STUCK]
            )
            more = f" and {len(stuck) - _SHOWN_STUCK} more" if len(stuck) > _SHOWN_STUCK else ""
            self.fail(f"deadlock: {waits}{more} wait for each other", stuck)

    def check_memory(self) -> None:
        schedule = self.schedule
        if schedule.activation_limits is None:
            return
        for worker, (alive, limit) in enumerate(zip(activations_alive(schedule), schedule.activation_limits)):
            beyond = np.flatnonzero(alive > limit)
            if len(beyond):
                self.fail(
                    f"worker {worker} holds the activations of {alive.max():g} micro-batches at its peak, "
                    f"its limit is {limit:g}",
                    [self.table.offsets[worker] + beyond[0]],
                )


_SHOWN_STUCK = 4
