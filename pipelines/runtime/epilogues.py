"""Element-wise operations behind a layer, on its evenly split output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autoddl.costmodel.errors import UserError

from .dropouts import dropouts_behind
from .load import load_oneflow
from .setting import LayerSetting

flow = load_oneflow()

__all__ = ["LOSSES", "epilogue"]


Tensor = Any


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + flow.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


#: By OneFlow's names of the operators, and the usual ones.
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": flow.relu,
    "gelu": flow.nn.functional.gelu,
    "fast_gelu": _tanh_gelu,
    "gelu_tanh": _tanh_gelu,
    "quick_gelu": lambda x: x * flow.sigmoid(1.702 * x),
    "silu": flow.nn.functional.silu,
    "sigmoid": flow.sigmoid,
    "sigmoid_v2": flow.sigmoid,
    "tanh": flow.tanh,
    "elu": flow.nn.functional.elu,
    "selu": flow.nn.functional.selu,
    "mish": flow.nn.functional.mish,
    "softplus": flow.nn.functional.softplus,
    "square": flow.square,
    "abs": flow.abs,
    "exp": flow.exp,
    "identity": lambda x: x,
}


#: Element-wise losses that end a model; :mod:`losses` has them.
LOSSES = frozenset({"mse_loss", "l1_loss"})


def epilogue(setting: LayerSetting) -> Callable[[Tensor, int | None], Tensor]:
    """A layer's element-wise operations as one function of (its output, the number of the pass; None outside of training).

    A gate ("mul") halves the features: they alternate, and what comes before it is done to the first of each pair.

    Raises:
        UserError: an operation is not known.
    """
    layer = setting.layer
    operations = [operation for operation in layer.epilogue if operation not in LOSSES]
    for operation in operations:
        if operation not in FUNCTIONS and operation not in ("mul", "dropout"):
            raise UserError(
                f"{layer.describe()}: {operation!r} behind it cannot be run, known are {', '.join(FUNCTIONS)}, mul and dropout"
            )
    dropouts = dropouts_behind(setting)

    def apply(x: Tensor, step: int | None) -> Tensor:
        factor, drawn = None, iter(dropouts)
        if "mul" in operations:
            pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
            x, factor = pairs[..., 0], pairs[..., 1]
        for operation in operations:
            if operation == "mul":
                x = x * factor
            elif operation == "dropout":
                x = next(drawn)(x, step)
            else:
                x = FUNCTIONS[operation](x)
        return x

    return apply
