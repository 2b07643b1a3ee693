"""Optimizer steps on master weights, whose gradients have another type and are scaled (:mod:`loss_scaling`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from autoddl.costmodel.distribution import Axis

from .load import load_oneflow
from .loss_scaling import LossScaler
from .parameters import StoredParameter
from .stepping import Ranks

flow: Any = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["MasterParameter", "are_finite", "scale_gradient", "step_masters", "update_parameters"]

Tensor = Any
#: A step converts gradients in this number of parts (or more, if parameters are large), to need little memory for them.
_NUM_CHUNKS = 16


class MasterParameter(Protocol):
    """A parameter of the master type: `StoredParameter` or `LocalParameter`.

    Attributes:
        tensor: The ``nn.Parameter`` that the optimizer updates.
    """

    tensor: Tensor

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Set the gradient that the optimizer reads, given as this rank's part; None: no gradient."""


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Return ``x``; the backward pass multiplies its gradient by ``scale``."""
    if scale == 1.0 or not x.requires_grad:
        return x
    return _Function.apply("scale_gradient", lambda ctx, t: t.clone(), lambda ctx, dy: dy * scale, x)


def are_finite(gradients: Sequence[Tensor | None]) -> bool:
    """Return whether all elements of all local tensors are finite; None counts as finite."""
    # 0 x is 0 for finite x, and otherwise not a number.
    products = [(gradient * 0.0).sum().reshape(1) for gradient in gradients if gradient is not None]
    return not products or float(flow.cat(products, dim=0).sum().numpy()) == 0.0


def step_masters(
    optimizer: Any, parameters: Sequence[MasterParameter], gradients: Sequence[Tensor | None], scale: float
) -> None:
    """Make an optimizer step with gradients of any type, which are converted and unscaled a part at a time.

    The optimizer has to be element-wise. It is called once for each part, with its count of steps as before the first part.

    Args:
        optimizer: Optimizer of the parameters' tensors.
        parameters: The parameters. Afterwards none of them has a gradient.
        gradients: This rank's part of the gradient of each parameter; None for parameters without one.
        scale: Factor that the gradients contain.
    """
    num_steps = optimizer._state.get("step")
    for chunk in _chunks([0 if gradient is None else gradient.numel() for gradient in gradients]):
        for i in chunk:
            gradient = gradients[i]
            if gradient is not None:
                parameters[i].set_gradient(gradient.to(parameters[i].tensor.dtype) * (1.0 / scale))
        if num_steps is not None:
            optimizer._state["step"] = num_steps
        optimizer.step()
        for i in chunk:
            parameters[i].set_gradient(None)


def update_parameters(
    optimizer: Any, stored: Sequence[StoredParameter], ranks: Ranks, scaler: LossScaler | None
) -> bool:
    """Make an optimizer step with the parameters' gradients, and remove them; all ranks call.

    If losses are scaled and a gradient is not finite on any rank, all ranks skip the step.

    Args:
        optimizer: Element-wise optimizer of the parameters' tensors.
        stored: The parameters.
        ranks: The ranks.
        scaler: Scale that the gradients contain, which is changed; None if losses are not scaled.

    Returns:
        Whether the step was made, and not skipped.
    """
    gradients = [None if p.tensor.grad is None else p.tensor.grad.to_local() for p in stored]
    is_skipped = scaler is not None and not _is_finite_everywhere(gradients, ranks)
    if not ranks.backend.has_masters:
        optimizer.step()
    elif not is_skipped:
        for parameter in stored:
            parameter.tensor.grad = None
        step_masters(optimizer, stored, gradients, 1.0 if scaler is None else scaler.scale)
        for parameter in stored:
            parameter.renew_leaf()
    for parameter in stored:
        parameter.tensor.grad = None
    if scaler is not None:
        scaler.update(is_finite=not is_skipped)
    return not is_skipped


def _is_finite_everywhere(gradients: Sequence[Tensor | None], ranks: Ranks) -> bool:
    """Return whether the gradients of all ranks are finite; the same on all ranks."""
    num_infinite = ranks.backend.tensor([0.0 if are_finite(gradients) else 1.0])
    total = ranks.reduce(num_infinite, [Axis(ranks.num_ranks, 1)])
    return float(total.numpy()[0]) == 0.0


def _chunks(sizes: Sequence[int]) -> Iterator[range]:
    """Divide parameters of the given sizes into consecutive chunks, none much larger than needed for `_NUM_CHUNKS` of them."""
    limit = max([sum(sizes) / _NUM_CHUNKS, *sizes])
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > limit:
            yield range(first, i)
            first, total = i, 0
        total += size
    yield range(first, len(sizes))
