"""The memory that a schedule holds: activations, inputs kept for recomputation, weight versions.

All of it follows from the order of each worker's list; the times do not matter.

- The activations of a micro-batch at a stage live from the start of its forward to the end of its backward (of its
  weight part if the backward is split). A stage that recomputes frees them after the forward, keeps only the stage's
  input, and holds them again from the recomputation on.
- A version of a stage's weights lives from the update that makes it to its last reader: a task that uses it, or the
  next update, which then works in place. The newest version is never freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .schedule import Kind, Schedule
from .tasktable import NONE, TaskTable, tabulate

__all__ = [
    "Lifetime",
    "activations_alive",
    "peak_activations",
    "peak_stashed_inputs",
    "peak_weight_copies",
    "peak_weight_versions",
    "stashed_inputs_alive",
    "version_lifetimes",
    "weight_versions",
]


class Lifetime(NamedTuple):
    """The part of a worker's list over which a version of a stage's weights is alive.

    Attributes:
        worker: that holds it.
        pipeline: of the replica.
        stage: of the weights.
        version: index of the version.
        made_at: index of the update that makes it; -1 for version 0, the initial weights.
        last_needed_at: index of the last task that needs it; the length of the list for the final version. If this is
            the update that makes the next version, that update works in place.
    """

    worker: int
    pipeline: int
    stage: int
    version: int
    made_at: int
    last_needed_at: int


def activations_alive(schedule: Schedule, per_stage: Sequence[float] | None = None) -> tuple[np.ndarray, ...]:
    """Per worker, aligned with its list, the activations alive during each task.

    Args:
        per_stage: size of one micro-batch's activations at each stage, in any unit (bytes, for example); 1 by default, so
            that the result is a number of micro-batches.
    """
    table = tabulate(schedule)
    return _alive(table, *_activation_flow(schedule, table), per_stage)


def peak_activations(schedule: Schedule, per_stage: Sequence[float] | None = None) -> tuple[float, ...]:
    """Per worker, the peak of the activations alive at once; arguments as of :func:`activations_alive`.

    >>> from autoddl.pipelines import generate
    >>> peak_activations(generate("1f1b", num_stages=4, num_micro_batches=8))
    (4, 3, 2, 1)
    """
    return _peaks(activations_alive(schedule, per_stage))


def peak_stashed_inputs(schedule: Schedule, per_stage: Sequence[float] | None = None) -> tuple[float, ...]:
    """Per worker, the peak of the stage inputs kept for recomputation (0 without); arguments as of :func:`activations_alive`."""
    return _peaks(stashed_inputs_alive(schedule, per_stage))


def stashed_inputs_alive(schedule: Schedule, per_stage: Sequence[float] | None = None) -> tuple[np.ndarray, ...]:
    """Per worker, aligned with its list, the stage inputs kept for recomputation; arguments as of :func:`activations_alive`."""
    table = tabulate(schedule)
    recomputes = _recomputing_stages(schedule, table)[table.stage]
    size = table.num_slots / table.slots_per_micro_batch
    kept = np.where((table.kind == Kind.FORWARD) & recomputes, size, 0.0)
    freed = np.where(_frees(table) & recomputes, size, 0.0)
    return _alive(table, kept, freed, per_stage)


def peak_weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """Per worker, the most versions of any one stage's weights alive at once."""
    peaks = [0] * schedule.num_workers
    for (pipeline, stage), versions in weight_versions(schedule).items():
        worker = schedule.placement[pipeline][stage]
        peaks[worker] = max(peaks[worker], versions)
    return tuple(peaks)


def peak_weight_copies(schedule: Schedule) -> tuple[int, ...]:
    """Per worker, the most copies of stage weights alive at once, over all its stages, pipelines and versions."""
    peaks = []
    for worker, lifetimes in enumerate(_by_worker(schedule)):
        peaks.append(_most_alive(lifetimes, len(schedule.workers[worker])))
    return tuple(peaks)


def weight_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """For each (pipeline, stage), the most versions of its weights alive at once."""
    groups: dict[tuple[int, int], list[Lifetime]] = {}
    for lifetime in version_lifetimes(schedule):
        groups.setdefault((lifetime.pipeline, lifetime.stage), []).append(lifetime)
    return {
        key: _most_alive(lifetimes, len(schedule.workers[lifetimes[0].worker])) for key, lifetimes in groups.items()
    }


