"""Linear layers on a rank: all-gather over p1, matrix product, reduce-scatter over p2; or a SUMMA product."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autoddl.costmodel.kinds.epilogue import LOSSES

from ..comm.layouts import are_stored_separately, product_order
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
)

__all__ = ["program"]


def program(frame: LayerContext) -> LayerProgram:
    layer, layout = frame.layer, frame.layout
    order = product_order(frame.graph, layer)
    count = len(order.widths) if are_stored_separately(order, frame.strategy) else 1
    has_bias = any(len(p.shape) == 1 for p in layer.parameters)
    weights, biases = _numbered("weight", count), _numbered("bias", count) if has_bias else ()
    widths = [width // order.num_groups for width in order.section_widths]
    product = _concatenated(weights, "weight", widths)
    if layout.summa:
        options = {"rows": layout.axes(0), "columns": layout.axes(1), "ranks": RANKS, "is_first": not frame.producers}
        product.append(Call("summa_product", (X, Name("weight")), options, num_steps=ALL_STEPS, computes=True))
    else:
        # The first layer reads the features that it needs directly.
        product += [along("all_gather", axis) for axis in layout.axes(1)] if frame.producers else []
        product.append(Call("matmul", (X, Name("weight")), computes=True))
    rest = [] if layout.summa else [along("reduce_scatter", axis) for axis in reversed(layout.axes(2))]
    if has_bias:
        rest += [*_concatenated(biases, "bias", widths), Call("add", (X, Name("bias")))]
    rest += epilogue(frame)
    statements: list[Statement] = [*frame.input_data(prod(layer.input_shape[:-1]), is_gathered=not layout.summa)]
    if layer.kept_elements:
        # The epilogue keeps its input for the backward: everything is recomputed.
        statements += frame.recomputable(("x", *weights, *biases), [*product, *rest])
    elif layout.summa:
        statements += [*product, *rest]  # keeps only its operands' shards anyway
    else:
        statements += [*frame.recomputable(("x", *weights), product), *rest]
    if LOSSES & set(layer.epilogue):
        options = {"is_squared": "mse_loss" in layer.epilogue}
        statements += [
            Call("data", (TARGETS, layout, RANKS), {"rows": layer.rows}, ("expected",)),
            Call("mean_error", (X, Name("expected"), RANKS), options),
        ]
    return LayerProgram((*weights, *biases), tuple(statements))


def _numbered(stem: str, count: int) -> tuple[str, ...]:
    return (stem,) if count == 1 else tuple(f"{stem}_{i}" for i in range(count))


def _concatenated(parts: Sequence[str], result: str, widths: Sequence[int]) -> list[Call]:
    if len(parts) == 1:
        return []
    return [Call("concat_grouped", (list(map(Name, parts)),), {"widths": list(widths)}, (result,))]
