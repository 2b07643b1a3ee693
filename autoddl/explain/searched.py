"""What the search says of a plan in its document: the certificate, what the plan was compared with, and what was searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoddl.costmodel.documents import Fields

__all__ = ["Certificate", "RivalFigures", "certificate_of", "includes_summa", "rivals_of", "settings_of"]


@dataclass(frozen=True)
class Certificate:
    """What the search proved, and how.

    Attributes:
        optimal: whether no plan of the space is better.
        lower_bound_s: on what is minimised.
        gap: how much better another plan could be at most, relative to this one.
        search_s: what the search took.
        space_size: plans to choose from; 0 where nobody counted them, as those of a paper's planner.
    """

    optimal: bool
    lower_bound_s: float
    gap: float
    search_s: float
    space_size: int

    @property
    def verdict(self) -> str:
        """In a few words."""
        return "proven optimal" if self.optimal else f"gap at most {self.gap:.2%}"


def certificate_of(fields: Fields) -> Certificate:
    """The certificate of a plan whose claims are there."""
    return Certificate(
        optimal=fields.boolean("optimal"),
        lower_bound_s=fields.number("lower_bound_s"),
        gap=fields.number("gap"),
        search_s=fields.number("search_s"),
        space_size=fields.get("space_size"),  # of any size: spaces have hundreds of digits
    )


# ---- What the plan was compared with ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RivalFigures:
    """A baseline's best plan, or why there is none (then there are no figures)."""

    name: str
    how: str
    infeasible: str = ""
    step_s: float = 0.0
    communication_s: float = 0.0
    bubble_s: float = 0.0
    memory_bytes: float = 0.0


def rivals_of(fields: Fields) -> Sequence[RivalFigures]:
    """Baselines; where pipelines were searched, their families."""
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


# ---- What was searched ------------------------------------------------------------------------------------------------------


def settings_of(fields: Fields) -> list[Fields]:
    """Micro-batches with and without recomputation, and how each was settled; none where pipelines were searched."""
    return fields.objects("candidates")


def includes_summa(fields: Fields) -> bool:
    """Whether the options of a plan let the search choose Summa meshes."""
    return fields.object("options").boolean("summa")