def version_lifetimes(schedule: Schedule) -> list[Lifetime]:
    """All weight versions that a schedule makes, ordered by pipeline, stage and version."""
    table = tabulate(schedule)
    num_versions = schedule.num_updates + 1
    shape = (schedule.num_pipelines, schedule.num_stages, num_versions)
    # The last compute task that uses each version.
    compute = np.flatnonzero(table.kind < Kind.ALL_REDUCE)
    delays = np.array(schedule.delays)
    version = np.maximum(0, table.micro_batch[compute] // schedule.update_period - delays[table.stage[compute]])
    last_use = np.full(shape, NONE)
    np.maximum.at(last_use, (table.pipeline[compute], table.stage[compute], version), compute)
    # The update that makes each version.
    made = np.full(shape, NONE)
    updates = table.of_kind(Kind.UPDATE)
    where = (table.pipeline[updates], table.stage[updates])
    after = (*where, table.micro_batch[updates] + 1)
    made[after] = updates
    # The update that makes version t + 1 reads version t; the final version is never freed.
    np.maximum.at(last_use, (*where, table.micro_batch[updates]), updates)
    # From task numbers to indices in the worker's list.
    placement = np.array(schedule.placement)
    begin = table.offsets[placement][:, :, None]
    made_at = np.where(made == NONE, NONE, made - begin)
    last_needed_at = last_use - begin
    last_needed_at[:, :, -1] = np.diff(table.offsets)[placement]
    made_list, last_list = made_at.tolist(), last_needed_at.tolist()
    return [
        Lifetime(
            worker, pipeline, stage, version, made_list[pipeline][stage][version], last_list[pipeline][stage][version]
        )
        for pipeline, workers in enumerate(schedule.placement)
        for stage, worker in enumerate(workers)
        for version in range(num_versions)
    ]


def _by_worker(schedule: Schedule) -> list[list[Lifetime]]:
    result: list[list[Lifetime]] = [[] for _ in range(schedule.num_workers)]
    for lifetime in version_lifetimes(schedule):
        result[lifetime.worker].append(lifetime)
    return result


def _most_alive(lifetimes: list[Lifetime], length: int) -> int:
    """The most lifetimes that overlap. An update that works in place frees one version as it makes the next."""
    change = [0] * (length + 2)
    for lifetime in lifetimes:
        change[lifetime.made_at + 1] += 1
        change[lifetime.last_needed_at + 1] -= 1
    most = alive = 0
    for step in change:
        alive += step
        most = max(most, alive)
    return most


def _recomputing_stages(schedule: Schedule, table: TaskTable) -> np.ndarray:
    flags = np.zeros(schedule.num_stages, dtype=bool)
    flags[table.stage[table.kind == Kind.RECOMPUTE]] = True
    return flags


def _frees(table: TaskTable) -> np.ndarray:
    """A mask of the tasks that are the last readers of activations."""
    return (table.kind == Kind.BACKWARD) | (table.kind == Kind.BACKWARD_WEIGHT)


def _activation_flow(schedule: Schedule, table: TaskTable) -> tuple[np.ndarray, np.ndarray]:
    """Per task, the activations it allocates at its start and frees at its end, in micro-batches."""
    recomputes = _recomputing_stages(schedule, table)[table.stage]
    size = table.num_slots / table.slots_per_micro_batch
    is_forward = table.kind == Kind.FORWARD
    taken = np.where(is_forward | (table.kind == Kind.RECOMPUTE), size, 0.0)
    freed = np.where(_frees(table) | (is_forward & recomputes), size, 0.0)
    return taken, freed


def _alive(
    table: TaskTable, taken: np.ndarray, freed: np.ndarray, per_stage: Sequence[float] | None
) -> tuple[np.ndarray, ...]:
    if per_stage is not None:
        weight = np.array(per_stage, dtype=float)[table.stage]
        taken, freed = taken * weight, freed * weight
    return tuple(
        np.cumsum(taken[begin:end]) - np.concatenate([[0.0], np.cumsum(freed[begin:end])])[:-1]
        for begin, end in zip(table.offsets[:-1], table.offsets[1:])
    )


def _peaks(alive: Sequence[np.ndarray]) -> tuple[float, ...]:
    """The largest entry of each array; whole numbers as ``int``, so that they print without a fraction."""
    values = [float(amounts.max(initial=0.0)) for amounts in alive]
    return tuple(int(value) if value.is_integer() else value for value in values)
