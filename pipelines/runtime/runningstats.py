"""Running statistics of batch norms: what evaluation uses in place of the statistics of a batch.

Every rank updates those of its own samples. Before an evaluation, and before they are saved, they are averaged over the ranks that
have the same channels, so that all ranks evaluate alike; during training nothing is sent for them. (``DistributedDataParallel``
takes those of the first rank instead.) A forward pass that recomputation repeats updates them once, when it is repeated: the first
time it runs without autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from .comm.layouts import Layout, gathered
from .facts import module_at
from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()

__all__ = ["RunningStatistics", "running_shapes", "running_statistics"]

Tensor = Any
#: Names of the buffers that the statistics are of.
MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"


class RunningStatistics:
    """The running statistics of one batch norm.

    Args:
        channels: Number of channels.
        values: Mean and variance of all channels; None if the module keeps none.
        count: Number of batches that they contain.
        momentum: Weight of a batch in an update.
        eps: Number that is added to variances.

    Attributes:
        momentum, eps, count: As above.
    """

    def __init__(
        self,
        channels: int,
        values: tuple[np.ndarray, np.ndarray] | None = None,
        count: int = 0,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ):
        self.momentum, self.eps, self.count = momentum, eps, count
        self._channels, self._whole = channels, values
        self._own: list[Tensor] = []  # of this rank's channels, once a pass has begun
        self._are_equal = True  # on all ranks with the same channels

    def num_local(self, layout: Layout, rank: int) -> int:
        """Return the number of channels of a rank."""
        return len(layout.blocks(self._channels)[rank])

    def of_pass(self, layout: Layout, ranks: Ranks, training: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return mean and variance of this rank's channels for a pass; a training pass may update them. All ranks call.

        Args:
            layout: Distribution of the samples and channels.
            ranks: The ranks.
            training: Whether it is a training pass; in evaluation all ranks have the same.
        """
        if self._whole is None:
            return None, None
        own = self._local(layout, ranks)
        if not training:
            self._average(layout, ranks)
            own = self._own
        elif not flow.is_grad_enabled():  # the pass will be repeated
            own = [value.clone() for value in own]
        else:
            self._are_equal = False
            self.count += 1
        return own[0], own[1]

    def move(self, own: tuple[Tensor | None, Tensor | None], batch: tuple[Tensor, Tensor]) -> None:
        """Move mean and variance that `of_pass` returned towards those of a batch."""
        for value, new in zip(own, batch):
            if value is not None:
                value.mul_(1 - self.momentum).add_(new.to(value.dtype) * self.momentum)

    def whole(self, layout: Layout, ranks: Ranks) -> dict[str, np.ndarray]:
        """Return the buffers of the module that the statistics are of, by name, on every rank; all ranks call."""
        if self._whole is None:
            return {}
        self._local(layout, ranks)
        self._average(layout, ranks)
        held = gathered(layout.blocks(self._channels), layout.axes(1))[ranks.rank]
        values = {COUNT: np.array(self.count, dtype=np.int64)}
        for name, own in zip((MEAN, VARIANCE), self._own):
            part = ranks.gather(own, layout.axes(1), 0).numpy()
            values[name] = np.empty(self._channels, part.dtype)
            values[name][held] = part
        return values

    def load(self, buffers: Mapping[str, np.ndarray]) -> None:
        """Replace the statistics by those of a module's buffers, given by name; those that are missing stay what they are."""
        if self._whole is None:
            return
        mean, variance = (np.array(buffers.get(name, old)) for name, old in zip((MEAN, VARIANCE), self._whole))
        self._whole, self._own, self._are_equal = (mean, variance), [], True
        self.count = int(buffers.get(COUNT, self.count))

    def _local(self, layout: Layout, ranks: Ranks) -> list[Tensor]:
        if not self._own and self._whole is not None:
            held, backend = layout.blocks(self._channels)[ranks.rank], ranks.backend
            self._own = [backend.tensor(np.ascontiguousarray(value[held]), backend.master) for value in self._whole]
        return self._own

    def _average(self, layout: Layout, ranks: Ranks) -> None:
        """Average the statistics over the ranks with the same channels, unless they are equal."""
        if self._are_equal:
            return
        axes = layout.axes(0)
        total = ranks.sum(flow.stack(self._own), axes) * (1.0 / prod(axis.size for axis in axes))
        self._own = [total[0].clone(), total[1].clone()]
        self._are_equal = True


def running_statistics(model: Any, path: str, channels: int) -> RunningStatistics:
    """Return the running statistics of the BatchNorm at a path.

    Args:
        model: The user's model.
        path: Path of the module.
        channels: Number of its channels.
    """
    module = module_at(model, path)
    mean, variance = getattr(module, MEAN, None), getattr(module, VARIANCE, None)
    values = None if mean is None or variance is None else (np.array(mean.numpy()), np.array(variance.numpy()))
    tracked = getattr(module, COUNT, None)
    count = 0 if tracked is None else int(tracked.numpy())
    return RunningStatistics(channels, values, count, float(module.momentum), float(module.eps))


def running_shapes(model: Any, path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the buffers of the BatchNorm at a path, by name; none if it keeps no statistics."""
    module = module_at(model, path)
    if getattr(module, MEAN, None) is None:
        return {}
    return {MEAN: tuple(module.running_mean.shape), VARIANCE: tuple(module.running_var.shape), COUNT: ()}
