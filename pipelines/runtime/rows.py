"""Sums along rows, and numbers of each row written along it.

OneFlow 0.9.0's CPU kernels take about 46 ns an element to broadcast along the last dimension, which is also the backward pass of
a sum along it, and 25 ns for a layer norm: more than the matrix products around them.  A product with ones does the same in 1 ns.
On GPUs the plain operators are used.
"""

from __future__ import annotations

from typing import Any

from .load import load_oneflow

flow = load_oneflow()

__all__ = ["along_rows", "row_sums"]

Tensor = Any


def row_sums(x: Tensor) -> Tensor:
    """(..., features) -> (..., 1)."""
    if x.is_cuda:
        return x.sum(dim=-1, keepdim=True)
    return flow.matmul(x, flow.ones(x.shape[-1], 1, dtype=x.dtype))


def along_rows(values: Tensor, features: int) -> Tensor:
    """(..., 1) -> what (..., features) can be calculated with: that shape, or one that is broadcast to it."""
    if values.is_cuda:
        return values
    return flow.matmul(values, flow.ones(1, features, dtype=values.dtype))
