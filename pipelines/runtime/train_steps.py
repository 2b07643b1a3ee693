"""A training step of a plan without a pipeline: the micro-batches of a step, and the optimizers that plans name.

Applied plans and exported files share these definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .load import load_oneflow
from .updates import scale_gradient

flow: Any = load_oneflow()

__all__ = ["make_optimizer", "train_step"]

Tensor = Any


def train_step(loss_of: Callable[..., Tensor], micro_batches: Sequence[Sequence[Any]], scale: float = 1.0) -> float:
    """Run the forward and backward passes of a step, micro-batch by micro-batch, and return the mean loss.

    The gradients are those of the mean loss. They are summed over the ranks once, in the backward pass of the last micro-batch.

    Args:
        loss_of: Returns the mean loss of a micro-batch, the same on every rank: ``loss_of(*micro_batch, sync=is_last)``. Gradients
            collect on each rank until the backward pass of a loss that was computed with ``sync=True``.
        micro_batches: Inputs and targets of each micro-batch, the same on every rank.
        scale: Factor of the gradients.
    """
    total = 0.0
    for number, micro_batch in enumerate(micro_batches, 1):
        loss = loss_of(*micro_batch, sync=number == len(micro_batches)) / len(micro_batches)
        scale_gradient(loss, scale).backward()
        total += float(loss.numpy())
    return total


def make_optimizer(parameters: Iterable[Tensor], name: str, learning_rate: float, **options: Any) -> Any:
    """Return an optimizer of those parameters that are trained.

    Its updates are element-wise, so each rank updates its own blocks of the parameters.

    Args:
        parameters: Parameters; those that do not require gradients are left out.
        name: ``"adam"``, ``"momentum"`` (SGD with momentum 0.9) or ``"sgd"``.
        learning_rate: The learning rate.
        options: Further options of Adam; ignored for the others.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if name == "adam":
        return flow.optim.Adam(trained, lr=learning_rate, **options)
    return flow.optim.SGD(trained, lr=learning_rate, momentum=0.9 if name == "momentum" else 0.0)
