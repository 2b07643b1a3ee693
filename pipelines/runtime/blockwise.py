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
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from .detaching import detached
from .load import load_oneflow
from .rows import along_rows, row_sums

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["BLOCK", "DISCARDED", "attend_blockwise", "mask_of"]

Tensor = Any

#: Positions of a block. Below, the time of a CPU goes into the calls of kernels; above, into scores that a causal mask discards.
BLOCK = 256
#: Score of a pair that the mask discards. Finite, so that a row of nothing else has a softmax.
DISCARDED = -1e30


def attend_blockwise(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None, wide: Any, block: int = BLOCK
) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim)) v.

    Args:
        query: (samples, groups, heads per group, sequence, head_dim).
        key: (samples, groups, sequence, head_dim).
        value: (samples, groups, sequence, head_dim).
        causal: Whether every position attends only to itself and to earlier positions.
        window: Number of positions that a position of causal attention attends to, itself included; None for all of them.
        wide: Type of the scores, of the probabilities before their product, and of sums.
        block: Number of positions of a block.

    Returns:
        (samples, sequence, groups * heads per group * head_dim), the input of the next layer. It is kept for the backward pass,
        so it should not be changed.
    """
    saved: list[Any] = []
    sequence, head_dim = query.shape[3:]
    scale = 1.0 / math.sqrt(head_dim)
    starts = range(0, sequence, block)

    def probabilities(rows: Tensor, keys: Tensor, i: int, j: int) -> tuple[Tensor, Tensor]:
        """Return P_j of the blocks that begin at positions i and j, and the largest score of each row."""
        scores = flow.matmul(rows, keys, transpose_b=True).to(wide)
        if causal:
            mask = mask_of(min(block, sequence - i), keys.shape[2], i - j, window, query.shape[2], query.device.type)
            scores = scores if mask is None else scores.masked_fill(mask, DISCARDED)
        return flow.softmax(scores, dim=-1), scores

    def forward(ctx: Any, *_: Tensor) -> Tensor:
        q, k, v = kept = [detached(tensor) for tensor in (query, key, value)]
        outputs, sums = [], []
        for i in starts:
            rows = _rows_of(q, i, block) * scale
            out, total = None, None
            visited = _visited(i, starts, causal, window, block)
            for j in visited:
                p, scores = probabilities(rows, _part(k, 2, j, block), i, j)
                part = flow.matmul(p.to(q.dtype), _part(v, 2, j, block))
                if len(visited) == 1:
                    out = part
                    continue
                part, log_sum = part.to(wide), _log_sums(scores, p)
                if out is None:
                    out, total = part, log_sum
                    continue
                largest = flow.maximum(total, log_sum)
                joined = largest + flow.log(flow.exp(total - largest) + flow.exp(log_sum - largest))
                out = _scaled(out, flow.exp(total - joined)) + _scaled(part, flow.exp(log_sum - joined))
                total = joined
            assert out is not None  # every row attends to itself at least
            outputs.append(out.to(q.dtype).reshape(*q.shape[:3], -1, head_dim))
            sums.append(total)
        whole = outputs[0] if len(outputs) == 1 else flow.cat(outputs, dim=3)
        result = whole.permute(0, 3, 1, 2, 4).reshape(q.shape[0], sequence, -1)
        saved[:] = [*kept, detached(result), sums]
        return result

    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, result, sums = saved
        heads = (q.shape[0], sequence, *q.shape[1:3], head_dim)
        dout, out = (t.reshape(*heads).permute(0, 2, 3, 1, 4) for t in (dy, result))
        dq, dk, dv = [], [0.0] * len(starts), [0.0] * len(starts)
        for i, total in zip(starts, sums):
            rows = _rows_of(q, i, block) * scale
            dout_i, out_i = _rows_of(dout, i, block), _rows_of(out, i, block)
            drows: Any = 0.0
            for j in _visited(i, starts, causal, window, block):
                keys, number = _part(k, 2, j, block), j // block
                p, scores = probabilities(rows, keys, i, j)
                g = dout_i
                if total is not None:
                    g = _scaled(g.to(wide), flow.exp(_log_sums(scores, p) - total)).to(q.dtype)
                dp = flow.matmul(g, _part(v, 2, j, block), transpose_b=True).to(wide)
                ds = p * (dp - along_rows(row_sums(g.to(wide) * out_i.to(wide)), keys.shape[2]))
                ds, p = ds.to(q.dtype), p.to(q.dtype)
                drows = flow.matmul(ds, keys) + drows
                dk[number] = flow.matmul(ds, rows, transpose_a=True) + dk[number]
                dv[number] = flow.matmul(p, g, transpose_a=True) + dv[number]
            dq.append((drows * scale).reshape(*q.shape[:3], -1, head_dim))
        return flow.cat(dq, dim=3), flow.cat(dk, dim=2), flow.cat(dv, dim=2)

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
    distance = shift + np.arange(rows)[:, None] - np.arange(columns)
    discarded = (distance < 0) | (distance >= (rows + abs(shift) + columns if window is None else window))
    return flow.tensor(np.tile(discarded, (heads, 1)), device=device) if discarded.any() else None


def _visited(i: int, starts: range, causal: bool, window: int | None, block: int) -> list[int]:
    """Return the first positions of the blocks of keys that the queries from position i on attend to, the diagonal first."""
    if not causal:
        return list(starts)
    first = 0 if window is None else max(0, i - window + 1) // block * block
    return list(range(i, first - 1, -block))


def _log_sums(scores: Tensor, probabilities: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row of scores, with dimension 1 at the end."""
    return scores.amax(dim=-1, keepdim=True) - flow.log(probabilities.amax(dim=-1, keepdim=True))


def _scaled(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row by its factor."""
    return x * along_rows(factors, x.shape[-1])


def _rows_of(x: Tensor, start: int, block: int) -> Tensor:
    """Return positions of (samples, groups, heads, sequence, head_dim) as (samples, groups, heads * positions, head_dim)."""
    part = _part(x, 3, start, block)
    return part.reshape(*part.shape[:2], -1, part.shape[-1])


def _part(x: Tensor, dim: int, start: int, block: int) -> Tensor:
    """Return ``block`` positions of a dimension, or as many as there are."""
    length = min(block, x.shape[dim] - start)
    return x if length == x.shape[dim] else flow.narrow(x, dim, start, length).contiguous()
