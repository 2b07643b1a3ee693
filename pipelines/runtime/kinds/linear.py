"""Linear layers on a rank: gathers over p1, the product, reduce-scatters over p2; or a Summa product."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..layouts import are_apart, product_order
from ..statements import (
    ALL_STEPS,
    LOSSES,
    RANKS,
    TARGETS,
    Call,
    Frame,
    LayerProgram,
    Name,
    Statement,
    X,
    along,
    epilogue,
)

__all__ = ["program"]


def program(frame: Frame) -> LayerProgram:
    layer, layout = frame.layer, frame.layout
    order = product_order(frame.graph, layer)
    count = len(order.widths) if are_apart(order, frame.strategy) else 1
    has_bias = any(len(p.shape) == 1 for p in layer.parameters)
    weights, biases = _numbered("weight", count), _numbered("bias", count) if has_bias else ()
    widths = [width // order.num_groups for width in order.section_widths]
    product = _side_by_side(weights, "weight", widths)
    if layout.summa:
        options = {"rows": layout.axes(0), "columns": layout.axes(1), "ranks": RANKS, "is_first": not frame.producers}
        product.append(Call("summa_product", (X, Name("weight")), options, num_steps=ALL_STEPS, computes=True))
    else:
        # The first layer reads what it needs.
        product += [along("all_gather", axis) for axis in layout.axes(1)] if frame.producers else []
        product.append(Call("matmul", (X, Name("weight")), computes=True))
    rest = [] if layout.summa else [along("reduce_scatter", axis) for axis in reversed(layout.axes(2))]
    if has_bias:
        rest += [*_side_by_side(biases, "bias", widths), Call("add", (X, Name("bias")))]
    rest += epilogue(frame)
    statements: list[Statement] = [*frame.fed(prod(layer.input_shape[:-1]), is_gathered=not layout.summa)]
    if layer.kept_elements:
        # Something behind the product keeps its argument: all is repeated.
        statements += frame.kept(("x", *weights, *biases), [*product, *rest])
    elif layout.summa:
        statements += [*product, *rest]  # keeps no more than its operands' shards anyway
    else:
        statements += [*frame.kept(("x", *weights), product), *rest]
    if LOSSES & set(layer.epilogue):
        options = {"is_squared": "mse_loss" in layer.epilogue}
        statements += [
            Call("data", (TARGETS, layout, RANKS), {"rows": layer.rows}, ("expected",)),
            Call("mean_of_differences", (X, Name("expected"), RANKS), options),
        ]
    return LayerProgram((*weights, *biases), tuple(statements))


def _numbered(stem: str, count: int) -> tuple[str, ...]:
    return (stem,) if count == 1 else tuple(f"{stem}_{i}" for i in range(count))


def _side_by_side(parts: Sequence[str], result: str, widths: Sequence[int]) -> list[Call]:
    if len(parts) == 1:
        return []
    return [Call("side_by_side", (list(map(Name, parts)),), {"widths": list(widths)}, (result,))]
