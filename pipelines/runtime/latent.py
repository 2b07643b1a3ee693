"""The core of latent attention on the heads and samples of one rank (:mod:`autoddl.costmodel.kinds.latent`)."""

from __future__ import annotations

from typing import Any

from .attending import attend, rotary_angles, rotate
from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()

__all__ = ["attend_latent"]

Tensor = Any


def attend_latent(
    queries: Tensor,
    keys_values: Tensor,
    shared: Tensor,
    ranks: Ranks,
    heads: int,
    head_dim: int,
    value_dim: int,
    causal: bool,
    theta: float | None = None,
    is_fused: bool = False,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim + rotary features)) v.  Values are padded with zeros to the size of keys.

    Args:
        queries: (samples, sequence, heads * (head_dim + rotary features)).
        keys_values: (samples, sequence, heads * (head_dim + value_dim)).
        shared: Rotated features of all keys, (samples, sequence, rotary features).
        ranks: The ranks.
        heads: Number of heads.
        head_dim: Features of queries and keys without position.
        value_dim: Features of values, at most as many as those of a key.
        causal: Whether every position attends only to itself and to earlier positions.
        theta: Base of the frequencies of rotary positions; None without rotary positions.
        is_fused: Whether scores are computed block by block and not kept.

    Returns:
        (samples, sequence, heads * value_dim).
    """
    samples, sequence, rotary_dim = shared.shape
    queries = queries.reshape(samples, sequence, heads, head_dim + rotary_dim)
    keys_values = keys_values.reshape(samples, sequence, heads, head_dim + value_dim)
    turned, common = queries[..., head_dim:], shared.unsqueeze(2)
    if theta is not None:
        angles = rotary_angles(((0, sequence),), rotary_dim, theta, shared.dtype, shared.device.type)
        cosine, sine = (angle.reshape(1, sequence, 1, rotary_dim) for angle in angles)
        turned, common = rotate(turned, cosine, sine), rotate(common, cosine, sine)
    parts = [queries[..., :head_dim], turned, keys_values[..., :head_dim]]
    parts.append(common.expand(samples, sequence, heads, rotary_dim))
    parts.append(keys_values[..., head_dim:])
    missing = head_dim + rotary_dim - value_dim
    if missing:
        parts.append(flow.zeros(samples, sequence, heads, missing, dtype=shared.dtype, device=shared.device))
    x = flow.cat(parts, dim=3).reshape(samples, sequence, -1)
    y = attend(x, ranks, heads, 1, head_dim + rotary_dim, causal, is_fused=is_fused)
    y = y.reshape(samples, sequence, heads, head_dim + rotary_dim)[..., :value_dim]
    return y.reshape(samples, sequence, heads * value_dim)
