"""Attention on the heads and samples of one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .load import load_oneflow

flow = load_oneflow()

__all__ = ["attend", "rotary_angles"]

Tensor = Any


def attend(
    x: Tensor,
    groups: int,
    group_heads: int,
    head_dim: int,
    causal: bool,
    angles: tuple[Tensor, Tensor] | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim)) v.

    Args:
        x: (samples, sequence, groups * (group_heads + 2) * head_dim): for each key-value head its query heads, key and value.
        groups: Number of key-value heads.
        group_heads: Number of query heads per key-value head.
        head_dim: Features per head.
        causal: Whether every position attends only to itself and to earlier positions.
        angles: Cosine and sine of the rotary angles, each (sequence, head_dim); None without rotary positions.
        drop: Dropout of the probabilities; None without dropout.

    Returns:
        (samples, sequence, groups * group_heads * head_dim).
    """
    samples, sequence, _ = x.shape
    x = x.reshape(samples, sequence, groups, group_heads + 2, head_dim).permute(0, 2, 3, 1, 4)
    query, key, value = x[:, :, :group_heads], x[:, :, group_heads : group_heads + 1], x[:, :, group_heads + 1 :]
    if angles is not None:
        query, key = rotate(query, *angles), rotate(key, *angles)
    # All query heads of a group use the same key, so their rows are stacked.
    query = query.reshape(samples, groups, group_heads * sequence, head_dim)
    key, value = (t.reshape(samples, groups, sequence, head_dim) for t in (key, value))
    scores = flow.matmul(query, key.transpose(-2, -1)) * (1.0 / math.sqrt(head_dim))
    if causal:
        mask = flow.tril(flow.ones(sequence, sequence)).repeat(group_heads, 1)
        scores = scores.masked_fill(mask == 0, float("-inf"))
    probabilities = flow.softmax(scores, dim=-1)
    out = flow.matmul(probabilities if drop is None else drop(probabilities), value)
    out = out.reshape(samples, groups, group_heads, sequence, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(samples, sequence, groups * group_heads * head_dim)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of the last dimension by the angles with this cosine and sine."""
    half = x.shape[-1] // 2
    rotated = flow.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine + rotated * sine


@functools.cache
def rotary_angles(sequence: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles theta^(-2 i / head_dim) * position, each (sequence, head_dim)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(sequence), np.concatenate([frequencies, frequencies]))
    return flow.tensor(np.cos(angles).astype(np.float32)), flow.tensor(np.sin(angles).astype(np.float32))
