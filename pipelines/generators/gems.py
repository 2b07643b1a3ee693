"""GEMS: two replicas of the model in opposite directions, with at most two micro-batches active (Jain et al., SC 2020).

Even micro-batches run down, odd ones up. A micro-batch's forward follows the previous one's backward along the workers
(both move in the same direction), so that every worker holds the activations of one micro-batch only. Per worker:

1. 1 forward
2. N - 1 times [backward of micro-batch m, forward of m + 1]
3. 1 backward

D = 2, N = 2, unit times::

    worker 0:  0F0  .   .  0B0 1:1F1 1:1B1   .
    worker 1:   .  1F0 1B0 1:0F1  .    .   1:0B1

The makespan is D F + N D B + (N - 1) F for B >= F: each further micro-batch adds D B + F. The bubble ratio is
(D - 1)/(D + 1/2) at B = 2 F.
"""

from __future__ import annotations

from ..schedule import Task
from .draft import GeneratorError, ScheduleDraft, ScheduleFamily, backward, forward, round_robin

__all__ = ["GEMS"]


def _gems(num_stages: int, num_micro_batches: int) -> ScheduleDraft:
    if num_stages % 2:
        raise GeneratorError(
            f"num_stages is {num_stages}; gems needs an even number of stages: otherwise one worker holds both replicas of a stage"
        )
    down = round_robin(num_stages)
    placement = (down, down[::-1])
    workers: list[list[Task]] = []
    for worker in range(num_stages):
        tasks: list[Task] = []
        for micro_batch in range(num_micro_batches):
            pipeline = micro_batch % 2
            stage = placement[pipeline].index(worker)
            tasks += (forward(stage, micro_batch, pipeline), backward(stage, micro_batch, pipeline))
        workers.append(tasks)
    return ScheduleDraft(
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        placement=placement,
        workers=tuple(workers),
        update_period=num_micro_batches,
        delays=(0,) * num_stages,
    )


GEMS = ScheduleFamily(
    "gems",
    "two model replicas in opposite directions, one micro-batch's activations per worker; bubble about (D-1)/(D+1/2)",
    _gems,
)
