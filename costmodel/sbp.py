"""SBP: the state of a tensor on one axis of a device mesh, as in OneFlow.

=================  ======  ==============================================================================
state              prints  each device along the axis holds
=================  ======  ==============================================================================
``Split(dim)``     S(0)    an even slice of the tensor along tensor dimension ``dim``
``Broadcast()``    B       a full copy
``PartialSum()``   P       a summand; the tensor is the element-wise sum
=================  ======  ==============================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Union

from .errors import UserError, quote

__all__ = ["Broadcast", "PartialSum", "SBPState", "Split", "dual", "parse_state"]


@dataclass(frozen=True)
class Split:
    """Split evenly along a tensor dimension.

    Attributes:
        dim: the tensor dimension.
    """

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Broadcast:
    """A full copy on every device."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True)
class PartialSum:
    """A summand on every device; the tensor is their sum."""

    def __str__(self) -> str:
        return "P"


SBPState = Union[Split, Broadcast, PartialSum]


def dual(state: SBPState) -> SBPState:
    """The state of the gradient of a tensor: B and P are dual to each other, a split is dual to itself.

    >>> print(dual(Broadcast()), dual(PartialSum()), dual(Split(1)))
    P B S(1)
    """
    if isinstance(state, Broadcast):
        return PartialSum()
    if isinstance(state, PartialSum):
        return Broadcast()
    return state


def parse_state(text: str) -> SBPState:
    """Parse ``S0``, ``S(0)``, ``B`` or ``P``.

    Raises:
        UserError: the text is none of these.

    >>> parse_state("S0")
    Split(dim=0)
    """
    match = re.fullmatch(r"S\(([0-9]{1,4})\)|S([0-9]{1,4})|([BP])", text.strip())
    if match is None:
        raise UserError(f"SBP state {quote(text.strip())} is not one of S0, S1, ..., B, P")
    if match[3]:
        return Broadcast() if match[3] == "B" else PartialSum()
    return Split(int(match[1] or match[2]))
