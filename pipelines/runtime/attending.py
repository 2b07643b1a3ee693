"""Attention on the heads and samples of one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis, prime_factors

from .backend import is_on_gpu
from .blockwise import attend_blockwise, mask_between
from .load import load_oneflow
from .rows import along_rows, row_sums
from .sequences import Alone, Segments, apart, ascending, mirrored, positions_of, sharing_of
from .stepping import Ranks

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["attend", "rotary_angles", "rotate", "separate", "softmax", "turn"]

Tensor = Any
DropProbabilities = Callable[[Tensor, np.ndarray, np.ndarray], Tensor]


def attend(
    x: Tensor,
    ranks: Ranks,
    groups: int,
    group_heads: int,
    head_dim: int,
    causal: bool,
    theta: float | None = None,
    drop: DropProbabilities | None = None,
    window: int | None = None,
    is_fused: bool = False,
    slices: int = 1,
    copy_axes: Sequence[Axis] = (),
    way: str = "",
    axes: Sequence[Axis] = (),
    is_mirrored: bool = False,
    turned: int = 0,
    is_of_neighbours: bool = False,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim)) v.

    Args:
        x: (samples, sequence, features): for each key-value head its query heads, key and value; or, if keys are divided into
            ``slices``, for each query head its features and a slice of its key and of its value.
        ranks: The ranks.
        groups: Number of key-value heads.
        group_heads: Number of query heads per key-value head.
        head_dim: Features per head.
        causal: Whether every position attends only to itself and to earlier positions.
        theta: Base of the frequencies of rotary positions; None without rotary positions.
        drop: Dropout of the probabilities, given the positions of queries and keys; None without dropout.
        window: Number of positions that a position of causal attention attends to, itself included; None for all of them.
        is_fused: Whether scores are computed block by block and not kept (:mod:`blockwise`); only without dropout. Otherwise
            all scores are computed, and the probabilities are kept.
        slices: Number of slices of a key, one for each of the query heads of all ranks that use it.
        copy_axes: Mesh axes of the ranks that use the same key and value. Each has the slices of its own query heads.
        way: How ranks that share the positions of a sample exchange keys and values (:mod:`sequences`); empty if every rank has
            whole samples.
        axes: Mesh axes of the ranks that share a sample.
        is_mirrored: Whether positions are in mirrored order.
        turned, is_of_neighbours: As those of `turn`.

    Returns:
        (samples, sequence, groups * group_heads * head_dim); ``sequence`` are the positions of this rank.
    """
    sharing = sharing_of(way, ranks, axes, x.shape[1] * prod(axis.size for axis in axes), is_mirrored)
    x = ascending(x) if is_mirrored else x
    query, key, value = separate(x, ranks, groups, group_heads, head_dim, slices, copy_axes)
    query, key = (turn(t, sharing.own, theta, turned, is_of_neighbours) for t in (query, key))
    if is_fused:
        out = attend_blockwise(query, key, value, causal, window, ranks.backend.master, sharing)
    else:
        out = _attend_densely(query, key, value, causal, window, ranks, drop, sharing, axes)
    return mirrored(out) if is_mirrored else out


