"""Sums over the last dimension, and broadcasts along the last dimension, as matrix products with ones.

OneFlow 0.9.0's CPU kernels take about 46 ns per element to broadcast along the last dimension, which is also the backward pass of
a sum over the last dimension, and 25 ns per element for a layer norm. This is more than the matrix products of a layer take. A
product with ones takes 1 ns per element. On GPUs the usual operators are used.
"""

from __future__ import annotations

from typing import Any

from .backend import is_on_gpu
from .load import load_oneflow

flow = load_oneflow()

__all__ = ["along_rows", "row_sums"]

Tensor = Any


def row_sums(x: Tensor) -> Tensor:
    """Sum over the last dimension: (..., features) to (..., 1)."""
    if is_on_gpu(x):
        return x.sum(dim=-1, keepdim=True)
    return flow.matmul(x, flow.ones(x.shape[-1], 1, dtype=x.dtype, device=x.device))


def along_rows(values: Tensor, features: int) -> Tensor:
    """Broadcast (..., 1) to (..., features). On GPUs ``values`` is returned unchanged, since operators broadcast it."""
    if is_on_gpu(values):
        return values
    return flow.matmul(values, flow.ones(1, features, dtype=values.dtype, device=values.device))
