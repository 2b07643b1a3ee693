"""Element-wise operations behind a layer: what their backward passes keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

__all__ = ["GATES", "KEPT_PER_ELEMENT", "kept_by_epilogue"]

#: What the backward pass of an element-wise operation keeps, per element of its result: 0 where the result itself is enough
#: (it is the next layer's input), 1 for the argument, 2 for the factors of a product; dropout keeps a mask of bytes.
KEPT_PER_ELEMENT: Mapping[str, float] = {
    **dict.fromkeys(("relu", "sigmoid", "tanh"), 0),
    **dict.fromkeys(("cast", "negative", "reduce_sum", "scalar_add", "scalar_div", "scalar_mul", "sub", "sum"), 0),
    "dropout": 0.25,
    "gelu": 1,
    "silu": 1,
    "quick_gelu": 1,
    "mse_loss": 1,
    "mul": 2,
}

#: Epilogue operations that halve the features: they take gate and up apart.
GATES = frozenset({"mul"})


def kept_by_epilogue(epilogue: Iterable[str], elements: int) -> int:
    """Elements kept by the backward pass of element-wise operations on ``elements`` elements (unknown ones: 1 each)."""
    return math.ceil(sum(KEPT_PER_ELEMENT.get(operation, 1) for operation in epilogue) * elements)
