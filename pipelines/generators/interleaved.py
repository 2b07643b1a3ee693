"""Interleaved 1F1B: several chunks of the model on each worker (Megatron-LM's virtual pipeline).

With v chunks, worker w has the stages w, w + D, ..., w + (v - 1) D. The k-th forward of a worker is of the chunk
(k mod D v) // D and of the micro-batch (k // D v) D + k mod D: D micro-batches pass through each chunk in turn. Backwards
follow the same order with the chunks reversed. The number of micro-batches must therefore be a multiple of D. Per worker w:

1. min(v M, 2 (D - 1 - w) + (v - 1) D) forwards
2. one forward, one backward, until the forwards are used up
3. the remaining backwards

The bubble is 1/v of 1F1B's: the makespan is (M + (D - 1)/v)(F + B) with F/v and B/v per stage.
"""

from __future__ import annotations

from ..schedule import Task
from .draft import GeneratorError, ScheduleDraft, ScheduleFamily, backward, check_at_least, forward, round_robin

__all__ = ["INTERLEAVED"]


def _interleaved(num_stages: int, num_micro_batches: int, groups: int = 2) -> ScheduleDraft:
    check_at_least("groups", groups, 1)
    if num_micro_batches % num_stages:
        raise GeneratorError(
            f"num_micro_batches is {num_micro_batches}; interleaved-1f1b needs a multiple of the {num_stages} workers"
        )
    total = groups * num_micro_batches
    workers: list[list[Task]] = []
    for worker in range(num_stages):
        order = []
        for k in range(total):
            turn, within = divmod(k, num_stages * groups)
            order.append((within // num_stages, turn * num_stages + within % num_stages))
        forwards = [forward(chunk * num_stages + worker, m) for chunk, m in order]
        backwards = [backward((groups - 1 - chunk) * num_stages + worker, m) for chunk, m in order]
        warm_up = min(total, 2 * (num_stages - 1 - worker) + (groups - 1) * num_stages)
        tasks = forwards[:warm_up]
        for next_forward, next_backward in zip(forwards[warm_up:], backwards):
            tasks += (next_forward, next_backward)
        workers.append(tasks + backwards[total - warm_up :])
    return ScheduleDraft(
        num_stages=groups * num_stages,
        num_micro_batches=num_micro_batches,
        placement=(round_robin(num_stages, groups),),
        workers=tuple(workers),
        update_period=num_micro_batches,
        delays=(0,) * (groups * num_stages),
    )


INTERLEAVED = ScheduleFamily(
    "interleaved-1f1b",
    "1F1B with several groups of stages per worker, N a multiple of D; 1/v of 1F1B's bubble, more activations and crossings",
    _interleaved,
    options={"groups": "stages per worker, v (default 2)"},
)
