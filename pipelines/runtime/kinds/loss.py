"""Cross entropy on a rank: sums over the vocabulary are reduced over p1."""

from __future__ import annotations

from math import prod

from ..statements import ALL_STEPS, RANKS, TARGETS, Call, LayerContext, LayerProgram, X

__all__ = ["program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of the cross entropy."""
    options = {"rows": prod(context.layer.input_shape[:-1]), **context.order}
    call = Call("cross_entropy", (X, TARGETS, context.layout, RANKS), options, num_steps=ALL_STEPS, computes=True)
    return LayerProgram((), (call,))
