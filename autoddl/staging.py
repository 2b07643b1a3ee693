"""Prepares a plan to be run: the plans of its stages, its schedule, and the model cut into stages.

A plan without a pipeline is a pipeline of one stage: one worker of all devices, which runs the forward and the backward pass of one
micro-batch after another (1F1B).  To train a model with a plan::

    plan = autoddl.load_plan("joint.json")
    trainer = PipelineTrainer(planned_model(module, plan), schedule_of_plan(plan), make_optimizer, batch)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.limits import MAX_TRAINING_PASSES
from autoddl.pipelines.joint.configuration import NUM_PERIODS, PipelineSchedule, recomputed_inside
from autoddl.pipelines.joint.partition import ENTRY
from autoddl.pipelines.runtime.stage.plan import StagePlan, stage_plan
from autoddl.pipelines.schedule import Schedule

from .executors import EAGER, check_workload
from .planfile import PlanFile

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.stage.model import PlannedModel

__all__ = ["make_schedule", "planned_model", "schedule_arguments", "schedule_of_plan", "stage_plans"]


def stage_plans(plan: PlanFile, executor: str = EAGER) -> tuple[StagePlan, ...]:
    """Return the plan of each stage for ranks: strategies, recomputation, attention, and the strategy of the tensor that enters.

    Args:
        plan: the plan.
        executor: what is to run the stages, one of `autoddl.executors.EXECUTORS`.

    Raises:
        UserError: the executor cannot run what the plan is priced for (`check_workload`).
    """
    result = []
    for choice in plan.evaluation.configuration.stages:
        strategies = {name: strategy for name, strategy in choice.strategies.items() if name != ENTRY}
        workload = replace(plan.workload, recompute=recomputed_inside(choice.recompute))
        check_workload(workload, executor)
        result.append(stage_plan(plan.graph, strategies, workload, choice.strategies.get(ENTRY)))
    return tuple(result)


def schedule_arguments(plan: PlanFile) -> tuple[PipelineSchedule, tuple[int, ...], tuple[bool, ...]]:
    """Return the first three arguments of :func:`make_schedule` for a plan."""
    configuration = plan.evaluation.configuration
    recomputing = tuple(choice.recompute == "stage" for choice in configuration.stages)
    return configuration.schedule, plan.evaluation.schedule.widths, recomputing


def schedule_of_plan(plan: PlanFile, num_steps: int | None = None) -> Schedule:
    """Return the schedule of a plan: one step if it is synchronous, else ``num_steps`` steps (by default `NUM_PERIODS`).

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64, micro_batch=32)
    >>> [str(task) for task in schedule_of_plan(plan).workers[0]]
    ['0F0', '0B0', '0F1', '0B1', '0A0', '0U0']
    """
    return make_schedule(*schedule_arguments(plan), num_steps or NUM_PERIODS)


def make_schedule(
    of: PipelineSchedule, widths: tuple[int, ...], recomputing: Sequence[bool], num_steps: int
) -> Schedule:
    """Return a schedule: one step if it is synchronous, else ``num_steps`` steps.

    Args:
        of: the schedule's family and numbers.
        widths: number of devices of each worker.
        recomputing: for each stage, whether its forward pass is run again as a separate task.
        num_steps: number of steps of an asynchronous schedule.

    Raises:
        UserError: the family has no schedule for these numbers.
    """
    return of.schedule(widths, tuple(recomputing), num_steps, MAX_TRAINING_PASSES)


def planned_model(module: Any, plan: PlanFile, feeds: Mapping[str, int | None] | None = None) -> PlannedModel:
    """Return the model cut into the stages of a plan, for a `PipelineTrainer`.  To be called on every rank of the job.

    Args:
        module: the unmodified model, on the host.  If its parameters differ between ranks, those of the first rank are used.
        plan: the plan.
        feeds: which input each layer that reads the data reads, as in :func:`autoddl.apply`.
    """
    from autoddl.pipelines.runtime.stage.model import PlannedModel

    return PlannedModel(module, plan.graph, stage_plans(plan), dict(feeds or {}))
