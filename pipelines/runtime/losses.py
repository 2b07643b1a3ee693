"""Losses of predictions that are split over the ranks.

Every rank gets the mean over the whole micro-batch.  Its gradient is seeded with 1 on every rank, as ``loss.backward()`` does:
the backward pass is local, the derivative of the mean by this rank's predictions.

Cross entropy on a vocabulary split over s ranks (Megatron's): with m the row's maximum, which is all-gathered from the ranks'
own, and two sums that are all-reduced in one message,

    loss = log(sum_j exp(x_j - m)) - (x_target - m)        gradient = softmax(x) - [j = target]

The mean is all-reduced last: one number, which the cost model does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis

from .detaching import detached
from .load import load_oneflow
from .rows import along_rows, row_sums
from .stepping import Stepper

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["IGNORED", "cross_entropy", "mean_of_differences"]

Tensor = Any

#: Targets that do not count, as in ``nn.functional.cross_entropy``.
IGNORED = -100


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    count: int,
    columns: np.ndarray,
    vocabulary: int,
    axes: Sequence[Axis],
    sample_axes: Sequence[Axis],
    stepper: Stepper,
) -> Tensor:
    """The mean cross entropy.

    Args:
        logits: (rows, local vocabulary).
        targets: (rows,), numbers of the whole vocabulary, or `IGNORED`.
        count: rows of all ranks that are not ignored.
        columns: which of the ``vocabulary`` the local logits are: consecutive numbers.
        axes: over which the vocabulary is split, outermost level first.
        sample_axes: over which the rows are split.
    """
    first, width = int(columns[0]), len(columns)
    local = targets - first
    is_here = flow.logical_and(local >= 0, local < width)
    counts = (targets != IGNORED).to(logits.dtype)
    here = is_here.to(logits.dtype).reshape(-1, 1)
    place = flow.where(is_here, local, flow.zeros_like(local)).reshape(-1, 1)
    saved: list[Tensor] = []

    def forward(ctx: Any, x: Tensor) -> Tensor:
        maxima = flow.amax(x, dim=1, keepdim=True)
        maxima = flow.amax(stepper.gather(maxima, axes, 1), dim=1, keepdim=True)
        exponentials = flow.exp(x - along_rows(maxima, width))
        target_logits = (flow.gather(x, 1, place) - maxima) * here
        sums = flow.cat([row_sums(exponentials), target_logits], dim=1)
        sums = stepper.sum(sums, axes)
        totals = sums[:, :1].contiguous()
        saved.append(exponentials * along_rows(1.0 / totals, width))
        rows = flow.log(totals) - sums[:, 1:]
        return _everywhere((rows.reshape(-1) * counts).sum() / count, sample_axes, stepper)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        scale = (counts * (dy / count)).reshape(-1, 1)
        # One more is left of the logit's own probability.
        return flow.scatter_add(saved[0] * along_rows(scale, width), 1, place, -here * scale)

    return _Function.apply("cross_entropy", forward, backward, logits)


def mean_of_differences(
    predictions: Tensor, targets: Tensor, count: int, axes: Sequence[Axis], stepper: Stepper, is_squared: bool
) -> Tensor:
    """The mean over ``count`` elements of all ranks of the squared (or absolute) difference to ``targets``."""
    difference = detached(predictions) - targets

    def forward(ctx: Any, x: Tensor) -> Tensor:
        each = difference * difference if is_squared else flow.abs(difference)
        return _everywhere(each.sum() / count, axes, stepper)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return (2.0 * difference if is_squared else flow.sign(difference)) * (dy / count)

    return _Function.apply("mean_of_differences", forward, backward, predictions)


def _everywhere(part: Tensor, axes: Sequence[Axis], stepper: Stepper) -> Tensor:
    """The sum over the ranks of one number, inner levels first."""
    return stepper.sum(part.reshape(1), axes).reshape(())
