"""Time limits of planners, in processor time: a busy machine does not change what is found."""

from __future__ import annotations

import math
import time

__all__ = ["Clock"]


class Clock:
    """Runs from its making on.

    Attributes:
        limit_s: seconds of processor time.
        stopped: whether somebody was told that they are over, and left something out for that.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self.limit_s = limit_s
        self.stopped = False
        self._end = time.process_time() + limit_s

    @property
    def is_over(self) -> bool:
        """Whether to stop."""
        self.stopped = self.stopped or time.process_time() > self._end
        return self.stopped
