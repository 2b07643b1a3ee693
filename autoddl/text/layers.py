"""Names, strategies and layouts of layers, for all tables of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import LEVEL_NAMES, Level

__all__ = ["heading", "layouts_of", "legend", "meaning", "place", "repeated"]

#: Where each network level is, for the legend.
_LEVEL_PLACES = dict(zip(LEVEL_NAMES, ("between nodes", "inside a node")))


class Placed(Protocol):
    """Anything with the name of a layer, and the block and the role of the layer if it is in a repeated block."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> str: ...

    @property
    def role(self) -> str: ...


def place(layer: Placed) -> str:
    """Return the common name of all repetitions of a layer: block and role (``h.*.mlp.c_fc``), or its name if it is in no block."""
    return f"{layer.block}.*.{layer.role}" if layer.block else layer.name


def repeated(name: str, count: int) -> str:
    """Return a name and a number of layers (``h.*.mlp.c_fc x 48``); the name alone for one layer.

    >>> repeated("h.*.mlp.c_fc", 48)
    'h.*.mlp.c_fc x 48'
    """
    return f"{name} x {count}" if count > 1 else name


def heading(levels: Sequence[Level]) -> str:
    """Return the heading of a column of strategies: ``(p0,p1,p2) inter-node | intra-node``."""
    return f"(p0,p1,p2) {' | '.join(level.name for level in levels)}"


def meaning(levels: Sequence[Level] = ()) -> str:
    """Return a sentence that explains the numbers of a strategy, and the network levels."""
    text = "(p0,p1,p2): samples are split over p0 devices, output features over p1, input features over p2"
    named = ", ".join(f"{level.name}: {_LEVEL_PLACES[level.name]}" for level in levels)
    return f"{text}; {named}" if named else text


def legend(levels: Sequence[Level] = ()) -> str:
    """Return the line below the first table of strategies, which explains them."""
    return f"  {meaning(levels)}"


def layouts_of(assessed: LayerAssessment) -> Mapping[str, str]:
    """Return the SBP layouts of ``input``, ``weight`` and ``output`` as text; ``-`` for the weight of a layer without weights."""
    layouts = assessed.strategy.sbp(assessed.layer)
    return {name: str(layout.without_unit_axes()) if layout else "-" for name, layout in layouts.items()}
