"""A plan as what runs it: the plans of its stages, their schedule, and a model cut so.

A plan without a pipeline is a pipeline of one stage: one worker of all devices, which carries one micro-batch after the other
forward and back (1F1B).

plan = autoddl.load_plan("joint.json")
trainer = PipelineTrainer(planned_model(module, plan), plan.pipeline.schedule, make_optimizer, batch)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.limits import MOST_TRAINING_PASSES
from autoddl.pipelines.generators import generate
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.joint.partition import ENTRY
from autoddl.pipelines.runtime.pipeline.stage_plans import StagePlan
from autoddl.pipelines.schedule import Kind, Schedule

from .planfile import Plan

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.pipeline.planned_model import PlannedModel

__all__ = ["make_schedule", "planned_model", "schedule_of_plan", "scheduling", "stage_plans"]


def stage_plans(plan: Plan) -> tuple[StagePlan, ...]:
    """The plans of a plan's stages, in the order of the model."""
    if plan.pipeline is None:
        return (StagePlan(plan.strategies, plan.workload.recompute),)
    result = []
    for choice in plan.pipeline.configuration.stages:
        strategies = {name: strategy for name, strategy in choice.strategies.items() if name != ENTRY}
        result.append(StagePlan(strategies, choice.recompute == "layers", choice.strategies.get(ENTRY)))
    return tuple(result)


def scheduling(plan: Plan) -> tuple[PipelineSchedule, tuple[int, ...], tuple[bool, ...]]:
    """What a plan's schedule is made from: see `make_schedule`."""
    if plan.pipeline is None:
        return PipelineSchedule("1f1b", 1, plan.workload.num_micro_batches), (plan.cluster.num_devices,), (False,)
    configuration = plan.pipeline.configuration
    recomputing = tuple(choice.recompute == "stage" for choice in configuration.stages)
    return configuration.schedule, plan.pipeline.schedule.widths, recomputing


def schedule_of_plan(plan: Plan, num_steps: int | None = None) -> Schedule:
    """The schedule of a plan: of one step where it is synchronous; else of ``num_steps``, or some."""
    if plan.pipeline is not None and (plan.pipeline.schedule.is_synchronous or num_steps is None):
        return plan.pipeline.schedule
    return make_schedule(*scheduling(plan), num_steps or 1)


def make_schedule(
    of: PipelineSchedule, widths: tuple[int, ...], recomputing: Sequence[bool], num_steps: int
) -> Schedule:
    """A schedule of one step where it is synchronous, else of ``num_steps``.

    Args:
        widths: devices per worker.
        recomputing: per stage whether its forward pass is run again as a task of its own.

    Raises:
        UserError: there is no such schedule.
    """
    options: dict[str, Any] = dict(of.options)
    schedule = generate(
        of.name,
        num_stages=of.num_workers,
        num_micro_batches=of.num_micro_batches,
        iterations=1 if of.synchronous else num_steps,
        width=widths,
        recompute=any(recomputing),
        most_passes=MOST_TRAINING_PASSES,
        **options,
    )
    workers = (
        tuple(task for task in tasks if task.kind is not Kind.RECOMPUTE or recomputing[task.stage])
        for tasks in schedule.workers
    )
    return replace(schedule, workers=tuple(workers))


def planned_model(module: Any, plan: Plan, feeds: Mapping[str, int | None] | None = None) -> PlannedModel:
    """A model cut in the stages of a plan, for a `PipelineTrainer`; on every rank of the job.

    Args:
        module: the unmodified model, on the host, with the same values on every rank.
        feeds: see :func:`autoddl.apply`.
    """
    from autoddl.pipelines.runtime.pipeline.planned_model import PlannedModel

    return PlannedModel(module, plan.graph, stage_plans(plan), dict(feeds or {}))
