"""Names, strategies and layouts of layers, for all tables of layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import LEVEL_NAMES, Level
from autoddl.costmodel.strategy import Strategy

__all__ = ["choices_meaning", "heading", "layouts_of", "legend", "meaning", "place", "repeated"]

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


#: What the words of strategies mean (:attr:`autoddl.costmodel.strategy.Strategy.words`); those of ZeRO are in ascending order.
_WORDS = {
    "zero1": "the p0 devices divide optimizer states",
    "zero2": "also gradients",
    "zero3": "also parameters",
    "hybrid": "gradients and parameters inside nodes only",
    "regathers": "the backward pass gathers the input again",
    "experts": "p0 devices that divide the experts, per level",
    "halo": "devices that share an image's rows (or rows x columns of tiles), and exchange those at their boundaries",
    "tiles": "devices that share an image, in rows x columns of tiles",
    "gather": "devices that share a sample's positions, and gather keys and values",
    "ring": "devices that share a sample's positions, and pass keys and values round",
    "copies": "devices that use the same key and value",
}


def choices_meaning(strategies: Iterable[Strategy]) -> str:
    """Return a sentence that explains the words of strategies; empty if there are none.

    >>> choices_meaning([Strategy(((2, 1, 1),), zero=1)])
    'zero1: the p0 devices divide optimizer states'
    """
    used = {re.split("[: ]", word)[0] for strategy in strategies for word in strategy.words} & _WORDS.keys()
    highest = max((word for word in used if word.startswith("zero")), default="")
    shown = [word for word in _WORDS if word in used or (word.startswith("zero") and word < highest)]
    return "; ".join(f"{word}: {_WORDS[word]}" for word in shown)


def legend(levels: Sequence[Level] = (), strategies: Iterable[Strategy] = ()) -> str:
    """Return the lines below the first table of strategies, which explain them."""
    choices = choices_meaning(strategies)
    return f"  {meaning(levels)}" + (f"\n  {choices}" if choices else "")


def layouts_of(assessed: LayerAssessment) -> Mapping[str, str]:
    """Return the SBP layouts of :meth:`.Strategy.sbp` as text; ``-`` for those of the weights of a layer without weights."""
    layouts = assessed.strategy.sbp(assessed.layer)
    return {name: str(layout.without_unit_axes()) if layout else "-" for name, layout in layouts.items()}
