"""Layer norm and RMS norm of features that may be split over ranks.

For each row x of n features, with mean m (0 for an RMS norm) and r = 1 / sqrt(mean((x - m)^2) + eps),

    y = (x - m) r weight + bias

and with z = (x - m) r and g = dy weight the backward pass is

    dx = r (g - mean(g) - z mean(g z))        dweight = sum(dy z)        dbias = sum(dy)

where mean(g) is left out in an RMS norm, and the sums run over all rows.  The statistics m and r, and the two means of the backward
pass, are computed in the master type.  With split features each of the two pairs of sums is all-reduced in one message.  The
backward pass keeps the input and the statistics, as the cost model assumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.distribution import Axis

from .backend import is_on_gpu
from .detaching import detached
from .load import load_oneflow
from .rows import along_rows, row_sums
from .stepping import Ranks

flow = load_oneflow()
functional = flow.nn.functional
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["normalise"]

Tensor = Any


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    features: int,
    is_centred: bool,
    eps: float,
    axes: Sequence[Axis],
    ranks: Ranks,
) -> Tensor:
    """Return the layer norm of rows (or their RMS norm), scaled by a weight and shifted by a bias.

    Args:
        x: This rank's features, (samples, rows, features).
        weight: This rank's part of the weight.
        bias: This rank's part of the bias; None if there is none.
        features: Number of features on all ranks.
        is_centred: Whether the mean is subtracted, as in a layer norm.
        eps: Number that is added to the variance.
        axes: Mesh axes that split the features.
        ranks: The ranks.
    """
    if is_centred and not axes and bias is not None and is_on_gpu(x):
        # One kernel, which computes the statistics of half-precision rows in single precision.
        return functional.layer_norm(x, (features,), weight, bias, eps)
    width, wide = x.shape[-1], ranks.backend.master
    saved: list[Tensor] = []

    def forward(ctx: Any, x: Tensor, *_: Tensor) -> Tensor:
        rows = x.to(wide)
        if is_centred and axes:
            # Both sums are reduced in one message.
            means = ranks.sum(flow.cat([row_sums(rows), row_sums(rows * rows)], dim=-1), axes) / features
            mean = means[..., :1].contiguous()
            variance = means[..., 1:] - mean * mean
            rows = rows - along_rows(mean, width)
        elif is_centred:
            mean = row_sums(rows) / features
            rows = rows - along_rows(mean, width)
            variance = row_sums(rows * rows) / features
        else:
            mean = None
            variance = ranks.sum(row_sums(rows * rows), axes) / features
        scale = flow.rsqrt(variance + eps)
        saved[:] = [detached(x), scale] if mean is None else [detached(x), scale, mean]
        y = (rows * along_rows(scale, width)).to(x.dtype) * detached(weight)
        return y if bias is None else y + detached(bias)

    def backward(ctx: Any, dy: Tensor) -> Any:
        x, scale, *means = saved
        rows = x.to(wide)
        if means:
            rows = rows - along_rows(means[0], width)
        z = rows * along_rows(scale, width)
        by_row = dy.to(wide)
        dweight = _column_sums(by_row * z).to(weight.dtype)
        dbias = None if bias is None else _column_sums(by_row).to(bias.dtype)
        g = by_row * detached(weight).to(wide)
        sums = [row_sums(g * z), row_sums(g)] if is_centred else [row_sums(g * z)]
        totals = ranks.sum(flow.cat(sums, dim=-1), axes) / features
        dx = g - z * along_rows(totals[..., :1].contiguous(), width)
        if is_centred:
            dx = dx - along_rows(totals[..., 1:].contiguous(), width)
        dx = (dx * along_rows(scale, width)).to(x.dtype)
        return (dx, dweight) if dbias is None else (dx, dweight, dbias)

    return _Function.apply("normalise", forward, backward, x, weight, *([] if bias is None else [bias]))


def _column_sums(x: Tensor) -> Tensor:
    """Sum over all dimensions but the last."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.sum(dim=0)
