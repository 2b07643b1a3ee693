"""Reads the claims of the search from the document of a plan: its certificate, its rivals, and the space that was searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoddl.costmodel.documents import Fields
from autoddl.costmodel.graph_meshes import EAGER
from autoddl.costmodel.strategy import PLAIN, Choices
from autoddl.search.options import Options

from ..plandocument import executor_of

__all__ = [
    "Certificate",
    "RivalFigures",
    "StrategySpace",
    "certificate_of",
    "rivals_of",
    "settings_of",
    "strategy_space_of",
]


@dataclass(frozen=True)
class Certificate:
    """What the search proved.

    Attributes:
        optimal: whether no plan of the space has a smaller cost.
        lower_bound_s: a lower bound on the cost of all plans of the space [s].
        gap: (cost - lower bound) / cost; no plan of the space is better by more than this part.
        search_s: duration of the search [s].
        space_size: number of plans in the space; 0 if it was not counted, as for the planners of papers.
    """

    optimal: bool
    lower_bound_s: float
    gap: float
    search_s: float
    space_size: int

    @property
    def verdict(self) -> str:
        """``proven optimal``, or the gap."""
        return "proven optimal" if self.optimal else f"gap at most {self.gap:.2%}"


def certificate_of(fields: Fields) -> Certificate:
    """Read the certificate of a plan that was not edited."""
    return Certificate(
        optimal=fields.boolean("optimal"),
        lower_bound_s=fields.number("lower_bound_s"),
        gap=fields.number("gap"),
        search_s=fields.number("search_s"),
        space_size=fields.get("space_size"),  # not `integer`: the number may have hundreds of digits
    )


# ---- Rivals -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RivalFigures:
    """The best plan of a baseline, or of a family of pipeline schedules.

    Attributes:
        name: name of the baseline or family.
        how: its mesh or stages, micro-batch and recomputation in a few words.
        infeasible: why there is no such plan; empty if there is one.  An infeasible rival has no figures.
        step_s: duration of a training step [s].
        communication_s: communication that a step waits for [s].
        bubble_s: idle time of the busiest worker in a step [s].
        memory_bytes: memory of the fullest device.
    """

    name: str
    how: str
    infeasible: str = ""
    step_s: float = 0.0
    communication_s: float = 0.0
    bubble_s: float = 0.0
    memory_bytes: float = 0.0


def rivals_of(fields: Fields) -> Sequence[RivalFigures]:
    """Read the plans that the plan was compared with: baselines, or families of schedules if pipelines were searched."""
    return [_rival(entry) for entry in fields.objects("rivals")]


def _rival(entry: Fields) -> RivalFigures:
    if "infeasible" in entry:
        return RivalFigures(entry.text("name"), "", entry.text("infeasible"))
    return RivalFigures(
        entry.text("name"),
        entry.text("how"),
        step_s=entry.number("step_s"),
        communication_s=entry.number("communication_s"),
        bubble_s=entry.number("bubble_s"),
        memory_bytes=entry.number("memory_bytes"),
    )


# ---- The space --------------------------------------------------------------------------------------------------------------


def settings_of(fields: Fields) -> list[Fields]:
    """Read the outcome of each setting (micro-batch and recomputation); empty if pipelines were searched."""
    return fields.objects("candidates")


@dataclass(frozen=True)
class StrategySpace:
    """Which strategies the search could choose for the layers of a stage.

    Attributes:
        untied: whether every repetition of a block had a choice of its own.
        summa: whether linear layers could have Summa meshes.
        executor: what executes the plan; strategies that it cannot execute were left out.
        choices: what layers could choose besides splits.
    """

    untied: bool = False
    summa: bool = False
    executor: str = EAGER
    choices: Choices = PLAIN


def strategy_space_of(fields: Fields) -> StrategySpace | None:
    """Read the space of strategies from a plan's options; None for a plan that was edited, whose document has no options."""
    if fields.get("options") is None:
        return None
    options = fields.object("options")
    known = Options(zero=options.get("zero") or 0, activations=options.get("activations") or "kept")
    return StrategySpace(options.boolean("untied"), options.boolean("summa"), executor_of(options), known.choices)
