"""Learned positions on a rank: its features of the table, for each of its samples."""

from __future__ import annotations

from ..statements import Call, LayerContext, LayerProgram, Name

__all__ = ["program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of learned positions."""
    call = Call("positions", (Name("weight"), Name("num_samples"), context.layout), {"rows": context.layer.rows})
    return LayerProgram(context.weights, (*context.gathering(("weight",)), call))
