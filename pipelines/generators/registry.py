"""The families of schedules by name, and :func:`generate`, which checks its arguments and validates its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autoddl.costmodel.limits import MAX_DEVICES, MAX_PASSES, MAX_STAGES
from autoddl.costmodel.suggestions import unknown

from ..schedule import Schedule
from ..validate import validate
from . import chimera, gems, gpipe, interleaved, one_f_one_b, pipedream, wpipe, zero_bubble
from .draft import GeneratorError, ScheduleFamily, check_at_least
from .passes import EAGER_SYNC_OPT, check_all_reduce_policy, finish

__all__ = ["FAMILIES", "families", "generate"]

FAMILIES: Mapping[str, ScheduleFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            gpipe.GPIPE,
            gpipe.GROUPED_GPIPE,
            one_f_one_b.ONE_F_ONE_B,
            gems.GEMS,
            pipedream.PIPEDREAM,
            pipedream.PIPEDREAM_2BW,
            chimera.CHIMERA,
            wpipe.WPIPE,
            interleaved.INTERLEAVED,
            zero_bubble.ZERO_BUBBLE,
        )
    }
)

#: Default number of update periods of an asynchronous schedule: enough for every weight version to be alive.
STEADY_ITERATIONS = 4


def families() -> tuple[ScheduleFamily, ...]:
    """All families, each with its name, a one-line summary and its options."""
    return tuple(FAMILIES.values())


def generate(
    name: str,
    *,
    num_stages: int,
    num_micro_batches: int,
    iterations: int | None = None,
    width: int | Sequence[int] = 1,
    recompute: bool = False,
    all_reduce: str = EAGER_SYNC_OPT,
    activation_limit: float | None = None,
    most_passes: int = MAX_PASSES,
    validates: bool = True,
    **options: Any,
) -> Schedule:
    """Generate a schedule of a family and validate it.

    Args:
        name: a family of :func:`families`.
        num_stages: the pipeline's depth D, which is its number of workers. Families with several groups of stages per
            worker cut the model into ``groups * D`` stages.
        num_micro_batches: N, per worker and iteration; for asynchronous families with accumulation, per weight update.
        iterations: number of repetitions of the N micro-batches; by default 1, and 4 for asynchronous families, which
            need several to reach their steady state.
        width: number of devices that each worker's stages are replicated on (data parallelism): one number, or one per
            worker.
        recompute: recompute activations before each backward.
        all_reduce: when gradients are reduced over replicas: ``none`` (after all compute), ``eager`` (as soon as a
            stage's last backward is done), ``eager-sync-opt`` (eager if a bubble follows on that worker).
        activation_limit: the most micro-batches whose activations a worker may hold; more is an error.
        most_passes: upper bound of the number of (micro-batch, stage) passes; each takes about 10 us and 1 kB.
        validates: whether to validate the result, which takes a third of the time.
        options: options of the family.

    Raises:
        GeneratorError: naming the argument that does not fit.
        InvalidScheduleError: if the result breaks a rule, such as the activation limit.

    >>> print(*generate("1f1b", num_stages=2, num_micro_batches=2).workers[1])
    1F0 1B0 1F1 1B1 1U0
    """
    if name not in FAMILIES:
        raise GeneratorError(str(unknown("schedule", name, tuple(FAMILIES))))
    family = FAMILIES[name]
    check_at_least("num_stages", num_stages, 1)
    check_at_least("num_micro_batches", num_micro_batches, 1)
    if iterations is None:
        iterations = 1 if family.synchronous else STEADY_ITERATIONS
    check_at_least("iterations", iterations, 1)
    groups = options.get("groups")
    groups = groups if isinstance(groups, int) and groups > 1 else 1
    passes = num_stages * groups * num_micro_batches * iterations
    if passes > most_passes:
        factors = f"num_stages x {'groups x ' if groups > 1 else ''}num_micro_batches x iterations"
        raise GeneratorError(f"{factors} is {passes:,}; give at most {most_passes:,}: the pattern repeats long before")
    if num_stages * groups > MAX_STAGES:
        factors = "num_stages x groups" if groups > 1 else "num_stages"
        raise GeneratorError(f"{factors} is {num_stages * groups:,}; give at most {MAX_STAGES:,}")
    widths = (width,) * num_stages if isinstance(width, int) else tuple(width)
    if len(widths) != num_stages:
        raise GeneratorError(f"width has {len(widths)} numbers; give one, or {num_stages}, one per worker")
    for one in widths:
        check_at_least("width", one, 1)
    if sum(widths) > MAX_DEVICES:
        raise GeneratorError(f"width makes {sum(widths):,} devices; give at most {MAX_DEVICES:,}")
    check_all_reduce_policy(all_reduce)
    given = {option: value for option, value in options.items() if value is not None}
    if not family.synchronous:
        draft = family.draft(num_stages, num_micro_batches, {**given, "iterations": iterations})
    else:
        draft = family.draft(num_stages, num_micro_batches, given)
    schedule = finish(
        name,
        draft,
        repeats=iterations if family.synchronous else 1,
        widths=widths,
        recompute=recompute,
        all_reduce=all_reduce,
        activation_limit=activation_limit,
    )
    if validates:
        validate(schedule)
    return schedule
