"""WPipe's 2GW: two groups of stages per worker, updated in turn (Yang et al., ICLR 2022).

N workers, 2 N stages; worker s has stage s (group G0) and stage s + N (group G1). M >= N micro-batches per update
period. Forwards alternate between M of G0 and M of G1, backwards between M of G1 and M of G0. Per worker s:

1. M + N - 1 - s forwards
2. one forward, one backward, until the forwards are used up
3. the remaining backwards

After each M backwards of a group, only that group is updated. G1 always has the newest weights. G0's forwards of the next
period precede the end of its backwards of the current one, so its weights lag one update behind:
w_Gi(t+1) = w_Gi(t) - lr grad f(w_Gi(t - 1 + i)). This order needs at least N micro-batches.

N = 2, M = 2, the first period and the beginning of the next one (unit times)::

    worker 0: 0F0 0F1 2F0 2F1  .  2B0 0F2 2B1 ...
    worker 1:  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 ...
"""

from __future__ import annotations

from ..schedule import Task
from .draft import ScheduleDraft, ScheduleFamily, backward, check_at_least, forward, round_robin

__all__ = ["WPIPE"]


def _wpipe(num_stages: int, num_micro_batches: int, iterations: int) -> ScheduleDraft:
    check_at_least("num_micro_batches", num_micro_batches, num_stages, ", the number of workers: wpipe needs M >= N")
    workers: list[list[Task]] = []
    periods = [range(t * num_micro_batches, (t + 1) * num_micro_batches) for t in range(iterations)]
    for worker in range(num_stages):
        groups = (worker, worker + num_stages)
        forwards = [forward(stage, m) for period in periods for stage in groups for m in period]
        backwards = [backward(stage, m) for period in periods for stage in reversed(groups) for m in period]
        warm_up = num_micro_batches + num_stages - 1 - worker
        tasks = forwards[:warm_up]
        steady = len(forwards) - warm_up
        for next_forward, next_backward in zip(forwards[warm_up:], backwards):
            tasks += (next_forward, next_backward)
        workers.append(tasks + backwards[steady:])
    return ScheduleDraft(
        num_stages=2 * num_stages,
        num_micro_batches=num_micro_batches * iterations,
        placement=(round_robin(num_stages, groups=2),),
        workers=tuple(workers),
        update_period=num_micro_batches,
        delays=(1,) * num_stages + (0,) * num_stages,
    )


WPIPE = ScheduleFamily(
    "wpipe",
    "two groups of stages per worker updated in turn every M >= D micro-batches (2GW); no bubble, only one group lags by one",
    _wpipe,
    synchronous=False,
)
