"""Learned positions on a rank: its features of the table, for each of its samples."""

from __future__ import annotations

from ..statements import Call, LayerContext, LayerProgram, Name

__all__ = ["program"]


def program(frame: LayerContext) -> LayerProgram:
    call = Call("positions", (Name("weight"), Name("num_samples"), frame.layout), {"rows": frame.layer.rows})
    return LayerProgram(frame.weights, (call,))
