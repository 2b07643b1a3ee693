"""The explanation of a plan."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from autoddl.costmodel.errors import UserError

from .alternatives import explain_stages
from .choices import MemoryPrice, StageChoices
from .view import PlanView

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """Why a plan is as it is.

    Attributes:
        view: the plan.
        sections: the choices with their alternatives, by equal stages.
    """

    view: PlanView
    sections: tuple[StageChoices, ...]

    @property
    def memory_price(self) -> MemoryPrice | None:
        """What the memory limit costs; None for a pipeline, whose stages each have their own."""
        return self.sections[0].memory_price

    @property
    def scope(self) -> str:
        """What a regret is, in a sentence."""
        what = "communication" if self.view.objective == "communication" else "step"
        if self.memory_price is not None:
            return (
                f"regret: how much longer {'the ' if what == 'step' else ''}{what} takes at best with this choice, everything else "
                "chosen anew (micro-batch and recomputation kept)"
            )
        return (
            f"regret: how much longer the simulated {what} takes with this choice in its stages, their other layers chosen anew "
            "(cut, schedule, micro-batch, recomputation and other stages kept: at most)"
        )


def explain(view: PlanView, *, count: int = 3, layer: str | None = None, time_limit_s: float = math.inf) -> Explanation:
    """Find the ``count`` nearest alternatives of every choice, or of one layer's.

    Args:
        time_limit_s: for all searches and simulations.

    Raises:
        UserError: there is no such layer, or an option is out of range.

    >>> import autoddl
    >>> from autoddl.explain import view_of
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> (choice,) = explain(view_of(plan), count=1, layer="fc1").sections[0].choices
    >>> str(choice.strategy), str(choice.alternatives[0].strategy)
    ('(1,8,1)', '(2,4,1)')
    """
    if not 0 <= count <= 1000:
        raise UserError(f"the number of alternatives is {count}, should be 0 to 1000")
    if not time_limit_s > 0:
        raise UserError(f"time limit {time_limit_s:g} should be more than 0 s")
    deadline = time.perf_counter() + time_limit_s
    sections = []
    for number, stage_group in enumerate(view.stage_groups):
        # No group may use up the time of those behind it.
        share = max(0.0, deadline - time.perf_counter()) / (len(view.stage_groups) - number)
        found = explain_stages(view, stage_group, count=count, layer=layer, time_limit_s=share)
        if found.choices:
            sections.append(found)
    if not sections:
        names = list(dict.fromkeys(layers.name for stage_group in view.stage_groups for layers in stage_group.layers))
        known = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise UserError(f"{view.model} has no layer {layer!r}; its layers are {known}")
    return Explanation(view, tuple(sections))
