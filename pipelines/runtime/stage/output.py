"""The output of a model without a loss, gathered on every rank of its last stage."""

from __future__ import annotations

from typing import Any

from autoddl.costmodel.distribution import Distribution
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.sbp import Broadcast

from ..comm.moving import move_tensor
from ..images import images_of, images_of_tiles
from ..load import load_oneflow
from ..sequences import ascending
from .plan import moved_tensor
from .stage import Stage, rows_of

flow: Any = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["whole_output"]

Tensor = Any


def whole_output(value: Tensor, stage: Stage, samples: int) -> Tensor:
    """Gather the model's output on every rank of the last stage; differentiable.

    The gradient of the result has to be the same on every rank, and each rank takes the slice that belongs to its part.

    Args:
        value: This rank's part of the output, as `Stage.run` returns it.
        stage: The last stage.
        samples: Samples of the micro-batch, over all ranks.
    """
    last, stepper = stage.layers[-1], stage.stepper
    split = last.strategy.activations
    shape, has_rows, has_tiles, dims = moved_tensor(last.layer, [last.strategy.rows_and_features], samples)
    replicated = Distribution(split.axes, (Broadcast(),) * len(split.axes))
    route = redistribute(split, replicated, shape)
    own = dict(zip(dims, split.slices(stepper.rank, shape)))

    def forward(ctx: Any, x: Tensor) -> Tensor:
        return move_tensor(x, route, stepper, dims).clone()

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy[tuple(own.get(dim, slice(None)) for dim in range(3))].contiguous()

    if has_rows:
        value = rows_of(value, last.layer, last.strategy, has_tiles)
    whole = _Function.apply("whole", forward, backward, value)
    if has_rows and last.layer.is_image:
        whole = images_of_tiles(whole, samples) if has_tiles else images_of(whole, samples)
    if stage.is_mirrored:
        whole = ascending(whole.reshape(samples, -1, whole.shape[2]))
    per_sample = last.layer.output_shape
    # Models without sequences have one row per sample: the result has no dimension for rows.
    return whole.reshape(samples, *(per_sample[1:] if len(per_sample) == 2 and last.layer.rows == 1 else per_sample))
