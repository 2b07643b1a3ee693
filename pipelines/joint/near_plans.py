"""Better plans near a good one: in its setting, and in settings that differ from it in one respect.

A setting *near* another one has the same division of the devices and either another schedule of the same stages, or half or twice
the micro-batch.  A good plan often has a better one there: grouped GPipe, for example, waits less than interleaved 1F1B, where its
activations fit.  Settings with half or twice as many groups of stages have other stages, and are searched when no near one is left:
more groups fill the pipeline sooner, but every boundary between them is crossed by all activations.  The search in a setting is
that of :meth:`.setting_search.SettingSearch.improve`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from autoddl.costmodel.stopping import StopRequestedError

from ..planners import Clock, Patience
from .configuration import PipelineSchedule
from .evaluation import Evaluation
from .explorer import Explorer, Setting, setting_of
from .first_bounds import estimate_by_simulation
from .setting_search import SettingSearch, UnsettledError

__all__ = ["improve_near", "near_settings", "regrouped_settings"]

#: A setting near that of the best plan is searched if its estimated step is below this multiple of the plan's.
_PROMISING = 1.05


def improve_near(
    explorer: Explorer,
    plan: Evaluation,
    limit: Clock,
    least_s: float,
    until_first_s: float,
    tell: Callable[[float], None] = lambda better_s: None,
    least_gain: float = 0.0,
    nearby: Callable[[Setting], Iterable[Setting]] = lambda setting: (),
    farther: Callable[[Setting], Iterable[Setting]] = lambda setting: (),
) -> Evaluation:
    """Return the best plan that is found in the setting of a good plan, and in settings near it; else the plan itself.

    Args:
        explorer: The tables and prices of the model on the cluster.
        plan: A plan with a synchronous schedule.
        limit: When to end the search.
        least_s: Seconds of processor time that each setting gets at least.  After a better plan the search of a setting goes on for
            as long as it had needed for that one.
        until_first_s: Seconds of processor time, at most, until the first better plan in the setting of the given one, whatever the
            limit.  As long as no better plan is found in another setting, it gets no more time than this one took.
        tell: Called with the cost of each better plan.
        least_gain: Part of the cost by which a plan must be better than the one before for the search of its setting to go on.
        nearby: The settings near one: those near the setting of the plan are searched, and those near one that has a better plan,
            the most promising one first.
        farther: Settings that are searched when no near one is left.
    """
    best, best_s = plan, plan.cost(explorer.pricing.objective)
    first = setting_of(plan.configuration)
    queue, later, seen = [(0.0, first)], list[Setting](), {first}
    while (queue or later) and not limit.is_over:
        if not queue:
            queue, later = _promising(_estimates(explorer, later, best_s, limit), best_s), []
            continue
        (_, setting), took = queue.pop(0), Clock()
        patience = Patience(limit.left_s, least_s, limit.stop, until_first_s)
        better = _improved(explorer, setting, best, patience, tell, least_gain)
        if setting == first:
            until_first_s = max(least_s, took.spent_s)
        elif better is None:
            continue
        best = better or best
        best_s = best.cost(explorer.pricing.objective)
        new, far = ([one for one in others(setting) if one not in seen] for others in (nearby, farther))
        seen.update(new, far)
        queue, later = _promising([*queue, *_estimates(explorer, new, best_s, limit)], best_s), later + far
    return best


def _improved(
    explorer: Explorer,
    setting: Setting,
    plan: Evaluation,
    patience: Patience,
    tell: Callable[[float], None],
    least_gain: float,
) -> Evaluation | None:
    """A plan of a setting that is better than a given one, with the same numbers of units, if it has as many stages, or others;
    None if none is found."""
    if explorer.memory_demand(setting.schedule) is None:
        return None
    known_s = plan.cost(explorer.pricing.objective)
    renewed_s = math.inf  # the first better plan ends the time until there is one, however little it gains

    def renew(better_s: float) -> None:
        nonlocal renewed_s
        if better_s < renewed_s * (1 - least_gain):
            patience.renew()
            renewed_s = better_s
        tell(better_s)

    search = SettingSearch(explorer, setting, known_s, patience)
    search.incumbent.tell = renew
    try:
        with explorer.stop.until(patience):
            sizes = [stage.num_units for stage in plan.configuration.stages]
            search.improve(sizes)
            if search.best is None and len(sizes) != setting.schedule.num_stages:
                search.run()  # the cut of the plan was of no use
    except (UnsettledError, StopRequestedError):
        pass
    return search.best


def _promising(estimates: Iterable[tuple[float, Setting]], best_s: float) -> list[tuple[float, Setting]]:
    """The settings that may have a plan better than ``best_s`` by their estimates, the least one first."""
    return sorted((one for one in estimates if one[0] < _PROMISING * best_s), key=lambda one: one[0])


def _estimates(
    explorer: Explorer, settings: Iterable[Setting], best_s: float, limit: Clock
) -> list[tuple[float, Setting]]:
    """The settings with estimates of their steps, as far as the limit allows; infinite if none can be better than ``best_s``."""
    estimates = list[tuple[float, Setting]]()
    try:
        with explorer.stop.until(limit):
            for setting in settings:
                if explorer.memory_demand(setting.schedule) is not None:
                    estimates.append((estimate_by_simulation(explorer, setting, 0.0, best_s), setting))
    except StopRequestedError:
        pass
    return estimates


def near_settings(explorer: Explorer, is_micro_batch_free: bool, setting: Setting) -> Iterator[Setting]:
    """Iterate over the settings near one.

    Args:
        explorer: The tables and prices of the model on the cluster.
        is_micro_batch_free: Whether the micro-batch may change.
        setting: A setting with a synchronous schedule.
    """
    spec, size = setting.schedule, setting.micro_batch

    def has_same_stages(other: PipelineSchedule) -> bool:
        return (other.num_workers, other.groups, other.num_pipelines) == (
            spec.num_workers,
            spec.groups,
            spec.num_pipelines,
        )

    def is_same_kind(other: PipelineSchedule) -> bool:
        return replace(other, num_micro_batches=spec.num_micro_batches) == spec

    near = [explorer.settings(size, False, has_same_stages)]
    for other_size in (size // 2, 2 * size) if is_micro_batch_free else ():
        if other_size and explorer.workload.batch % other_size == 0:
            near.append(explorer.settings(other_size, False, is_same_kind))
    return (one for one in chain.from_iterable(near) if one.mesh == setting.mesh and one != setting)


def regrouped_settings(explorer: Explorer, setting: Setting) -> Iterator[Setting]:
    """Iterate over the settings that differ from one with a single pipeline by having half or twice as many groups of stages.

    Args:
        explorer: The tables and prices of the model on the cluster.
        setting: A setting with a synchronous schedule.
    """
    spec = setting.schedule

    def is_regrouped(other: PipelineSchedule) -> bool:
        has_one_pipeline = spec.num_pipelines == other.num_pipelines == 1
        is_wanted = 2 * other.groups == spec.groups or other.groups == 2 * spec.groups
        return has_one_pipeline and is_wanted and other.num_workers == spec.num_workers

    settings = explorer.settings(setting.micro_batch, False, is_regrouped)
    return (one for one in settings if one.mesh == setting.mesh)
