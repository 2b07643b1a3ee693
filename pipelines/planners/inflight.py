"""The number of micro-batches in flight, per stage of each worker.

A micro-batch of a stage is in flight from the start of its forward to the end of its backward (of its weight part if the
backward is split), whether its activations are kept or recomputed.
"""

from __future__ import annotations

import numpy as np

from ..schedule import Kind, Schedule
from ..tasktable import tabulate

__all__ = ["in_flight"]


def in_flight(schedule: Schedule) -> tuple[dict[tuple[int, int], float], ...]:
    """Per worker, for each (pipeline, stage) on it, the most micro-batches in flight at once; O(tasks).

    >>> from autoddl.pipelines import generate
    >>> in_flight(generate("1f1b", num_stages=2, num_micro_batches=4))
    ({(0, 0): 2.0}, {(0, 1): 1.0})
    """
    table = tabulate(schedule)
    size = table.num_slots / table.slots_per_micro_batch
    frees = (table.kind == Kind.BACKWARD_WEIGHT) | (table.kind == Kind.BACKWARD)
    taken = np.where(table.kind == Kind.FORWARD, size, 0.0)
    freed = np.where(frees, size, 0.0)
    key = table.pipeline * schedule.num_stages + table.stage
    found = []
    for worker in range(schedule.num_workers):
        rows = slice(int(table.offsets[worker]), int(table.offsets[worker + 1]))
        peaks = {}
        for pipeline, stage in schedule.stages_on(worker):
            own = key[rows] == pipeline * schedule.num_stages + stage
            alive = np.cumsum(taken[rows][own]) - np.concatenate([[0.0], np.cumsum(freed[rows][own])])[:-1]
            peaks[pipeline, stage] = float(alive.max(initial=0.0))
        found.append(peaks)
    return tuple(found)
