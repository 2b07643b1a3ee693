"""Sums of tensors on a rank."""

from __future__ import annotations

from autoddl.costmodel.errors import UserError

from ..statements import Call, LayerContext, LayerProgram, Name, X, epilogue

__all__ = ["program"]


def program(frame: LayerContext) -> LayerProgram:
    count = len(frame.producers)
    if count < 2:
        raise UserError(f"{frame.layer.describe()}: it adds an input of the model, which cannot be run")
    call = Call("add", (X, *(Name(f"input_{i}") for i in range(1, count))))
    return LayerProgram((), (call, *epilogue(frame)))
