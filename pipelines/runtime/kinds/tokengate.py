"""Token gates on a rank: sums over all features, then a product."""

from __future__ import annotations

from autoddl.costmodel.errors import UserError

from ..statements import ALL_STEPS, RANKS, Call, LayerContext, LayerProgram, Name, X, epilogue

__all__ = ["program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a token gate.

    Raises:
        UserError: The layer does not read two tensors.
    """
    if len(context.producers) != 2:
        raise UserError(f"{context.layer.describe()}: reads {len(context.producers)} tensors, should read two")
    arguments = (X, Name("input_1"), Name("weight"), list(context.layout.axes(1)), RANKS)
    body = [Call("gate_tokens", arguments, num_steps=ALL_STEPS, computes=True)]
    return LayerProgram(("weight",), (*context.recomputable(("x", "input_1", "weight"), body), *epilogue(context)))
