"""Time limits of planners in processor time, so that the result does not depend on the load of the machine."""

from __future__ import annotations

import math
import time

from autoddl.costmodel.stopping import Deadline, Stop

__all__ = ["Clock", "Patience"]


class Clock(Deadline):
    """A deadline in processor time.

    Attributes:
        limit_s: seconds of processor time.
        stopped: whether a search has ended early because of the limit or of a requested stop.
    """

    def __init__(self, limit_s: float = math.inf, stop: Stop | None = None) -> None:
        super().__init__(limit_s, stop, time.process_time)


class Patience(Clock):
    """A clock that is also over after as much time without a better result as the search had needed for the last one.

    Args:
        limit_s: Seconds of processor time, at most.
        least_s: Seconds of processor time, at least.
        stop: A stop that ends the clock early; None for none.
        until_first_s: Seconds of processor time, at most, until the first better result; by default ``limit_s``.

    >>> patience = Patience(limit_s=100.0, least_s=10.0)
    >>> patience.left_s > 90.0  # nothing is known yet
    True
    >>> patience.renew()  # at once, so that there are about 10 s
    >>> 9.0 < patience.left_s <= 10.0
    True
    """

    def __init__(
        self, limit_s: float, least_s: float, stop: Stop | None = None, until_first_s: float | None = None
    ) -> None:
        super().__init__(limit_s if until_first_s is None else until_first_s, stop)
        self._most_s, self._least_s = limit_s, least_s

    def renew(self) -> None:
        """Note that the search has found a better result."""
        self.limit_s = min(self._most_s, max(self._least_s, 2 * self.spent_s))
