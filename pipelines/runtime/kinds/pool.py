"""Poolings on a rank: its own channels, and the halo of shared images."""

from __future__ import annotations

from ..statements import Call, LayerContext, LayerProgram, X, epilogue
from .conv2d import image_input, local_width, num_shifts, window_options

__all__ = ["program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a pooling."""
    layer, attributes = context.layer, context.layer.attributes
    shape = (layer.input_shape[0] // context.layout.num_parts, local_width(context))
    windows = (attributes["kernel_size"], attributes["stride"], attributes["padding"], bool(attributes["maximum"]))
    options = window_options(context)
    call = Call("pool_windows", (X, shape, *windows), options, num_steps=num_shifts(context), computes=True)
    body = [call, *epilogue(context)]
    data = image_input(context, maximum=bool(attributes["maximum"]))
    return LayerProgram((), (*data, *context.recomputable(("x",), body)))
