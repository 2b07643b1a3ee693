"""Explains the choices of a plan, stage by stage."""

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
    """The choices of a plan with their alternatives.

    Attributes:
        view: the figures of the plan.
        sections: the choices of each group of equal stages.
    """

    view: PlanView
    sections: tuple[StageChoices, ...]

    @property
    def memory_price(self) -> MemoryPrice | None:
        """What the memory limit costs; None if it is not known exactly, as for a plan with several stages."""
        return self.sections[0].memory_price

    @property
    def scope(self) -> str:
        """A sentence that says what a regret is, and what is kept as in the plan."""
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
    """Find the alternatives of least regret for every choice of a plan, or for one layer.

    Args:
        view: the plan, from :func:`.view.view_of`.
        count: number of alternatives per choice, 0 to 1000.
        layer: name of a choice or of a layer; None for all choices.
        time_limit_s: time for all searches and simulations together.

    Raises:
        UserError: the plan has no such layer, or ``count`` or ``time_limit_s`` is out of range.

    >>> import autoddl
    >>> from autoddl.explain import view_of
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64, zero=0, activations="kept")
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
        # Share the remaining time evenly, so that no group uses up the time of later ones.
        share = max(0.0, deadline - time.perf_counter()) / (len(view.stage_groups) - number)
        section = explain_stages(view, stage_group, count=count, layer=layer, time_limit_s=share)
        if section.choices:
            sections.append(section)
    if not sections:
        names = list(dict.fromkeys(layers.name for stage_group in view.stage_groups for layers in stage_group.layers))
        known = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise UserError(f"{view.model} has no layer {layer!r}; its layers are {known}")
    return Explanation(view, tuple(sections))
