"""The number of the training pass, which random operators depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tensor = Any


class Passes:
    """Counts the training passes of the model.

    Attributes:
        step: Number of the present pass, from 1; None outside of training.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._count = 0

    def restart(self) -> None:
        """Let the next training pass be the first one."""
        self._count = 0

    def begin(self, training: bool) -> None:
        """Begin a forward pass of the whole model."""
        self._count += training
        self.step = self._count if training else None

    def bound(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that always belongs to the present pass: in a pipeline, others run before it is run again."""
        step = self.step

        def run(*tensors: Tensor) -> Tensor:
            before, self.step = self.step, step
            try:
                return function(*tensors)
            finally:
                self.step = before

        return run


#: The passes of the model.
PASSES = Passes()
