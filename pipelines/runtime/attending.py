"""Attention on the heads and samples of one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .backend import is_on_gpu
from .blockwise import attend_blockwise, mask_of
from .load import load_oneflow
from .rows import along_rows, row_sums
from .stepping import Ranks

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["attend", "softmax"]

Tensor = Any


def attend(
    x: Tensor,
    ranks: Ranks,
    groups: int,
    group_heads: int,
    head_dim: int,
    causal: bool,
    theta: float | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
    window: int | None = None,
    is_fused: bool = False,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim)) v.

    Args:
        x: (samples, sequence, groups * (group_heads + 2) * head_dim): for each key-value head its query heads, key and value.
        ranks: The ranks.
        groups: Number of key-value heads.
        group_heads: Number of query heads per key-value head.
        head_dim: Features per head.
        causal: Whether every position attends only to itself and to earlier positions.
        theta: Base of the frequencies of rotary positions; None without rotary positions.
        drop: Dropout of the probabilities; None without dropout.
        window: Number of positions that a position of causal attention attends to, itself included; None for all of them.
        is_fused: Whether scores are computed block by block and not kept (:mod:`blockwise`); only without dropout. Otherwise
            all scores are computed, and the probabilities are kept.

    Returns:
        (samples, sequence, groups * group_heads * head_dim).
    """
    samples, sequence, _ = x.shape
    x = x.reshape(samples, sequence, groups, group_heads + 2, head_dim).permute(0, 2, 3, 1, 4)
    query, key, value = x[:, :, :group_heads], x[:, :, group_heads : group_heads + 1], x[:, :, group_heads + 1 :]
    if theta is not None:
        angles = rotary_angles(sequence, head_dim, theta, x.dtype, x.device.type)
        query, key = rotate(query, *angles), rotate(key, *angles)
    key, value = (t.reshape(samples, groups, sequence, head_dim) for t in (key, value))
    if is_fused:
        return attend_blockwise(query, key, value, causal, window, ranks.backend.master)
    # All query heads of a group use the same key, so their rows are stacked.
    query = query.reshape(samples, groups, group_heads * sequence, head_dim)
    # The query is scaled before the product, which could exceed the range of half precision.
    scores = flow.matmul(query * (1.0 / math.sqrt(head_dim)), key.transpose(-2, -1))
    mask = mask_of(sequence, sequence, 0, window, group_heads, x.device.type) if causal else None
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    probabilities = softmax(scores, ranks.backend.master)
    out = flow.matmul(probabilities if drop is None else drop(probabilities), value)
    out = out.reshape(samples, groups, group_heads, sequence, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(samples, sequence, groups * group_heads * head_dim)


def softmax(scores: Tensor, wide: Any) -> Tensor:
    """Return the softmax over the last dimension, computed in the type ``wide``. The kept values have the type of the scores."""
    if scores.dtype == wide or is_on_gpu(scores):  # kernels of GPUs compute half-precision inputs in single precision
        return flow.softmax(scores, dim=-1)
    saved: list[Tensor] = []

    def forward(ctx: Any, x: Tensor) -> Tensor:
        saved.append(flow.softmax(x.to(wide), dim=-1).to(x.dtype))
        return saved[0].clone()

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        y = saved[0].to(wide)
        weighted = dy.to(wide) * y
        return (weighted - y * along_rows(row_sums(weighted), y.shape[-1])).to(dy.dtype)

    return _Function.apply("softmax", forward, backward, scores)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of the last dimension by the angles with this cosine and sine."""
    half = x.shape[-1] // 2
    rotated = flow.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine + rotated * sine


@functools.cache
def rotary_angles(sequence: int, head_dim: int, theta: float, dtype: Any, device: str) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles theta^(-2 i / head_dim) * position, each (sequence, head_dim)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(sequence), np.concatenate([frequencies, frequencies]))
    cosine, sine = (flow.tensor(values, dtype=dtype, device=device) for values in (np.cos(angles), np.sin(angles)))
    return cosine, sine
