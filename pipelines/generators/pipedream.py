"""PipeDream and PipeDream-2BW: 1F1B without a flush.

Per stage s, with K = min(D - s, total) warm-up forwards:

1. K forwards
2. one backward, one forward, until the forwards are used up
3. K backwards

PipeDream updates after every backward. Micro-batch m's forward at stage s sees the updates of the m - (D - 1 - s)
micro-batches whose backwards precede it, and its backward uses the same weights as its forward: stage s keeps D - s
versions. PipeDream-2BW accumulates the gradients of M >= D micro-batches per update, and all micro-batches of period t
use version t - 1: w(t+1) = w(t) - lr grad f(w(t-1)), two versions.
"""

from __future__ import annotations

from .draft import ScheduleDraft, ScheduleFamily, check_at_least, round_robin
from .one_f_one_b import one_forward_one_backward

__all__ = ["PIPEDREAM", "PIPEDREAM_2BW"]


def _unflushed(num_stages: int, total: int, period: int, delays: tuple[int, ...]) -> ScheduleDraft:
    return ScheduleDraft(
        num_stages=num_stages,
        num_micro_batches=total,
        placement=(round_robin(num_stages),),
        workers=tuple(
            one_forward_one_backward(stage, total, min(num_stages - stage, total)) for stage in range(num_stages)
        ),
        update_period=period,
        delays=delays,
    )


def _pipedream(num_stages: int, num_micro_batches: int, iterations: int) -> ScheduleDraft:
    delays = tuple(num_stages - 1 - stage for stage in range(num_stages))
    return _unflushed(num_stages, num_micro_batches * iterations, period=1, delays=delays)


def _pipedream_2bw(num_stages: int, num_micro_batches: int, iterations: int) -> ScheduleDraft:
    check_at_least(
        "num_micro_batches", num_micro_batches, num_stages, ", the number of stages: pipedream-2bw needs N >= D"
    )
    return _unflushed(num_stages, num_micro_batches * iterations, period=num_micro_batches, delays=(1,) * num_stages)


PIPEDREAM = ScheduleFamily(
    "pipedream",
    "asynchronous 1F1B, an update after every micro-batch; no bubble, up to D stashed weight versions",
    _pipedream,
    synchronous=False,
)
PIPEDREAM_2BW = ScheduleFamily(
    "pipedream-2bw",
    "asynchronous 1F1B, an update every N >= D micro-batches with a delay of one; no bubble, 2 weight versions",
    _pipedream_2bw,
    synchronous=False,
)
