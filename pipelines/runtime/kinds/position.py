"""Learned positions on a rank: its features of the table, for each of its samples."""

from __future__ import annotations

from ..statements import RANKS, Call, LayerContext, LayerProgram, Name

__all__ = ["program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of learned positions."""
    arguments = Name("weight"), Name("num_samples"), context.layout, RANKS
    call = Call("positions", arguments, {"rows": context.layer.rows, **context.order})
    return LayerProgram(context.weights, (*context.gathering(("weight",)), call))
