"""Attention that computes its scores block by block, and keeps none of them (Dao et al., FlashAttention, NeurIPS 2022).

Queries and keys are divided into blocks of `BLOCK` positions. For each block of queries Q_i, scaled by 1 / sqrt(head_dim), the
blocks of keys K_j and values V_j are visited that the mask does not discard as a whole. With the scores S = Q_i K_j^T of such a
block,

    P_j = softmax(S)        L_j = log(sum(exp(S)))        O_j = P_j V_j

are the probabilities, the logarithm of the sum of each row, and the result if this was the only block. Blocks are joined by

    L = log(sum over j of exp(L_j))        O = sum over j of exp(L_j - L) O_j

one after the other, which needs only the running O and L. With m the largest score of a row, exp(m - L_j) is its largest
probability, so that L_j = m - log(max(P_j)): on a CPU, OneFlow's softmax is five times faster than its exponential function.

For the backward pass, Q, K, V, O and L are kept. It computes S, P_j and L_j again. With c = exp(L_j - L), the probabilities are
c P_j; with the gradient G of O, g = c G and row sums d = sum(g O),

    dV_j = sum over i of P_j^T g        dS = P_j (g V_j^T - d)        dQ_i = sum over j of dS K_j        dK_j = sum over i of
    dS^T Q_i

where dQ_i is scaled like Q_i. If a row has a single block, L is not needed: c = 1.

Scores that the mask discards are set to `DISCARDED`. Every row of the block on the diagonal has a score that is not discarded.
A row of another block may have none; then its L_j is so small that exp(L_j - L) is zero.

If several ranks share a sample, the keys and values of all of them visit the queries of each, in one part or one after the other
(:mod:`sequences`): the loops over j go on from visit to visit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .detaching import detached
from .load import load_oneflow
from .rows import along_rows, row_sums
from .sequences import Alone, Segments, positions_of

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["BLOCK", "DISCARDED", "attend_blockwise", "mask_between", "mask_of"]

Tensor = Any

#: Positions of a block. Below, the time of a CPU goes into the calls of kernels; above, into scores that a causal mask discards.
BLOCK = 256
#: Score of a pair that the mask discards. Finite, so that a row of nothing else has a softmax.
DISCARDED = -1e30


def attend_blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
    wide: Any,
    sharing: Alone | None = None,
    block: int = BLOCK,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim)) v.

    Args:
        query: (samples, groups, heads per group, sequence, head_dim).
        key: (samples, groups, sequence, head_dim).
        value: (samples, groups, sequence, head_dim).
        causal: Whether every position attends only to itself and to earlier positions.
        window: Number of positions that a position of causal attention attends to, itself included; None for all of them.
        wide: Type of the scores, of the probabilities before their product, and of sums.
        sharing: How ranks share the positions of a sample; None if every rank has whole samples.
        block: Number of positions of a block.

    Returns:
        (samples, sequence, groups * heads per group * head_dim), the input of the next layer. It is kept for the backward pass,
        so it should not be changed.
    """
    saved: list[Any] = []
    sequence, head_dim = query.shape[3:]
    scale = 1.0 / math.sqrt(head_dim)
    sharing = Alone(((0, sequence),)) if sharing is None else sharing
    blocks = _blocks(sharing.own, block)

    def probabilities(rows: Tensor, keys: Tensor, one: _Block, other: _Block) -> tuple[Tensor, Tensor]:
        """Return P_j of a block of queries and one of keys, and the largest score of each row."""
        scores = flow.matmul(rows, keys, transpose_b=True).to(wide)
        if causal:
            shift = one.position - other.position
            mask = mask_of(one.length, other.length, shift, window, query.shape[2], query.device.type)
            scores = scores if mask is None else scores.masked_fill(mask, DISCARDED)
        return flow.softmax(scores, dim=-1), scores

    def forward(ctx: Any, *_: Tensor) -> Tensor:
        q, k, v = kept = [detached(tensor) for tensor in (query, key, value)]
        outputs: list[Any] = [None] * len(blocks)
        sums: list[Any] = [None] * len(blocks)

        def visit(keys: Tensor, values: Tensor, segments: Segments) -> None:
            others = _blocks(segments, block)
            for i, one in enumerate(blocks):
                visited = _visited(one, others, causal, window)
                rows = _rows_of(q, one) * scale if visited else None
                for other in visited:
                    p, scores = probabilities(rows, _part(keys, 2, other), one, other)
                    part = flow.matmul(p.to(q.dtype), _part(values, 2, other))
                    if len(visited) == 1 and sharing.has_one_visit:
                        outputs[i] = part
                        continue
                    part, log_sum = part.to(wide), _log_sums(scores, p)
                    if sums[i] is None:
                        outputs[i], sums[i] = part, log_sum
                        continue
                    total, largest = sums[i], flow.maximum(sums[i], log_sum)
                    joined = largest + flow.log(flow.exp(total - largest) + flow.exp(log_sum - largest))
                    scaled = _scaled(outputs[i], flow.exp(total - joined))
                    outputs[i], sums[i] = scaled + _scaled(part, flow.exp(log_sum - joined)), joined

        sharing.forward(k, v, visit)
        parts = [out.to(q.dtype).reshape(*q.shape[:3], -1, head_dim) for out in outputs]
        whole = parts[0] if len(parts) == 1 else flow.cat(parts, dim=3)
        result = whole.permute(0, 3, 1, 2, 4).reshape(q.shape[0], sequence, -1)
        saved[:] = [*kept, detached(result), sums]
        return result

    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, result, sums = saved
        heads = (q.shape[0], sequence, *q.shape[1:3], head_dim)
        dout, out = (t.reshape(*heads).permute(0, 2, 3, 1, 4) for t in (dy, result))
        dq: list[Any] = [0.0] * len(blocks)

        def visit(keys: Tensor, values: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
            others = _blocks(segments, block)
            dk: list[Any] = [None] * len(others)
            dv: list[Any] = [None] * len(others)
            for i, (one, total) in enumerate(zip(blocks, sums)):
                visited = _visited(one, others, causal, window)
                if not visited:
                    continue
                rows, dout_i, out_i = _rows_of(q, one) * scale, _rows_of(dout, one), _rows_of(out, one)
                for other in visited:
                    keys_j, number = _part(keys, 2, other), others.index(other)
                    p, scores = probabilities(rows, keys_j, one, other)
                    g = dout_i
                    if total is not None:
                        g = _scaled(g.to(wide), flow.exp(_log_sums(scores, p) - total)).to(q.dtype)
                    dp = flow.matmul(g, _part(values, 2, other), transpose_b=True).to(wide)
                    ds = p * (dp - along_rows(row_sums(g.to(wide) * out_i.to(wide)), other.length))
                    ds, p = ds.to(q.dtype), p.to(q.dtype)
                    dq[i] = flow.matmul(ds, keys_j) + dq[i]
                    dk[number] = _plus(flow.matmul(ds, rows, transpose_a=True), dk[number])
                    dv[number] = _plus(flow.matmul(p, g, transpose_a=True), dv[number])
            return _joined(dk, keys, others), _joined(dv, values, others)

        dkey, dvalue = sharing.backward(k, v, visit)
        drows = [(part * scale).reshape(*q.shape[:3], -1, head_dim) for part in dq]
        return drows[0] if len(drows) == 1 else flow.cat(drows, dim=3), dkey, dvalue

    return _Function.apply("attend_blockwise", forward, backward, query, key, value)


@functools.lru_cache(maxsize=16)
def mask_of(rows: int, columns: int, shift: int, window: int | None, heads: int, device: str) -> Tensor | None:
    """Return where a causal mask discards scores, (heads * rows, columns); None if it discards none.

    Args:
        rows: Number of queries.
        columns: Number of keys.
        shift: Position of the first query minus that of the first key.
        window: Number of positions that a position attends to, itself included; None for all earlier ones.
        heads: Number of query heads, whose rows are stacked.
        device: Type of device.
    """
    return mask_between(((shift, rows),), ((0, columns),), window, heads, device)


@functools.lru_cache(maxsize=16)
def mask_between(queries: Segments, keys: Segments, window: int | None, heads: int, device: str) -> Tensor | None:
    """Return what `mask_of` does, for the queries and the keys of segments."""
    distance = positions_of(queries)[:, None] - positions_of(keys)
    discarded = distance < 0
    if window is not None:
        discarded |= distance >= window
    return flow.tensor(np.tile(discarded, (heads, 1)), device=device) if discarded.any() else None


class _Block(NamedTuple):
    """Consecutive positions: the index of the first one among those of the rank, the first one itself, and their number."""

    start: int
    position: int
    length: int


def _blocks(segments: Segments, block: int) -> list[_Block]:
    """Divide the rows of segments into blocks of at most ``block`` consecutive positions."""
    blocks, start = [], 0
    for position, length in segments:
        for i in range(0, length, block):
            blocks.append(_Block(start + i, position + i, min(block, length - i)))
        start += length
    return blocks


def _visited(one: _Block, others: Sequence[_Block], causal: bool, window: int | None) -> list[_Block]:
    """Return the blocks of keys that a block of queries attends to; if it is causal, the last positions first."""
    if not causal:
        return list(others)
    last = one.position + one.length - 1
    first = 0 if window is None else one.position - window + 1
    visited = [other for other in others if other.position <= last and other.position + other.length > first]
    return sorted(visited, key=lambda other: -other.position)


def _plus(x: Tensor, other: Tensor | None) -> Tensor:
    return x if other is None else x + other


def _joined(gradients: Sequence[Tensor | None], x: Tensor, blocks: Sequence[_Block]) -> Tensor:
    """Concatenate the gradients of blocks of ``x``; None if no query attends to a block."""
    parts = [
        flow.zeros(*x.shape[:2], block.length, x.shape[3], dtype=x.dtype, device=x.device)
        if gradient is None
        else gradient
        for gradient, block in zip(gradients, blocks)
    ]
    return parts[0] if len(parts) == 1 else flow.cat(parts, dim=2)


def _log_sums(scores: Tensor, probabilities: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row of scores, with dimension 1 at the end."""
    return scores.amax(dim=-1, keepdim=True) - flow.log(probabilities.amax(dim=-1, keepdim=True))


def _scaled(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row by its factor."""
    return x * along_rows(factors, x.shape[-1])


def _rows_of(x: Tensor, block: _Block) -> Tensor:
    """Return positions of (samples, groups, heads, sequence, head_dim) as (samples, groups, heads * positions, head_dim)."""
    part = _part(x, 3, block)
    return part.reshape(*part.shape[:2], -1, part.shape[-1])


def _part(x: Tensor, dim: int, block: _Block) -> Tensor:
    """Return the positions of a block of a dimension."""
    return x if block.length == x.shape[dim] else flow.narrow(x, dim, block.start, block.length).contiguous()
