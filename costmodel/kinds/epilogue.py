"""Element-wise operations after a layer: the activations that they keep for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["GATES", "KEPT_PER_ELEMENT", "LOSSES", "kept_by_epilogue"]

#: Elements that an element-wise operation keeps for the backward pass, per element of its result: 0 if the result suffices (it is
#: the next layer's input), 1 for the argument, 2 for the factors of a product.  The mask of a dropout has one byte per element in
#: every precision, so it is counted apart (:attr:`autoddl.costmodel.layer.Layer.mask_bytes`).
KEPT_PER_ELEMENT: Mapping[str, int] = {
    **dict.fromkeys(("relu", "sigmoid", "tanh"), 0),
    **dict.fromkeys(("cast", "negative", "reduce_sum", "scalar_add", "scalar_div", "scalar_mul", "sub", "sum"), 0),
    "dropout": 0,
    "gelu": 1,
    "silu": 1,
    "quick_gelu": 1,
    "mse_loss": 1,
    "mul": 2,
    "mul_last": 2,
}

#: Epilogue operations that halve the features: they multiply the two halves. The operations before apply to one of them, the gate:
#: the first half for ``mul``, the last one for ``mul_last``.
GATES = frozenset({"mul", "mul_last"})

#: Element-wise losses. As the last operation of the last layer, they end a model and read targets.
LOSSES = frozenset({"mse_loss", "l1_loss"})


def kept_by_epilogue(epilogue: Iterable[str], elements: int) -> int:
    """Return the number of elements that operations on ``elements`` elements keep for the backward pass.

    An operation that is not in `KEPT_PER_ELEMENT` keeps one element for each element of its result.

    >>> kept_by_epilogue(["gelu", "dropout"], 1024), kept_by_epilogue(["silu", "mul"], 1024)
    (1024, 2048)
    """
    operations = list(epilogue)
    kept = sum(KEPT_PER_ELEMENT.get(operation, 1) for operation in operations)
    # The activation of a gate is computed again from the gate, which the gate's product keeps: gate and factor are kept alone.
    gates = (before for before, after in zip(operations, operations[1:]) if after in GATES)
    return (kept - sum(KEPT_PER_ELEMENT.get(operation, 1) for operation in gates)) * elements
