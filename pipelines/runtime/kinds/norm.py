"""Norms on a rank: statistics of whole rows, summed over p1."""

from __future__ import annotations

from math import prod
from typing import Any

from autoddl.costmodel.graph import Layer

from ..load import load_oneflow
from ..statements import ALL_STEPS, RANKS, Call, LayerContext, LayerProgram, Name, X, epilogue

__all__ = ["plain_module", "program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a norm."""
    layer, layout = context.layer, context.layout
    options = {
        "features": layer.attributes["features"],
        "is_centred": layer.attributes["statistics"] == 2,
        "eps": context.fact("eps", "eps_of") if layer.eps is None else layer.eps,
        "axes": layout.axes(1),
        "ranks": RANKS,
    }
    weight, *bias = map(Name, context.weights)
    body = [Call("normalise", (X, weight, bias[0] if bias else None), options, num_steps=ALL_STEPS, computes=True)]
    statements = [
        *context.input_data(prod(layer.input_shape[:-1])),
        *context.recomputable(("x", *context.weights), body),
        *epilogue(context),
    ]
    return LayerProgram(context.weights, tuple(statements))


def plain_module(layer: Layer) -> Any:
    """Return a module with the constant that a norm adds to the variance. Imports OneFlow."""
    made = load_oneflow().nn.Module()
    made.eps = 1e-5
    return made
