"""Attention whose scores a traced model changes before the softmax, on the heads and samples of one rank.

What changes them are tensors of 5 dimensions (samples, windows, heads, queries, keys), each 1 where all have the same. They come
from a program of the model (:attr:`autoddl.costmodel.layer.Layer.scores`), which every rank runs for all heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis

from .attending import DropProbabilities, separate, softmax, turn
from .comm.layouts import Layout
from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()

__all__ = ["among_zeros", "attend_changed", "own_heads"]

Tensor = Any


def attend_changed(
    x: Tensor,
    ranks: Ranks,
    groups: int,
    group_heads: int,
    head_dim: int,
    changes: Sequence[tuple[str, Tensor, float]] = (),
    others: Sequence[Tensor] = (),
    windows: int = 1,
    theta: float | None = None,
    drop: DropProbabilities | None = None,
    slices: int = 1,
    copy_axes: Sequence[Axis] = (),
    turned: int = 0,
    is_of_neighbours: bool = False,
) -> Tensor:
    """Compute softmax(changes of q k^T / sqrt(head_dim)) v. All scores exist at once.

    Args:
        x, ranks, groups, group_heads, head_dim, theta, drop, slices, copy_axes, turned, is_of_neighbours: As those of
            :func:`.attending.attend`.
        changes: What is done to the scores, in order: a role of :data:`autoddl.costmodel.program.ROLES`, a tensor of this rank's
            heads, and the role's value.
        others: Keys and values if they are of other rows than the queries, each (samples, key rows, groups * head_dim). ``x`` are
            the queries alone then.
        windows: Number of windows of successive positions that attend to themselves alone.

    Returns:
        (samples, sequence, groups * group_heads * head_dim).
    """
    samples, sequence, _ = x.shape
    if others:
        query = x.reshape(samples, sequence, groups, group_heads, head_dim).permute(0, 2, 3, 1, 4)
        key, value = (t.reshape(samples, -1, groups, head_dim).transpose(1, 2) for t in others)
    else:
        query, key, value = separate(x, ranks, groups, group_heads, head_dim, slices, copy_axes)
    query, key = (turn(t, ((0, t.shape[-2]),), theta, turned, is_of_neighbours) for t in (query, key))
    heads, rows, keys = groups * group_heads, sequence // windows, key.shape[2] // windows

    def in_windows(x: Tensor, length: int) -> Tensor:
        return x.reshape(samples, heads, windows, length, head_dim).transpose(1, 2)

    def of_heads(x: Tensor) -> Tensor:
        return in_windows(x.unsqueeze(2).expand(samples, groups, group_heads, windows * keys, head_dim), keys)

    # The query is scaled before the product, which could exceed the range of half precision.
    query = in_windows(query, rows) * (1.0 / math.sqrt(head_dim))
    scores = flow.matmul(query, of_heads(key).transpose(-2, -1))
    for role, tensor, number in changes:
        scores = _changed(scores, role, tensor, number)
    probabilities = softmax(scores, ranks.backend.master)
    if drop is not None:
        probabilities = drop(probabilities, np.arange(rows), np.arange(keys))
    out = flow.matmul(probabilities, of_heads(value))
    return out.permute(0, 1, 3, 2, 4).reshape(samples, sequence, heads * head_dim)


def _changed(scores: Tensor, role: str, tensor: Tensor, number: float) -> Tensor:
    if role == "add":
        return scores + tensor
    if role == "subtract":
        return scores - tensor
    if role == "multiply":
        return scores * tensor
    mask = tensor != 0 if role == "fill" else tensor == 0
    return scores.masked_fill(mask, number)


def own_heads(x: Tensor, shape: Sequence[int], layout: Layout, heads: int, ranks: Ranks) -> Tensor:
    """Return what changes the scores of this rank's heads.

    Args:
        x: What changes the scores of all heads.
        shape: Its 5 dimensions.
        layout: Layout of the layer.
        heads: Query heads of all ranks.
        ranks: The ranks.
    """
    x, own = x.reshape(*shape), layout.blocks(heads)[ranks.rank]
    return x if shape[2] == 1 else flow.narrow(x, 2, int(own[0]), len(own))


def among_zeros(table: Tensor, layout: Layout, heads: int, ranks: Ranks) -> Tensor:
    """Return a table (rows, heads of all ranks): the columns of this rank's heads, which it holds, and zeros in the others."""
    own = layout.blocks(heads)[ranks.rank]
    before, shape = int(own[0]), list(table.shape[:-1])
    zeros = [
        flow.zeros(*shape, width, dtype=table.dtype, device=table.device) if width else None
        for width in (before, heads - before - len(own))
    ]
    return flow.cat([part for part in (zeros[0], table, zeros[1]) if part is not None], dim=-1)
