"""Zero-bubble 1F1B: the backward is split into an input part (I) and a weight part (W), which can be delayed (Qi et al.).

Earlier stages wait only for the input part; weight parts fill the bubbles. Per stage s, with K warm-up forwards and
weight parts that lag L micro-batches behind the input parts:

1. K forwards
2. for j = 0 .. M - 1: input part of j, weight part of j - L if there is one, forward of K + j if there is one
3. L weight parts

H1: K = D - s, L = s. No stage holds more than D micro-batches' activations (as 1F1B's first stage), and for equal times
F = I = W the makespan is 3 M + D - 1 instead of 3 (M + D - 1). H2: K = 2 (D - s) - 1, L = 2 s. Stages hold up to 2 D - 1
micro-batches' activations. From M = 2 D - 1 on there is no bubble between the first and the last task of any worker, so
that further iterations follow without one.
"""

from __future__ import annotations

from ..schedule import Kind, Task
from .draft import GeneratorError, ScheduleDraft, ScheduleFamily, forward, round_robin

__all__ = ["ZERO_BUBBLE"]


def _stage(stage: int, num_micro_batches: int, warm_up: int, lag: int) -> list[Task]:
    tasks = [forward(stage, m) for m in range(warm_up)]
    for m in range(num_micro_batches):
        tasks.append(Task(Kind.BACKWARD_INPUT, 0, stage, m))
        if m >= lag:
            tasks.append(Task(Kind.BACKWARD_WEIGHT, 0, stage, m - lag))
        if warm_up + m < num_micro_batches:
            tasks.append(forward(stage, warm_up + m))
    return tasks + [
        Task(Kind.BACKWARD_WEIGHT, 0, stage, m) for m in range(max(0, num_micro_batches - lag), num_micro_batches)
    ]


def _zero_bubble(num_stages: int, num_micro_batches: int, policy: str = "H1") -> ScheduleDraft:
    if policy not in ("H1", "H2"):
        raise GeneratorError(f"policy is {policy!r}; give H1 (1F1B's memory) or H2 (twice that, no bubble)")
    workers = []
    for stage in range(num_stages):
        depth = num_stages - stage
        warm_up, lag = (depth, stage) if policy == "H1" else (2 * depth - 1, 2 * stage)
        workers.append(_stage(stage, num_micro_batches, min(warm_up, num_micro_batches), lag))
    return ScheduleDraft(
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        placement=(round_robin(num_stages),),
        workers=tuple(workers),
        update_period=num_micro_batches,
        delays=(0,) * num_stages,
    )


ZERO_BUBBLE = ScheduleFamily(
    "zero-bubble",
    "1F1B with the backward split in input and weight parts, which fill the bubbles",
    _zero_bubble,
    options={"policy": "H1: 1F1B's memory, a third of its bubble; H2: twice the memory, no bubble (default H1)"},
)
