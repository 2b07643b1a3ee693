"""Time limits of planners, in processor time: a busy machine does not change what is found."""

from __future__ import annotations

import math
import time

from autoddl.costmodel.stopping import Deadline, Stop

__all__ = ["Clock"]


class Clock(Deadline):
    """A deadline in processor time.

    Attributes:
        limit_s: seconds of processor time.
        stopped: whether somebody was told that they are over, or that a stop is requested, and left something out for that.
    """

    def __init__(self, limit_s: float = math.inf, stop: Stop | None = None) -> None:
        super().__init__(limit_s, stop, time.process_time)
