"""Making a plan small enough for the ranks and the machine at hand, with what its stages decide kept.

1. *Ranks.*  Where there are fewer ranks than the plan has devices, stages in the middle are left out with their blocks, as few as
   it takes: the first and the last one stay, with all layers that are in no block.  No stage changes its strategies, its
   recomputation or its width.  A plan without a pipeline has one stage, which needs all of its ranks.
2. *The schedule* is generated anew for the workers that are left; where time is short, of fewer micro-batches too, the fewest that
   divide the plan's number and are twice as many as workers (of one stage: two).
3. *Sizes* shrink (`scaling`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import counted
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.runtime.pipeline.slots import slots_per_micro_batch
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.pipelines.schedule import Schedule

from ..planfile import PlanFile
from ..staging import make_schedule, scheduling, stage_plans
from ..zoo.builtin import BuiltIn
from .scaling import Change, Limits, Scaled, Staging, scale, without_stages
from .task import NUM_STEPS

__all__ = ["FittedPlan", "chosen_workers", "fit_plan", "in_float32"]


@dataclass(frozen=True)
class FittedPlan:
    """What is run in a plan's place.

    Attributes:
        scaled: the model, its strategies and its workload, of one update.
        stages, schedule: of a single update where the schedule is synchronous, else of `NUM_STEPS` at least.
        is_applied: whether the plan has no pipeline, so that `autoddl.apply` runs it.
    """

    scaled: Scaled
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    is_applied: bool


@dataclass(frozen=True)
class _Workers:
    """Which of the plan's stages are left, and what carries them out."""

    kept: tuple[int, ...]
    of: PipelineSchedule
    widths: tuple[int, ...]
    recomputing: tuple[bool, ...]

    def schedule(self, num_micro_batches: int) -> Schedule:
        """Of one update where it is synchronous, else of `NUM_STEPS` or, where one iteration has more, of these."""
        of = replace(self.of, num_micro_batches=num_micro_batches)
        once = make_schedule(of, self.widths, self.recomputing, 1)
        if once.is_synchronous or once.num_updates >= NUM_STEPS:
            return once
        return make_schedule(of, self.widths, self.recomputing, NUM_STEPS)


def fit_plan(plan: PlanFile, num_ranks: int, limits: Limits, built_in: BuiltIn | None) -> FittedPlan:
    """The plan on so many ranks, within the limits.

    Raises:
        UserError: it cannot be brought to so many ranks, or is too large.
    """
    stages, workers = stage_plans(plan), _workers(plan, num_ranks, built_in)
    num_micro_batches = workers.of.num_micro_batches
    schedule = _fitting(workers, (num_micro_batches, *_multiples(num_micro_batches, len(workers.widths))))
    if schedule is None:
        raise _not_on(plan, num_ranks, f"{workers.of.name} has no schedule of {len(workers.widths)} workers")
    few = _fitting(workers, _multiples(num_micro_batches, len(workers.widths))) or schedule
    graph, strategies, built_in, stage_of = _left(plan, stages, workers, num_ranks, built_in)
    size = plan.workload.micro_batch
    recompute = all(stage.recompute for stage in stages)
    workload = replace(in_float32(plan.workload), batch=size * schedule.update_period, recompute=recompute)
    staging = Staging(
        stage_of,
        _entries(stages, workers.kept),
        num_ranks,
        max(slots_per_micro_batch(schedule), slots_per_micro_batch(few)),
        min(few.update_period, schedule.update_period),
    )
    scaled = scale(graph, strategies, workload, limits, built_in, staging)
    if scaled.workload.num_micro_batches != schedule.update_period:
        schedule = few
    changes = list(scaled.changes)
    if len(workers.kept) < len(stages):
        changes.insert(0, Change("stages", str(len(stages)), str(len(workers.kept))))
        blocks = [len({layer.block_index for layer in g.layers if layer.block}) for g in (plan.graph, scaled.graph)]
        changes = [change for change in changes if change.what != "blocks"]
        changes.insert(1, Change("blocks", *map(str, blocks)))
    if schedule.update_period != plan.workload.num_micro_batches:
        before, after = plan.workload.num_micro_batches, schedule.update_period
        changes.append(Change("micro-batches", str(before), str(after)))
    return FittedPlan(
        replace(scaled, changes=tuple(changes)),
        _stages(scaled, [stages[number] for number in workers.kept]),
        schedule,
        is_applied=not plan.has_pipeline,
    )


def in_float32(workload: Workload) -> Workload:
    """The workload that runs on CPU ranks."""
    return replace(workload, precision="float32")


# ---- Ranks -----------------------------------------------------------------------------------------------------------------


