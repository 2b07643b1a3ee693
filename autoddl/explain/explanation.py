"""The explanation of a plan, with a pipeline or without."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from autoddl.costmodel.errors import UserError

from .alternatives import Choice, MemoryPrice, explain_choices, matching, problem_of
from .stages import explain_stage
from .view import PlanView

__all__ = ["ChoiceSection", "Explanation", "explain"]


@dataclass(frozen=True)
class ChoiceSection:
    """The choices of a section of a plan (see :class:`.view.Section`)."""

    title: str
    stages: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Explanation:
    """Why a plan is as it is.

    Attributes:
        view: the plan.
        sections: the choices with their alternatives.
        memory_price: what the memory limit costs; None for a pipeline, whose stages each have their own.
    """

    view: PlanView
    sections: tuple[ChoiceSection, ...]
    memory_price: MemoryPrice | None

    @property
    def scope(self) -> str:
        """What a regret is, in a sentence."""
        if self.view.plan.pipeline is None:
            what = "communication" if self.view.objective == "communication" else "the step"
            return (
                f"regret: how much longer {what} takes at best with this choice, everything else chosen anew "
                "(micro-batch and recomputation kept)"
            )
        return (
            "regret: how much longer the simulated step takes with this choice in its stages, their other layers chosen anew "
            "(cut, schedule, micro-batch, recomputation and other stages kept: at most)"
        )


def explain(view: PlanView, *, count: int = 3, layer: str | None = None, time_limit_s: float = math.inf) -> Explanation:
    """Find the ``count`` nearest alternatives of every choice, or of one layer's.

    Raises:
        UserError: there is no such layer, or an option is out of range.
    """
    if not 0 <= count <= 1000:
        raise UserError(f"the number of alternatives is {count}, should be 0 to 1000")
    if not time_limit_s > 0:
        raise UserError(f"time limit {time_limit_s:g} should be more than 0 s")
    if view.plan.pipeline is not None:
        return _of_pipeline(view, count, layer, time_limit_s)
    plan = view.plan
    space_size = None if view.certificate is None else view.certificate.space_size
    problem, chosen = problem_of(plan.graph, plan.cluster, plan.workload, plan.strategies, view.objective, space_size)
    choices, price = explain_choices(
        problem,
        chosen,
        view.memory_limit_bytes,
        count=count,
        variables=None if layer is None else matching(problem, layer),
        time_limit_s=time_limit_s,
        is_optimal=view.certificate is not None and view.certificate.optimal,
    )
    return Explanation(view, (ChoiceSection("", (0,), choices),), price)


def _of_pipeline(view: PlanView, count: int, layer: str | None, time_limit_s: float) -> Explanation:
    pipeline = view.plan.pipeline
    assert pipeline is not None
    deadline = time.perf_counter() + time_limit_s
    sections = []
    for section in view.sections:
        choices = explain_stage(
            pipeline,
            view.plan.graph,
            section.stages,
            view.memory_limit_bytes,
            count=count,
            only=layer,
            deadline=deadline,
        )
        if choices:
            sections.append(ChoiceSection(section.title, section.stages, choices))
    if not sections:
        known = any(layer == one.name for one in view.plan.graph.layers)
        where = " in the first of its equal stages" if known else ""
        raise UserError(f"{view.model} has no layer {layer!r}{where}")
    return Explanation(view, tuple(sections), None)
