"""Convolutions on a rank: all-gather over p1, halo, product, reduce-scatter over p2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.graph import Layer, Parameter
from autoddl.costmodel.kinds.sharing import halo_of

from ..load import load_oneflow
from ..statements import (
    DATA,
    RANKS,
    Call,
    LayerContext,
    LayerProgram,
    Name,
    Statement,
    X,
    along,
    epilogue,
)

__all__ = ["image_input", "layouts", "local_width", "num_shifts", "plain_module", "program", "window_options"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a convolution."""
    layer, layout = context.layer, context.layout
    is_first, scatters = not context.producers, bool(layout.axes(2))
    has_bias = len(context.weights) > 1
    bias = Name("bias") if has_bias and not scatters else None
    options = {"options": context.fact("options", "convolution_options"), **window_options(context)}
    arguments = (X, local_width(context), Name("weight"), bias)
    product = [] if is_first else [along("all_gather", axis) for axis in layout.axes(1)]
    product.append(Call("convolve", arguments, options, num_steps=num_shifts(context), computes=True))
    rest = [along("reduce_scatter", axis) for axis in reversed(layout.axes(2))]
    if has_bias and scatters:
        rest.append(Call("add_to_channels", (X, Name("bias"))))
    rest += epilogue(context)
    statements: list[Statement] = list(image_input(context, is_gathered=True))
    if layer.keeps_own and context.recompute:
        statements += context.recomputable(("x", *context.weights), [*product, *rest])
    else:
        kept = context.weights if bias is not None else context.weights[:1]
        statements += [*context.recomputable(("x", *kept), product), *rest]
    return LayerProgram(context.weights, tuple(statements))


def image_input(context: LayerContext, is_gathered: bool = False, maximum: bool = False) -> list[Call]:
    """Return the statement that loads the model's images, with the halo, if the layer has no producers, else no statement."""
    if context.producers:
        return []
    options: dict[str, Any] = {"is_gathered": True} if is_gathered else {}
    if context.strategy.positions:
        options |= _tile(context)
        options.update({"maximum": True} if maximum else {})
    return [Call("image_data", (DATA, context.layout, RANKS), options)]


def window_options(context: LayerContext) -> dict[str, Any]:
    """Return the options of windows whose ranks share images; none if every rank has whole images."""
    if not context.strategy.positions:
        return {}
    options = {**_tile(context), "ranks": RANKS}
    return {**options, "is_first": True} if not context.producers else options


def _tile(context: LayerContext) -> dict[str, Any]:
    """Return the options that describe which ranks share images, and their halo."""
    axes = {"rows": list(context.strategy.row_axes), "columns": list(context.strategy.column_axes)}
    return {"halo": halo_of(context.layer), **{name: value for name, value in axes.items() if value}}


def local_width(context: LayerContext) -> int:
    """Return the pixels of a row of a rank's images; data that ranks share has the halo already."""
    across = context.strategy.tiles[1]
    has_halo = across > 1 and not context.producers
    return context.layer.input_shape[2] // across + (sum(halo_of(context.layer) or ()) if has_halo else 0)


def num_shifts(context: LayerContext) -> int:
    """Return the number of steps that bring the halo."""
    is_first, strategy = not context.producers, context.strategy
    num_axes = len(strategy.row_axes) + len(strategy.column_axes)
    return 0 if is_first else sum(map(bool, halo_of(context.layer) or ())) * num_axes


def layouts(context: LayerContext, parameters: Sequence[Parameter]) -> Call:
    """Return the call that describes the layouts of the weight and the bias of a convolution."""
    weights = {p.name: p.shape[0] for p in parameters if len(p.shape) > 1}
    biases = {p.name: p.shape[0] for p in parameters if len(p.shape) == 1}
    attributes = context.layer.attributes
    window = (attributes["kernel_size"],) * 2
    return Call("linear_layouts", (weights, biases, attributes["in_channels"], context.layout), {"window": window})


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