def _workers(plan: PlanFile, num_ranks: int, built_in: BuiltIn | None) -> _Workers:
    """The plan's own, or as many of them as there are ranks for."""
    of, widths, recomputing = scheduling(plan)
    if sum(widths) == num_ranks:
        return _Workers(tuple(range(of.num_stages)), of, widths, recomputing)
    if len(widths) == 1 or not 0 < num_ranks <= sum(widths):
        nodes, per_node = plan.cluster.num_nodes, plan.cluster.devices_per_node
        raise UserError(
            f"the plan is for {counted(sum(widths), 'device')} ({counted(nodes, 'node')} of {per_node}), "
            f"not for ranks={num_ranks}; give ranks={sum(widths)}, or plan for fewer devices"
        )
    chosen = chosen_workers(widths, num_ranks)
    if chosen is None:
        least = widths[0] + widths[-1]
        raise _not_on(plan, num_ranks, f"two of its {len(widths)} workers take {least}" if least > num_ranks else "")
    if of.groups > 1 or of.num_pipelines > 1:
        # A worker has several stages, which have its width.
        if len(set(widths)) > 1:
            raise _not_on(plan, num_ranks, "its workers are of different widths and have several stages each")
        kept = _spread(of.num_stages, of.groups * len(chosen))
    else:
        kept = chosen
    fewer = replace(of, num_workers=len(chosen))
    return _Workers(kept, fewer, tuple(widths[i] for i in chosen), tuple(recomputing[stage] for stage in kept))


def chosen_workers(widths: tuple[int, ...], num_ranks: int) -> tuple[int, ...] | None:
    """By number, the first and the last worker and as many between them as make up the ranks; None where none do."""
    if len(widths) < 2:
        return None
    if len(set(widths)) == 1:
        count = num_ranks // widths[0]
        return _spread(len(widths), count) if 2 <= count <= len(widths) and num_ranks % widths[0] == 0 else None
    most: dict[int, tuple[int, ...]] = {widths[0] + widths[-1]: ()}
    for worker in range(1, len(widths) - 1):
        for total, members in list(most.items()):
            longer = (*members, worker)
            if len(most.get(total + widths[worker], ())) < len(longer):
                most[total + widths[worker]] = longer
    return (0, *most[num_ranks], len(widths) - 1) if num_ranks in most else None


def _spread(count: int, num_kept: int) -> tuple[int, ...]:
    """So many of ``count`` numbers, evenly apart, the first and the last among them."""
    return tuple(i * (count - 1) // (num_kept - 1) for i in range(num_kept))


def _left(
    plan: PlanFile, stages: tuple[StagePlan, ...], workers: _Workers, num_ranks: int, built_in: BuiltIn | None
) -> tuple[LayerGraph, Mapping[str, Strategy], BuiltIn | None, Mapping[str, int]]:
    """The model of the stages that are left: its graph, strategies, how it is built, and the stage of each layer."""
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage.strategies}
    if len(workers.kept) == len(stages):
        return plan.graph, plan.strategies, built_in, stage_of
    staging = Staging(stage_of, _entries(stages, range(len(stages))), num_ranks)
    found = built_in and without_stages(plan.graph, plan.strategies, plan.workload, built_in, staging, workers.kept)
    if not found:
        raise _not_on(
            plan, num_ranks, "stages can be left out where the others are whole blocks of a built-in transformer"
        )
    return found.graph, found.strategies, found.built_in, found.stage_of


def _not_on(plan: PlanFile, num_ranks: int, why: str) -> UserError:
    widths = scheduling(plan)[1]
    each = f"{len(widths)} workers of {', '.join(map(str, sorted(set(widths))))}"
    reason = f" ({why})" if why else ""
    return UserError(
        f"the plan's pipeline has {counted(sum(widths), 'device')} in {each}, which cannot be brought to {num_ranks} ranks with "
        f"the strategies kept{reason}; give ranks={sum(widths)}, or plan for fewer devices"
    )


# ---- The schedule and the stages -----------------------------------------------------------------------------------------------


def _multiples(num_micro_batches: int, num_workers: int) -> tuple[int, ...]:
    """Divisors of the number of micro-batches from twice the number of workers on, the least first; one worker takes any number."""
    if num_workers == 1:
        return (min(2, num_micro_batches),)
    divisors = (n for n in range(2 * num_workers, num_micro_batches + 1) if num_micro_batches % n == 0)
    return tuple(divisors)


def _fitting(workers: _Workers, numbers: Iterable[int]) -> Schedule | None:
    """The schedule of the first of these numbers of micro-batches that there is one of."""
    for number in numbers:
        try:
            return workers.schedule(number)
        except UserError:
            continue
    return None


def _entries(stages: tuple[StagePlan, ...], kept: Iterable[int]) -> dict[int, Strategy]:
    found = {place: stages[number].entry for place, number in enumerate(kept)}
    return {place: entry for place, entry in found.items() if entry is not None}


def _stages(scaled: Scaled, planned: list[StagePlan]) -> tuple[StagePlan, ...]:
    """The stages of the model as it is now."""
    layers: list[dict[str, Strategy]] = [{} for _ in planned]
    for layer in scaled.graph.layers:
        layers[scaled.stage_of[layer.name]][layer.name] = scaled.strategies[layer.name]
    return tuple(replace(stage, strategies=own) for stage, own in zip(planned, layers))
