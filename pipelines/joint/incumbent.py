"""The best plan that a search knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .evaluation import Evaluation
from .explorer import RELATIVE_TOLERANCE

__all__ = ["Incumbent"]

#: Factor that lowers the threshold by more than a sum of floats changes with the order of its terms.
_ROUNDING = 1 - 1e-12


@dataclass
class Incumbent:
    """The best plan so far, which the parts of a search share.

    Attributes:
        best_s: Its cost [s]; infinite if no plan is known.
        best: The plan itself, if the search has found it.
        tell: Called with the cost of every better plan.
    """

    best_s: float
    best: Evaluation | None = None
    tell: Callable[[float], None] | None = None

    @property
    def threshold(self) -> float:
        """Steps that are not below it are not better than the incumbent [s]."""
        return self.best_s * (1 - RELATIVE_TOLERANCE)

    @property
    def exact_threshold(self) -> float:
        """The threshold for sums of floats in another order [s]."""
        return self.threshold * _ROUNDING

    def is_reached_by(self, bound_s: float) -> bool:
        """Return whether plans with this lower bound are not better than the incumbent."""
        return bound_s >= self.exact_threshold

    def replace(self, plan: Evaluation, cost_s: float) -> None:
        """Take another plan if it costs less."""
        if cost_s < self.best_s:
            self.best, self.best_s = plan, cost_s
            if self.tell is not None:
                self.tell(cost_s)
