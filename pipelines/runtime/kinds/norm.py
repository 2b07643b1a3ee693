"""Norms on a rank: statistics of whole rows, summed over p1."""

from __future__ import annotations

from math import prod

from ..statements import ALL_STEPS, RANKS, Call, LayerContext, LayerProgram, Name, X, epilogue

__all__ = ["program"]


def program(frame: LayerContext) -> LayerProgram:
    layer, layout = frame.layer, frame.layout
    options = {
        "features": layer.attributes["features"],
        "is_centred": layer.attributes["statistics"] == 2,
        "eps": frame.fact("eps", "eps_of"),
        "axes": layout.axes(1),
        "ranks": RANKS,
    }
    body = [Call("normalised", (X,), options, num_steps=ALL_STEPS, computes=True)]
    body += [Call(name, (X, Name(weight))) for name, weight in zip(("multiply", "add"), frame.weights)]
    statements = [
        *frame.input_data(prod(layer.input_shape[:-1])),
        *frame.recomputable(("x", *frame.weights), body),
        *epilogue(frame),
    ]
    return LayerProgram(frame.weights, tuple(statements))
