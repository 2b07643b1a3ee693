"""Sums of tensors on a rank."""

from __future__ import annotations

from autoddl.costmodel.errors import UserError

from ..statements import Call, LayerContext, LayerProgram, Name, X, epilogue

__all__ = ["program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a sum.

    Raises:
        UserError: The layer reads fewer than two layers.
    """
    count = len(context.producers)
    if count < 2:
        raise UserError(f"{context.layer.describe()}: it adds an input of the model, which cannot be run")
    call = Call("add", (X, *(Name(f"input_{i}") for i in range(1, count))))
    return LayerProgram((), (call, *epilogue(context)))
