"""Convolutions on a rank: whole images."""

from __future__ import annotations

from typing import Any

from autoddl.costmodel.graph import Layer

from ..load import load_oneflow
from ..statements import Call, LayerContext, LayerProgram, Name, X, epilogue

__all__ = ["plain_module", "program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a convolution."""
    bias = Name("bias") if len(context.weights) > 1 else None
    options = {"options": context.fact("options", "convolution_options")}
    body = [
        Call("convolve", (X, context.layer.input_shape, Name("weight"), bias), options, computes=True),
        *epilogue(context),
    ]
    return LayerProgram(context.weights, (*context.input_data(1), *context.recomputable(("x", *context.weights), body)))


def plain_module(layer: Layer) -> Any:
    """Return a convolution with the options of the layer. Imports OneFlow."""
    attributes = layer.attributes
    return load_oneflow().nn.Conv2d(
        attributes["in_channels"],
        attributes["out_channels"],
        attributes["kernel_size"],
        stride=attributes["stride"],
        padding=attributes["padding"],
    )
