"""1F1B with flush (DAPPLE's early backward).

Per stage i, with K_i warm-up forwards:

1. K_i forwards
2. M - K_i times one backward, one forward
3. K_i backwards

K_i is min(S - i, L) under policy A and min(2 (S - i) - 1, L) under policy B (for transfers comparable to compute), where L
is the number of micro-batches that fit in memory; or K_i is given. At most K_i micro-batches are alive, whatever M is. K
must not grow from a stage to the next one: stage i + 1 would wait for forwards that stage i never runs.

S = 3, M = 4, policy A, unit times (F2: forward of micro-batch 2)::

    worker 0:  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    worker 1:  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    worker 2:  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""

from __future__ import annotations

from collections.abc import Sequence

from ..schedule import Task
from .draft import GeneratorError, ScheduleDraft, ScheduleFamily, backward, check_at_least, forward, round_robin

__all__ = ["ONE_F_ONE_B", "one_forward_one_backward", "warm_ups"]


def warm_ups(
    num_stages: int,
    num_micro_batches: int,
    policy: str = "A",
    max_in_flight: int | None = None,
    warm_up: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """K_i of every stage by DAPPLE's policies (see the module's docstring), at most the number of micro-batches.

    Args:
        num_stages: S.
        num_micro_batches: M.
        policy: A or B.
        max_in_flight: L; None: no bound.
        warm_up: K_i of every stage, instead of a policy.

    >>> warm_ups(3, 8), warm_ups(3, 8, policy="B")
    ((3, 2, 1), (5, 3, 1))

    Raises:
        GeneratorError: for an unknown policy, a memory bound below 1, or a ``warm_up`` that grows or has a wrong length.
    """
    if max_in_flight is not None:
        check_at_least("max_in_flight", max_in_flight, 1)
    if warm_up is None:
        if policy not in ("A", "B"):
            raise GeneratorError(f"policy is {policy!r}; give A or B")
        wanted = [num_stages - i if policy == "A" else 2 * (num_stages - i) - 1 for i in range(num_stages)]
    else:
        wanted = list(warm_up)
        if len(wanted) != num_stages:
            raise GeneratorError(f"warm_up has {len(wanted)} numbers; give {num_stages}, one per stage")
        for stage, count in enumerate(wanted):
            check_at_least(f"warm_up of stage {stage}", count, 1)
    limit = num_micro_batches if max_in_flight is None else min(num_micro_batches, max_in_flight)
    counts = tuple(min(count, limit) for count in wanted)
    for stage, (here, after) in enumerate(zip(counts, counts[1:])):
        if here < after:
            raise GeneratorError(
                f"warm_up is {here} at stage {stage} and {after} at stage {stage + 1}; it must not grow along the stages"
            )
    return counts


def one_forward_one_backward(stage: int, num_micro_batches: int, warm_up: int, pipeline: int = 0) -> list[Task]:
    """The tasks of one stage: warm-up, steady state, cool-down."""
    forwards = [forward(stage, m, pipeline) for m in range(num_micro_batches)]
    backwards = [backward(stage, m, pipeline) for m in range(num_micro_batches)]
    tasks = forwards[:warm_up]  # warm-up
    # Steady state: one backward, one forward.
    for late_forward, early_backward in zip(forwards[warm_up:], backwards):
        tasks += (early_backward, late_forward)
    return tasks + backwards[num_micro_batches - warm_up :]  # cool-down


def _one_f_one_b(
    num_stages: int,
    num_micro_batches: int,
    policy: str = "A",
    max_in_flight: int | None = None,
    warm_up: Sequence[int] | None = None,
) -> ScheduleDraft:
    counts = warm_ups(num_stages, num_micro_batches, policy, max_in_flight, warm_up)
    return ScheduleDraft(
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        placement=(round_robin(num_stages),),
        workers=tuple(one_forward_one_backward(i, num_micro_batches, counts[i]) for i in range(num_stages)),
        update_period=num_micro_batches,
        delays=(0,) * num_stages,
    )


ONE_F_ONE_B = ScheduleFamily(
    "1f1b",
    "DAPPLE's early backward: K_i forwards, then one backward, one forward; GPipe's bubble, activations of K_i micro-batches",
    _one_f_one_b,
    options={
        "policy": "A: K_i = min(S-i, L); B: min(2(S-i)-1, L), for slow boundaries (default A)",
        "max_in_flight": "L, the micro-batches that fit in memory (default: no bound)",
        "warm_up": "K_i outright, one number per stage",
    },
)