def separate(
    x: Tensor, ranks: Ranks, groups: int, group_heads: int, head_dim: int, slices: int, copy_axes: Sequence[Axis]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (samples, groups, group_heads, sequence, head_dim), key and value (samples, groups, sequence, head_dim)."""
    samples, sequence, _ = x.shape
    if slices == 1:
        x = x.reshape(samples, sequence, groups, group_heads + 2, head_dim).permute(0, 2, 3, 1, 4)
        return x[:, :, :group_heads], x[:, :, group_heads], x[:, :, group_heads + 1]
    width = head_dim // slices
    x = x.reshape(samples, sequence, groups, group_heads, head_dim + 2 * width)
    query = x[..., :head_dim].permute(0, 2, 3, 1, 4)
    key, value = (
        x[..., first : first + width].permute(0, 2, 1, 3, 4).reshape(samples, groups, sequence, group_heads * width)
        for first in (head_dim, head_dim + width)
    )
    if not copy_axes:
        return query, key, value
    shape = (samples, groups, sequence, head_dim)
    both = flow.cat([key.reshape(1, -1, key.shape[-1]), value.reshape(1, -1, key.shape[-1])], dim=0)
    both = _in_feature_order(ranks.gather(both, copy_axes, 2), copy_axes)
    return query, both[0].reshape(*shape), both[1].reshape(*shape)


def _in_feature_order(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Sort the features that were gathered along axes, the last dimension of (2, rows, features).

    They are in the order of the ranks' coordinates, those of the last axis first. Between layers the first axis cuts the features
    first, and each axis one prime factor after the other, with the smallest stride first (:mod:`.costmodel.distribution`).
    """
    digits = [list(prime_factors(axis.size)) for axis in reversed(axes)]
    flat = [size for of_axis in digits for size in of_axis]
    # Position of each digit in the view (rows, digits of the last axis, ..., digits of the first axis, features).
    ends = np.cumsum([len(of_axis) for of_axis in digits])
    order = [
        place + 1
        for end, of_axis in zip(ends[::-1], digits[::-1])
        for place in range(end - 1, end - 1 - len(of_axis), -1)
    ]
    view = x.reshape(x.shape[0] * x.shape[1], *flat, -1)
    return view.permute(0, *order, len(flat) + 1).reshape(*x.shape)


def _attend_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
    ranks: Ranks,
    drop: DropProbabilities | None,
    sharing: Alone,
    axes: Sequence[Axis],
) -> Tensor:
    """Compute all scores at once; arguments and result as those of :func:`.blockwise.attend_blockwise`."""
    samples, groups, group_heads, sequence, head_dim = query.shape
    if axes:
        key, value = apart(ranks.gather(flow.cat([key, value], dim=3), axes, 2))
    # All query heads of a group use the same key, so their rows are stacked.
    query = query.reshape(samples, groups, group_heads * sequence, head_dim)
    # The query is scaled before the product, which could exceed the range of half precision.
    scores = flow.matmul(query * (1.0 / math.sqrt(head_dim)), key.transpose(-2, -1))
    if causal:
        mask = mask_between(tuple(sharing.own), tuple(sharing.every), window, group_heads, query.device.type)
        scores = scores if mask is None else scores.masked_fill(mask, float("-inf"))
    probabilities = softmax(scores, ranks.backend.master)
    if drop is not None:
        probabilities = drop(probabilities, positions_of(sharing.own), positions_of(sharing.every))
    out = flow.matmul(probabilities, value)
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


def turn(x: Tensor, segments: Segments, theta: float | None, turned: int = 0, is_of_neighbours: bool = False) -> Tensor:
    """Turn queries or keys by their positions.

    Args:
        x: (..., positions of the segments, features of a head).
        segments: The positions.
        theta: Base of the frequencies of rotary positions; None without them.
        turned: Number of features that are turned, the first ones of a head; 0 for all.
        is_of_neighbours: Whether the features 2 i and 2 i + 1 are a pair, and not the features i and i + turned / 2. Turned
            features have another order then, the same for queries and keys, whose products do not depend on it.
    """
    if theta is None:
        return x
    turned = turned or x.shape[-1]
    own, rest = (x, None) if turned == x.shape[-1] else (x[..., :turned], x[..., turned:])
    if is_of_neighbours:
        own = own.reshape(*own.shape[:-1], turned // 2, 2).transpose(-2, -1).reshape(*own.shape)
    own = rotate(own, *rotary_angles(segments, turned, theta, x.dtype, x.device.type))
    return own if rest is None else flow.cat([own, rest], dim=-1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of the last dimension by the angles with this cosine and sine."""
    half = x.shape[-1] // 2
    rotated = flow.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine + rotated * sine


@functools.cache
def rotary_angles(segments: Segments, head_dim: int, theta: float, dtype: Any, device: str) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles theta^(-2 i / head_dim) * position, each (positions of the segments, head_dim)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(positions_of(segments), np.concatenate([frequencies, frequencies]))
    cosine, sine = (flow.tensor(values, dtype=dtype, device=device) for values in (np.cos(angles), np.sin(angles)))
    return cosine, sine
