"""Linear layers on a rank: all-gather over p1, matrix product, reduce-scatter over p2; or a SUMMA product."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Parameter
from autoddl.costmodel.kinds.epilogue import LOSSES
from autoddl.costmodel.kinds.linear import output_width

from ..comm.parameter_layouts import are_stored_separately, product_order
from ..statements import (
    ALL_STEPS,
    RANKS,
    TARGETS,
    Call,
    LayerContext,
    LayerProgram,
    Name,
    Statement,
    X,
    along,
    epilogue,
    keeping_gate,
)

__all__ = ["layouts", "program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a matrix product.

    Raises:
        UserError: The layer's modules do not fit the layer that reads them, or an operation after the layer cannot be run.
    """
    layer, layout = context.layer, context.layout
    order = product_order(context.graph, layer)
    count = len(order.widths) if are_stored_separately(order, context.strategy) else 1
    has_bias = any(len(p.shape) == 1 for p in layer.parameters)
    weights, biases = _numbered("weight", count), _numbered("bias", count) if has_bias else ()
    widths = [width // order.num_groups for width in order.section_widths]
    # A layer that the backward pass runs again gathers everything again anyway.
    regathers = context.strategy.regathers and bool(context.producers and layout.axes(1)) and not context.is_rerun
    is_lean = regathers or (bool(context.shards) and not context.is_rerun)
    product = [] if is_lean else [*context.gathering(weights), *_concatenated(weights, "weight", widths)]
    if is_lean:
        product.append(_lean_product(context, weights, widths, regathers))
    elif layout.summa:
        options = {"rows": layout.axes(0), "columns": layout.axes(1), "ranks": RANKS, "is_first": not context.producers}
        product.append(Call("summa_product", (X, Name("weight")), options, num_steps=ALL_STEPS, computes=True))
    else:
        # The first layer reads the features that it needs directly.
        product += [along("all_gather", axis) for axis in layout.axes(1)] if context.producers else []
        product.append(Call("matmul", (X, Name("weight")), computes=True))
    rest = [] if layout.summa else [along("reduce_scatter", axis) for axis in reversed(layout.axes(2))]
    if has_bias:
        rest += [*_concatenated(biases, "bias", widths), Call("add", (X, Name("bias")))]
    rest += epilogue(context)
    statements: list[Statement] = [*context.input_data(prod(layer.input_shape[:-1]), is_gathered=not layout.summa)]
    if layer.keeps_own and context.recompute:
        # The epilogue keeps its input for the backward: everything is recomputed.
        statements += context.recomputable(("x", *weights, *biases), [*product, *rest])
    elif layout.summa:
        statements += [*product, *keeping_gate(rest)]  # keeps only its operands' shards anyway
    else:
        statements += [*context.recomputable(("x", *weights), product), *keeping_gate(rest)]
    if LOSSES & set(layer.epilogue):
        axes = [axis for which in range(3) for axis in layout.axes(which)]
        options = {"axes": axes, "is_squared": "mse_loss" in layer.epilogue}
        statements += [
            Call("data", (TARGETS, layout, RANKS), {"rows": layer.rows, **context.order}, ("expected",)),
            Call("mean_error", (X, Name("expected"), RANKS), options),
        ]
    return LayerProgram((*weights, *biases), tuple(statements))


def _lean_product(context: LayerContext, weights: Sequence[str], widths: Sequence[int], regathers: bool) -> Call:
    """Return the product that keeps no gathered weight or, if ``regathers``, no gathered input."""
    columns = context.layout.axes(1) if context.producers else ()
    options = {
        "columns": list(columns),
        "shards": list(context.shards),
        "shapes": list(context.shapes[: len(weights)]) if context.shards else [],
        "widths": list(widths) if len(weights) > 1 else [],
        "regathers": regathers,
        "is_first": not context.producers,
    }
    options = {name: value for name, value in options.items() if value}
    arguments = (X, [Name(weight) for weight in weights], RANKS)
    return Call("lean_product", arguments, options, num_steps=len(columns) + len(context.shards), computes=True)


def layouts(context: LayerContext, parameters: Sequence[Parameter]) -> Call:
    """Return the call that describes the layouts of weights and biases of a linear layer.

    Raises:
        UserError: only some of the layer's modules have a bias, or they do not fit the reader of the layer.
    """
    layer = context.layer
    order = product_order(context.graph, layer)
    num_weights = sum(len(p.shape) == 2 for p in layer.parameters)
    if len(layer.parameters) - num_weights not in (0, num_weights):
        raise UserError(f"{layer.describe()}: some of its modules have a bias and some do not; all or none should")
    weights = {p.name: output_width(layer, p) for p in parameters if len(p.shape) == 2}
    biases = {p.name: p.shape[0] for p in parameters if len(p.shape) == 1}
    arguments = (weights, biases, layer.attributes["in_features"], context.layout)
    is_grouped = order.num_groups > 1
    options: dict[str, Any] = {}
    options |= {"sections": order.section_widths, "num_groups": order.num_groups} if is_grouped else {}
    options |= {"is_transposed": True} if layer.attributes.get("transposed") else {}
    return Call("linear_layouts", arguments, options)


def _numbered(stem: str, count: int) -> tuple[str, ...]:
    return (stem,) if count == 1 else tuple(f"{stem}_{i}" for i in range(count))


def _concatenated(parts: Sequence[str], result: str, widths: Sequence[int]) -> list[Call]:
    if len(parts) == 1:
        return []
    return [Call("concat_grouped", (list(map(Name, parts)),), {"widths": list(widths)}, (result,))]
