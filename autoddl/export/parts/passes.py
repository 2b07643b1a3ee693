"""The number of the training pass, which random operators depend on."""

from __future__ import annotations


class Passes:
    """Counts the training passes of the model.

    Attributes:
        step: Number of the present pass, from 1; None outside of training.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._count = 0

    def begin(self, training: bool) -> None:
        """Begin a forward pass of the whole model."""
        self._count += training
        self.step = self._count if training else None


#: The passes of the model.
PASSES = Passes()
