"""A plan as what runs it: the plans of its stages, their schedule, and a model cut so.

A plan without a pipeline is a pipeline of one stage: one worker of all devices, which carries one micro-batch after the other
forward and back (1F1B).

plan = autoddl.load_plan("joint.json")
trainer = PipelineTrainer(planned_model(module, plan), schedule_of_plan(plan), make_optimizer, batch)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.limits import MAX_TRAINING_PASSES
from autoddl.pipelines.joint.configuration import PERIODS, PipelineSchedule
from autoddl.pipelines.joint.partition import ENTRY
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.pipelines.schedule import Schedule

from .planfile import PlanFile

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.stage.model import PlannedModel

__all__ = ["make_schedule", "planned_model", "schedule_of_plan", "scheduling", "stage_plans"]


def stage_plans(plan: PlanFile) -> tuple[StagePlan, ...]:
    """The plans of a plan's stages, in the order of the model."""
    result = []
    for choice in plan.evaluation.configuration.stages:
        strategies = {name: strategy for name, strategy in choice.strategies.items() if name != ENTRY}
        result.append(StagePlan(strategies, choice.recompute == "layers", choice.strategies.get(ENTRY)))
    return tuple(result)


def scheduling(plan: PlanFile) -> tuple[PipelineSchedule, tuple[int, ...], tuple[bool, ...]]:
    """What a plan's schedule is made from: see `make_schedule`."""
    configuration = plan.evaluation.configuration
    recomputing = tuple(choice.recompute == "stage" for choice in configuration.stages)
    return configuration.schedule, plan.evaluation.schedule.widths, recomputing


def schedule_of_plan(plan: PlanFile, num_steps: int | None = None) -> Schedule:
    """The schedule of a plan: of one step where it is synchronous; else of ``num_steps``, or some."""
    return make_schedule(*scheduling(plan), num_steps or PERIODS)


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
    return of.schedule(widths, tuple(recomputing), num_steps, MAX_TRAINING_PASSES)


def planned_model(module: Any, plan: PlanFile, feeds: Mapping[str, int | None] | None = None) -> PlannedModel:
    """A model cut in the stages of a plan, for a `PipelineTrainer`; on every rank of the job.

    Args:
        module: the unmodified model, on the host; where its values differ, the first rank's are taken.
        feeds: see :func:`autoddl.apply`.
    """
    from autoddl.pipelines.runtime.stage.model import PlannedModel

    return PlannedModel(module, plan.graph, stage_plans(plan), dict(feeds or {}))
