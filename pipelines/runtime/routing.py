"""Experts on a rank: choice of experts, slots, and the products of experts (:mod:`autoddl.costmodel.kinds.experts`).

Tokens are (samples, rows, features) as everywhere, slots (experts, samples, capacity, features).  An empty slot holds zeros, and a
dropped choice reads zeros.  So tokens are copied to slots, and results back, by a lookup in a table with one more row, of zeros:

    slots of expert 1, capacity 2, of a sample whose tokens 0, 2 and 3 choose it first:   0 2      (token 3 is dropped)

Which experts a token chooses has no gradient.  It is computed with numpy, so that ties are broken in one way everywhere: the
expert with the lower number first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis

from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()
functional = flow.nn.functional

__all__ = ["assign_slots", "choose_experts", "collect", "dispatch", "expert_products", "gate_tokens", "route"]

Tensor = Any


def route(
    logits: Tensor,
    ranks: Ranks,
    per_token: int,
    capacity: int,
    renormalises: bool = False,
    sigmoid: bool = False,
    scaling: float = 1.0,
    groups: Sequence[int] = (1, 1),
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts for all tokens.

    Args:
        logits: Logits of the router, (samples, rows, experts).
        ranks: The ranks.
        per_token: Number of experts that a token chooses.
        capacity: Number of slots of an expert for each sample.
        renormalises: Whether the shares of a token's experts sum to 1.
        sigmoid: Whether shares are sigmoids of the logits instead of their softmax.
        scaling: Factor of the shares.
        groups: Number of groups of experts, and number of groups from which a token can choose.

    Returns:
        (shares of the chosen experts (tokens, per_token); the token in each slot, a vector; the slot of each choice, (tokens,
        per_token)).  An empty slot holds the number of tokens, a dropped choice the number of slots.
    """
    samples, rows, num = logits.shape
    scores = flow.sigmoid(logits) if sigmoid else functional.softmax(logits, dim=-1)
    chosen = choose_experts(scores.detach().numpy(), per_token, groups)
    tokens, places = assign_slots(chosen, num, capacity)
    entries = chosen.reshape(-1, per_token) + np.arange(samples * rows)[:, None] * num
    shares = functional.embedding(ranks.backend.tensor(entries), scores.reshape(-1, 1)).reshape(-1, per_token)
    if renormalises:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    if scaling != 1:
        shares = shares * scaling
    return shares, ranks.backend.tensor(tokens), ranks.backend.tensor(places)


def choose_experts(scores: np.ndarray, per_token: int, groups: Sequence[int] = (1, 1)) -> np.ndarray:
    """Return the experts with the highest scores (..., experts), (..., per_token), the best first.

    With groups, only experts of the groups with the best experts can be chosen.

    >>> choose_experts(np.array([[0.1, 0.4, 0.2, 0.3]]), 2, (2, 1)).tolist()
    [[1, 0]]
    """
    count, chosen = groups
    if chosen < count:
        by_group = scores.reshape(*scores.shape[:-1], count, -1)
        best = np.argsort(-by_group.max(axis=-1), axis=-1, kind="stable")[..., :chosen]
        is_open = np.zeros(by_group.shape[:-1], dtype=bool)
        np.put_along_axis(is_open, best, True, axis=-1)
        scores = np.where(is_open[..., None], by_group, -np.inf).reshape(scores.shape)
    return np.argsort(-scores, axis=-1, kind="stable")[..., :per_token]


def assign_slots(chosen: np.ndarray, num: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign the choices of all tokens to slots: in every sample, first all first choices, then all second ones, and so on.

    Args:
        chosen: Experts of the tokens, (samples, rows, per_token).
        num: Number of experts.
        capacity: Number of slots of an expert for each sample.

    Returns:
        (the token in each slot, (experts x samples x capacity), or the number of tokens; the slot of each choice, (tokens,
        per_token), or the number of slots).
    """
    samples, rows, per_token = chosen.shape
    queue = chosen.transpose(0, 2, 1).reshape(samples, -1)
    # The position of each choice among those of its sample and expert: sort them by expert, and count from its first one.
    order = np.argsort(queue, axis=1, kind="stable")
    counts = np.zeros((samples, num), dtype=np.int64)
    np.add.at(counts, (np.arange(samples)[:, None], queue), 1)
    starts = np.cumsum(counts, axis=1) - counts
    ranked = np.arange(queue.shape[1]) - np.take_along_axis(starts, np.take_along_axis(queue, order, 1), 1)
    positions = np.empty_like(ranked)
    np.put_along_axis(positions, order, ranked, axis=1)
    sample = np.arange(samples)[:, None]
    places = np.where(positions < capacity, (queue * samples + sample) * capacity + positions, num * samples * capacity)
    tokens = np.full(num * samples * capacity + 1, samples * rows, dtype=np.int64)
    tokens[places] = sample * rows + np.arange(queue.shape[1]) % rows
    return tokens[:-1], places.reshape(samples, per_token, rows).transpose(0, 2, 1).reshape(-1, per_token).copy()


def dispatch(x: Tensor, tokens: Tensor, num: int, capacity: int) -> Tensor:
    """Copy tokens (samples, rows, features) to slots (experts, samples, capacity, features)."""
    return rows_at(x.reshape(-1, x.shape[-1]), tokens).reshape(num, x.shape[0], capacity, x.shape[-1])


def collect(x: Tensor, shares: Tensor, places: Tensor, rows: int) -> Tensor:
    """Add up the results in slots (experts, samples, capacity, features) for each token, by their shares."""
    results = rows_at(x.reshape(-1, x.shape[-1]), places)
    return (results * shares.unsqueeze(-1)).sum(dim=1).reshape(x.shape[1], rows, x.shape[-1])


def rows_at(table: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of a table at indices; zeros for the index behind the last row."""
    zeros = flow.zeros(1, table.shape[-1], dtype=table.dtype, device=table.device)
    return functional.embedding(indices, flow.cat([table, zeros], dim=0))


def expert_products(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Run this rank's experts on their slots: down (silu(gate x) * up x); partial sums if p1 splits the inner features.

    Args:
        x: Tokens in slots, (experts, samples, capacity, features).
        gate, up: Matrices (experts, inner, features).
        down: Matrices (experts, features, inner).
    """
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    inner = functional.silu(flow.matmul(flat, gate, transpose_b=True)) * flow.matmul(flat, up, transpose_b=True)
    return flow.matmul(inner, down, transpose_b=True).reshape(*x.shape)


def gate_tokens(x: Tensor, y: Tensor, weight: Tensor, axes: Sequence[Axis], ranks: Ranks) -> Tensor:
    """Return y sigmoid(x w), with one number x w for each row.

    Args:
        x, y: Tensors whose features are split over ``axes``.
        weight: This rank's part of w, (1, features).
        axes: Mesh axes.
        ranks: The ranks.
    """
    return y * flow.sigmoid(ranks.sum((x * weight).sum(dim=-1, keepdim=True), axes))
