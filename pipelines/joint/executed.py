"""The step of a joint plan as AutoDDL's runtime executes it: the ranks of a worker communicate one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoddl.costmodel.units import format_percent, format_seconds

from ..one_stream import simulate_one_stream
from .evaluation import Evaluation, evaluate, step_of
from .partition import chain_of

if TYPE_CHECKING:
    from .result import PlanResult

__all__ = ["executed_step_s", "execution_note"]

#: Share of a step by which its execution has to be longer for a note.
_NOTABLE = 0.01
#: Number of tasks after which no further rival's execution is simulated; that many take some seconds.
_MOST_TASKS = 50_000


def executed_step_s(plan: Evaluation) -> float:
    """Seconds per step in the simulation of :mod:`autoddl.pipelines.one_stream`; at least ``plan.step_s``.

    The layers of a stage that communicate keep its ranks from sending to other stages meanwhile.
    """
    if not plan.has_pipeline:
        return plan.step_s
    joint_stages = [number for number, stage in enumerate(plan.stages) if stage.communication_s]
    timeline = simulate_one_stream(plan.schedule, plan.times, joint_stages)
    return step_of(plan.configuration.schedule, timeline)


def execution_note(result: PlanResult) -> str:
    """Say how much longer a step takes as executed, and which rival then takes less; empty if that is not notable."""
    plan = result.evaluation
    seconds = executed_step_s(plan)
    if seconds <= plan.step_s * (1 + _NOTABLE):
        return ""
    note = (
        f"as executed, a step takes {format_seconds(seconds)}, {format_percent(seconds / plan.step_s - 1)} more: the ranks of a "
        "worker communicate one after the other"
    )
    chain, least_s, name, num_tasks = chain_of(result.graph), seconds, "", 0
    for rival in sorted(result.rivals, key=lambda rival: rival.step_s):
        if rival.step_s >= least_s or num_tasks > _MOST_TASKS:
            break
        if rival.configuration in (None, plan.configuration):
            continue
        other = evaluate(chain, result.cluster, rival.configuration)
        num_tasks += sum(map(len, other.schedule.workers))
        if (executed_s := executed_step_s(other)) < least_s:
            least_s, name = executed_s, rival.name
    return f"{note}; {name} takes {format_seconds(least_s)}" if name else note
