"""What tables of layers have in common: names, strategies and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import LEVEL_NAMES, Level

__all__ = ["heading", "layouts_of", "legend", "meaning", "place", "repeated"]

#: Of each of the cluster's levels.
_WHERE = dict(zip(LEVEL_NAMES, ("between nodes", "inside a node")))


class Placed(Protocol):
    """A layer of a graph, or what is known of one: its name, and its block and role where it is in a block."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> str: ...

    @property
    def role(self) -> str: ...


def place(layer: Placed) -> str:
    """``h.*.mlp.c_fc``: where a layer is in its block, or its name."""
    return f"{layer.block}.*.{layer.role}" if layer.block else layer.name


def repeated(name: str, count: int) -> str:
    """``h.*.mlp.c_fc x 48``: a name, and how many layers share the row."""
    return f"{name} x {count}" if count > 1 else name


def heading(levels: Sequence[Level]) -> str:
    """``(p0,p1,p2) inter-node | intra-node``: over a column of strategies."""
    return f"(p0,p1,p2) {' | '.join(level.name for level in levels)}"


def meaning(levels: Sequence[Level] = ()) -> str:
    """What a strategy's numbers are, and where each of the levels is."""
    text = "(p0,p1,p2): samples are split over p0 devices, output features over p1, input features over p2"
    named = ", ".join(f"{level.name}: {_WHERE[level.name]}" for level in levels)
    return f"{text}; {named}" if named else text


def legend(levels: Sequence[Level] = ()) -> str:
    """The line below the first table with strategies."""
    return f"  {meaning(levels)}"


def layouts_of(assessed: LayerAssessment) -> Mapping[str, str]:
    """How input, weight and output lie under a layer's strategy; ``-`` for a weight that is not there."""
    layouts = assessed.strategy.sbp(assessed.layer)
    return {name: str(layout.without_unit_axes()) if layout else "-" for name, layout in layouts.items()}
