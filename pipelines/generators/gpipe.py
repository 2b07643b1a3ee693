"""GPipe: all forwards, then all backwards; and grouped GPipe, with several groups of stages on each worker.

With g groups, worker s holds the stages s, s + D, ..., s + (g - 1) D. Per worker:

1. M forwards of each group, from the first group to the last one
2. M backwards of each group, from the last group to the first one

D = 2, M = 2, g = 2 (``2F0``: stage 2, micro-batch 0), one column per unit of time::

    worker 0: 0F0 0F1 2F0 2F1  .   .  2B0 2B1 0B0 0B1
    worker 1:  .  1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1  .

With M >= D and equal times of F/g and B/g per stage, the makespan is (M + (D - 1)/g)(F + B): the bubble time is 1/g of
GPipe's (D - 1)(F + B), and there are g D - 1 boundary crossings per micro-batch (WPipe's "grouped GPipe").
"""

from __future__ import annotations

from ..schedule import Task
from .draft import ScheduleDraft, ScheduleFamily, backward, check_at_least, forward, round_robin

__all__ = ["GPIPE", "GROUPED_GPIPE"]


def _gpipe(num_stages: int, num_micro_batches: int, groups: int = 1) -> ScheduleDraft:
    check_at_least("groups", groups, 1)
    workers: list[list[Task]] = []
    for worker in range(num_stages):
        stages = range(worker, groups * num_stages, num_stages)
        forwards = [forward(stage, m) for stage in stages for m in range(num_micro_batches)]
        backwards = [backward(stage, m) for stage in reversed(stages) for m in range(num_micro_batches)]
        workers.append(forwards + backwards)
    return ScheduleDraft(
        num_stages=groups * num_stages,
        num_micro_batches=num_micro_batches,
        placement=(round_robin(num_stages, groups),),
        workers=tuple(workers),
        update_period=num_micro_batches,
        delays=(0,) * (groups * num_stages),
    )


def _grouped(num_stages: int, num_micro_batches: int, groups: int = 2) -> ScheduleDraft:
    return _gpipe(num_stages, num_micro_batches, groups)


GPIPE = ScheduleFamily(
    "gpipe", "all forwards, then all backwards; bubble (D-1)/(N+D-1), activations of N micro-batches", _gpipe
)
GROUPED_GPIPE = ScheduleFamily(
    "grouped-gpipe",
    "GPipe with several groups of stages per worker; bubble 1/g of GPipe's, g times the boundary crossings",
    _grouped,
    options={"groups": "stages per worker (default 2)"},
)
