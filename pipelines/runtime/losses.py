"""Losses of predictions that are split over the ranks.

Every rank returns the mean over the whole micro-batch. Its backward pass starts with a gradient of 1 on every rank, as in
``loss.backward()``. The backward pass needs no communication: it is the derivative of the mean by this rank's predictions.

Cross entropy with the vocabulary split over s ranks (as in Megatron-LM):

    loss = log(sum_j exp(x_j - m)) - (x_target - m)        gradient = softmax(x) - [j = target]

where x are the logits of a row, and m is their maximum. The maxima of the ranks are all-gathered. The sum over j and the target's
term are all-reduced in one message. At last the ranks' parts of the mean are gathered and added up (`_total`): one number of each
rank, which the cost model does not count.

Losses are computed in the master type, whatever the type of the predictions. The probabilities that are kept for the backward pass
have the type of the predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis, flat_coordinate

from .comm.layouts import Layout
from .detaching import detached
from .load import load_oneflow
from .rows import along_rows, row_sums
from .stepping import Ranks

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["IGNORED", "cross_entropy", "mean_error"]

Tensor = Any

#: Target that the loss ignores, as in ``nn.functional.cross_entropy``.
IGNORED = -100


def cross_entropy(
    logits: Tensor, targets: np.ndarray, layout: Layout, ranks: Ranks, rows: int, is_mirrored: bool = False
) -> Tensor:
    """Return the mean cross entropy over all targets of the micro-batch.

    Args:
        logits: This rank's part of the logits, (samples, rows, vocabulary).
        targets: Targets of all ranks: indices of the whole vocabulary, or `IGNORED`.
        layout: Distribution of the logits.
        ranks: The ranks.
        rows: Targets per sample.
        is_mirrored: Whether rows are in mirrored order.
    """
    axes, sample_axes = layout.axes(1), layout.axes(0)
    own = np.ascontiguousarray(
        layout.part_of_rows(targets.reshape(-1, rows), ranks.rank, rows, is_mirrored).reshape(-1)
    )
    logits = logits.reshape(len(own), -1)
    wide = ranks.backend.master
    width, count = logits.shape[1], max(int((targets != IGNORED).sum()), 1)
    local = ranks.backend.tensor(own) - flat_coordinate(layout.features, ranks.rank) * width
    is_here = flow.logical_and(local >= 0, local < width)
    counts = ranks.backend.tensor(own != IGNORED, wide)
    here = is_here.to(wide).reshape(-1, 1)
    place = flow.where(is_here, local, flow.zeros_like(local)).reshape(-1, 1)
    saved: list[Tensor] = []

    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.to(wide)
        maxima = flow.amax(x, dim=1, keepdim=True)
        maxima = flow.amax(ranks.gather(maxima, axes, 1), dim=1, keepdim=True)
        exponentials = flow.exp(x - along_rows(maxima, width))
        target_logits = (flow.gather(x, 1, place) - maxima) * here
        sums = ranks.sum(flow.cat([row_sums(exponentials), target_logits], dim=1), axes)
        totals = sums[:, :1].contiguous()
        saved.append((exponentials * along_rows(1.0 / totals, width)).to(logits.dtype))
        rows = flow.log(totals) - sums[:, 1:]
        return _total((rows.reshape(-1) * counts).sum() / count, sample_axes, ranks)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        scale = (counts * (dy / count)).reshape(-1, 1)
        # Subtract the target's one-hot vector from the probabilities.
        probabilities = saved[0].to(wide)
        return flow.scatter_add(probabilities * along_rows(scale, width), 1, place, -here * scale).to(logits.dtype)

    return _Function.apply("cross_entropy", forward, backward, logits)


def mean_error(
    predictions: Tensor, targets: Tensor, ranks: Ranks, is_squared: bool, axes: Sequence[Axis] = ()
) -> Tensor:
    """Return the mean squared (or absolute) difference between predictions and targets, over the elements of all ranks.

    Args:
        predictions: This rank's part of the predictions.
        targets: Targets of the same elements.
        ranks: The ranks.
        is_squared: Whether differences are squared.
        axes: Mesh axes of all ranks; none if there is one rank.
    """
    wide = ranks.backend.master
    difference, count = detached(predictions).to(wide) - targets.to(wide), predictions.numel() * ranks.num_ranks

    def forward(ctx: Any, x: Tensor) -> Tensor:
        each = difference * difference if is_squared else flow.abs(difference)
        return _total(each.sum() / count, axes, ranks)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return ((2.0 * difference if is_squared else flow.sign(difference)) * (dy / count)).to(predictions.dtype)

    return _Function.apply("mean_error", forward, backward, predictions)


def _total(part: Tensor, axes: Sequence[Axis], ranks: Ranks) -> Tensor:
    """Return the sum of one number of each rank. A gather takes half of the messages of an all-reduce, each a latency."""
    return ranks.gather(part.reshape(1), axes, 0).sum()
