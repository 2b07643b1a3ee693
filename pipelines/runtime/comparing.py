"""Whether an applied module computes what the user's module does.

A layer graph does not say everything: that scores are divided by 3, say, or that the second half of a product is the gate.  So
both run forward and backward once on a few samples, without dropout, and every rank compares what it holds: loss (or output)
and gradients.  Nothing is sent for it but a verdict, since every rank has the user's module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm, prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError

from .load import load_oneflow
from .stage.global_weights import GlobalWeights

flow: Any = load_oneflow()

__all__ = ["check_same_function"]

Tensor = Any
#: Relative differences that rounding cannot explain (it was 1e-6 in every model tried).
VALUE_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3


def check_same_function(applied: Any, weights: GlobalWeights, module: Any, batch: Sequence[Any]) -> None:
    """Compare an applied module with the user's on the first samples of ``batch``, as few as divide over all layers.

    Gradients and modes are as before afterwards.  All ranks call.

    Args:
        applied: the module that trains these weights.
        module: the user's.

    Raises:
        UserError: on every rank, where the two differ on any; it names what.
    """
    stage = weights.stage
    num = lcm(*(ready.strategy.p0 for ready in stage.layers))
    samples = [flow.tensor(x[:num]) if isinstance(x, np.ndarray) else x[:num] for x in batch]
    parameters = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    before = [(tensor, tensor.grad) for tensor in (*parameters.values(), *applied.parameters())]
    modes = module.training, applied.training
    try:
        for tensor, _ in before:
            tensor.grad = None
        module.eval()
        applied.eval()
        found = applied(*samples)
        difference = _compare(found, _matching(module(*samples), found), weights, parameters)
        verdict = flow.tensor([float(difference is not None)])
        differing = stage.stepper.reduce(verdict, [Axis(stage.stepper.num_ranks, 1)]).numpy()[0]
    finally:
        module.train(modes[0])
        applied.train(modes[1])
        for tensor, gradient in before:
            tensor.grad = gradient
    if differing:
        raise UserError(
            f"the plan's graph does not compute what {type(module).__name__} does: "
            f"{difference or 'gradients differ on other ranks'} (a graph does not say everything; check=False runs it nevertheless)"
        )


def _matching(returned: Any, found: Tensor) -> Tensor:
    """What a module returned, or the part of it that is like ``found``."""
    parts = returned.values() if isinstance(returned, Mapping) else returned
    parts = parts if isinstance(parts, (tuple, list)) or isinstance(returned, Mapping) else [parts]
    for part in parts:
        if isinstance(part, flow.Tensor) and part.numel() == found.numel():
            return part
    raise UserError(
        f"the model returns nothing like the {tuple(found.shape)} of the plan's graph, so they cannot be compared"
    )


def _compare(found: Tensor, expected: Tensor, weights: GlobalWeights, parameters: Mapping[str, Tensor]) -> str | None:
    """The first difference; None where there is none."""
    shape = tuple(expected.shape)
    factors = flow.tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32)) if shape else None
    for value in (found.reshape(*shape) if shape else found, expected):
        (value if factors is None else (value * factors).sum()).backward()
    mine, theirs = found.detach().numpy().reshape(shape), expected.detach().numpy()
    what = "output" if shape else "loss"
    difference = float(np.abs(mine - theirs).max()) / max(float(np.abs(theirs).max()), 1e-30)
    if not difference < VALUE_TOLERANCE:
        values = f"{float(mine):.7g} in place of {float(theirs):.7g}" if not shape else f"off by {difference:.1e}"
        return f"its {what} is {values}"
    return _compare_gradients(weights, parameters)


def _compare_gradients(weights: GlobalWeights, parameters: Mapping[str, Tensor]) -> str | None:
    gradients = {name: tensor.grad.numpy() for name, tensor in parameters.items() if tensor.grad is not None}
    expected = [
        (stored, stored.layout.joined(gradients))
        for stored in weights.parameters.values()
        if all(name in gradients for name, _ in stored.layout.sources)
    ]
    largest = max((_size(value) for _, value in expected), default=0.0)
    for stored, value in expected:
        if stored.tensor.grad is None:
            return f"{stored.layout.name} has no gradient"
        theirs = stored.layout.take(value, weights.stage.stepper.rank)
        mine = stored.tensor.grad.to_local().numpy()
        difference = _size(mine - theirs) / max(_size(theirs), 1e-3 * largest, 1e-30)
        if not difference < GRADIENT_TOLERANCE:
            return f"its gradient of {stored.layout.name} is off by {difference:.1e}"
    return None


def _size(value: np.ndarray) -> float:
    """Root mean square."""
    return float(np.linalg.norm(value)) / prod(value.shape) ** 0.5
