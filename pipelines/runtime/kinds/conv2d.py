"""Convolutions on a rank: whole images."""

from __future__ import annotations

from ..statements import Call, LayerContext, LayerProgram, Name, X, epilogue

__all__ = ["program"]


def program(frame: LayerContext) -> LayerProgram:
    bias = Name("bias") if len(frame.weights) > 1 else None
    options = {"options": frame.fact("options", "convolution_options")}
    body = [
        Call("convolve", (X, frame.layer.input_shape, Name("weight"), bias), options, computes=True),
        *epilogue(frame),
    ]
    return LayerProgram(frame.weights, (*frame.input_data(1), *frame.recomputable(("x", *frame.weights), body)))
