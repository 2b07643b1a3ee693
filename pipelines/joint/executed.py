"""The step of a joint plan as AutoDDL's runtime executes it: the ranks of a worker communicate one after the other."""

from __future__ import annotations

from ..one_stream import simulate_one_stream
from .evaluation import Evaluation, step_of

__all__ = ["executed_step_s"]


def executed_step_s(plan: Evaluation) -> float:
    """Seconds per step in the simulation of :mod:`autoddl.pipelines.one_stream`; at least ``plan.step_s``.

    The layers of a stage that communicate keep its ranks from sending to other stages meanwhile.
    """
    if not plan.has_pipeline:
        return plan.step_s
    joint_stages = [number for number, stage in enumerate(plan.stages) if stage.communication_s]
    timeline = simulate_one_stream(plan.schedule, plan.times, joint_stages)
    return step_of(plan.configuration.schedule, timeline)
