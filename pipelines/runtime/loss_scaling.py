"""Dynamic loss scaling. Needs no OneFlow. Exported files contain this code.

Half precision rounds gradients below 2^-24 to zero. So the gradient of the loss is multiplied by a scale before the backward pass,
and the gradients of the weights are divided by it in the master type, in which the optimizer runs. If a scaled gradient is infinite
or not a number on any rank, all ranks skip the step and halve the scale. After `GROWTH_INTERVAL` steps without overflow it is
doubled.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; the constants are those that PyTorch uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["GROWTH_INTERVAL", "INITIAL_SCALE", "LossScaler"]

#: Scale of the first step.
INITIAL_SCALE = 2.0**16
#: Number of steps without overflow after which the scale is doubled.
GROWTH_INTERVAL = 2000
#: The scale grows to at most this number, whose reciprocal is a normal number in single precision.
_MAX_SCALE = 2.0**120


@dataclass
class LossScaler:
    """The scale of the loss, which changes from step to step.

    Attributes:
        scale: Factor of the gradient of the loss.
        num_good: Number of steps since the scale was last changed.
        num_skipped: Number of steps that were skipped because of an overflow.

    >>> scaler = LossScaler(scale=8.0)
    >>> scaler.update(is_finite=False)
    >>> scaler.scale, scaler.num_skipped
    (4.0, 1)
    """

    scale: float = INITIAL_SCALE
    num_good: int = 0
    num_skipped: int = 0

    def update(self, is_finite: bool) -> None:
        """Change the scale after a step.

        Args:
            is_finite: Whether the gradients of all ranks were finite, so that the step was not skipped.
        """
        if not is_finite:
            self.scale = max(1.0, self.scale / 2)
            self.num_good = 0
            self.num_skipped += 1
            return
        self.num_good += 1
        if self.num_good == GROWTH_INTERVAL:
            self.scale = min(2 * self.scale, _MAX_SCALE)
            self.num_good = 0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return asdict(self)

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore a state that :meth:`state` returned."""
        self.scale = float(state["scale"])
        self.num_good, self.num_skipped = int(state["num_good"]), int(state["num_skipped"])
