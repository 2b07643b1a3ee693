"""Time limits of planners in processor time, so that the result does not depend on the load of the machine."""

from __future__ import annotations

import math
import time

from autoddl.costmodel.stopping import Deadline, Stop

__all__ = ["Clock"]


class Clock(Deadline):
    """A deadline in processor time.

    Attributes:
        limit_s: seconds of processor time.
        stopped: whether a search has ended early because of the limit or of a requested stop.
    """

    def __init__(self, limit_s: float = math.inf, stop: Stop | None = None) -> None:
        super().__init__(limit_s, stop, time.process_time)
