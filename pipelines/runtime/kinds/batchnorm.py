"""Batch norms on a rank: its own channels, of its own samples or of those of all ranks."""

from __future__ import annotations

from typing import Any

from autoddl.costmodel.graph import Layer

from ..load import load_oneflow
from ..statements import ALL_STEPS, RANKS, Call, LayerContext, LayerProgram, Name, X, epilogue
from .conv2d import image_input

__all__ = ["plain_module", "program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a batch norm."""
    layer, attributes = context.layer, context.layer.attributes
    weight, bias = map(Name, context.weights) if context.weights else (None, None)
    statistics = context.fact("statistics", "running_statistics", attributes["features"])
    arguments = (X, weight, bias, statistics, context.layout, RANKS, Name("training"))
    options = {"synchronised": True} if attributes["synchronised"] else {}
    body = [Call("normalise_batch", arguments, options, num_steps=ALL_STEPS if options else 0, computes=True)]
    statements = [*context.recomputable(("x", *context.weights), body), *epilogue(context)]
    data = image_input(context) if layer.is_image else context.input_data(1)
    return LayerProgram(context.weights, (*data, *statements))


def plain_module(layer: Layer) -> Any:
    """Return a batch norm with the usual constants. Imports OneFlow."""
    return load_oneflow().nn.BatchNorm2d(layer.attributes["features"])
