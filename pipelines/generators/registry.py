"""The door to all families of schedules: numbers are checked here, and what leaves has passed the validator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autoddl.costmodel.limits import MOST_DEVICES, MOST_PASSES, MOST_STAGES
from autoddl.costmodel.suggestions import unknown

from ..schedule import Schedule
from ..validate import validate
from . import chimera, gems, gpipe, interleaved, one_f_one_b, pipedream, wpipe, zero_bubble
from .draft import Family, GeneratorError, at_least
from .passes import EAGER_SYNC_OPT, check_all_reduce_policy, finish

__all__ = ["FAMILIES", "families", "generate"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
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

STEADY_ITERATIONS = 4
"""Update periods of an asynchronous schedule where none are asked for: enough for every weight version to be alive."""


def families() -> tuple[Family, ...]:
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
    most_passes: int = MOST_PASSES,
    **options: Any,
) -> Schedule:
    """A validated schedule.

    Args:
        name: a family of :func:`families`.
        num_stages: the pipeline's depth D, which is its number of workers. Schemes with several groups of stages per
            worker cut the model in ``groups * D`` stages.
        num_micro_batches: N, per worker and iteration; for asynchronous schemes with accumulation, per weight update.
        iterations: how many times N micro-batches; by default 1, and 4 for asynchronous schemes, which settle only then.
        width: devices that each worker's stages are replicated on: one number W (data parallelism), or one per worker.
        recompute: recompute activations before each backward.
        all_reduce: when gradients are reduced over replicas: ``none`` (after all compute), ``eager`` (as soon as a
            stage's last backward is done), ``eager-sync-opt`` (eager where a bubble follows on that worker).
        activation_limit: the most micro-batches whose activations a worker may hold; more is an error.
        most_passes: of a micro-batch through a stage that may be asked for: they take about 10 us and 1 kB each.
        options: of the family.

    Raises:
        GeneratorError: naming the number that does not fit.
        InvalidScheduleError: where the result breaks a rule, such as the activation limit.
    """
    if name not in FAMILIES:
        raise GeneratorError(str(unknown("schedule", name, tuple(FAMILIES))))
    family = FAMILIES[name]
    at_least("num_stages", num_stages, 1)
    at_least("num_micro_batches", num_micro_batches, 1)
    if iterations is None:
        iterations = 1 if family.synchronous else STEADY_ITERATIONS
    at_least("iterations", iterations, 1)
    groups = options.get("groups")
    groups = groups if isinstance(groups, int) and groups > 1 else 1
    passes = num_stages * groups * num_micro_batches * iterations
    if passes > most_passes:
        factors = f"num_stages x {'groups x ' if groups > 1 else ''}num_micro_batches x iterations"
        raise GeneratorError(f"{factors} is {passes:,}; give at most {most_passes:,}: the pattern repeats long before")
    if num_stages * groups > MOST_STAGES:
        factors = "num_stages x groups" if groups > 1 else "num_stages"
        raise GeneratorError(f"{factors} is {num_stages * groups:,}; give at most {MOST_STAGES:,}")
    widths = (width,) * num_stages if isinstance(width, int) else tuple(width)
    if len(widths) != num_stages:
        raise GeneratorError(f"width has {len(widths)} numbers; give one, or {num_stages}, one per worker")
    for one in widths:
        at_least("width", one, 1)
    if sum(widths) > MOST_DEVICES:
        raise GeneratorError(f"width makes {sum(widths):,} devices; give at most {MOST_DEVICES:,}")
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
    validate(schedule)
    return schedule
