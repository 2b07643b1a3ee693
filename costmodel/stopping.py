"""When a search should end: its time is over, or somebody outside asked for it.

A `Stop` is passed down by whoever may ask: the command line's signal handler, another thread, a test.  A `Deadline` is what a
search asks: it knows both the time limit and the stop, so that a search that keeps to its time limit can be interrupted, too.
Work that has no answer to give before it is done asks the `Stop` itself, and leaves by `StopRequestedError`; the search around it
catches that and answers with the best that it has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Deadline", "Stop", "StopRequestedError", "TimedStop"]


class StopRequestedError(Exception):
    """The work was stopped before there was an answer."""


class Stop:
    """A request from outside that a search end soon, with the best that it has found.

    >>> stop = Stop()
    >>> stop.is_requested
    False
    >>> stop.request()
    >>> stop.is_requested
    True
    """

    def __init__(self) -> None:
        self._requested = False

    def request(self) -> None:
        """Ask for it; safe in a signal handler and from other threads, and cannot be taken back."""
        self._requested = True

    @property
    def is_requested(self) -> bool:
        """Whether somebody asked."""
        return self._requested

    def check(self) -> None:
        """Leave the work if somebody asked.

        Raises: StopRequestedError
        """
        if self.is_requested:
            raise StopRequestedError


class Deadline:
    """Over after so many seconds from its making, or when a stop is requested.

    Args:
        limit_s: seconds of the timer.
        stop: whose request ends it, too; by default nobody's.
        timer: ``time.perf_counter``, or ``time.process_time`` where a busy machine should not change what is found.

    Attributes:
        stopped: whether somebody was told that it is over, and left something out for that.
    """

    def __init__(
        self,
        limit_s: float | None = None,
        stop: Stop | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limit_s = math.inf if limit_s is None else limit_s
        self.stop = Stop() if stop is None else stop
        self.stopped = False
        self._timer, self._begin = timer, timer()

    @property
    def is_over(self) -> bool:
        """Whether to end."""
        self.stopped = self.stopped or self.stop.is_requested or self.left_s <= 0
        return self.stopped

    @property
    def left_s(self) -> float:
        """Seconds until the time limit; infinite without one."""
        return self.limit_s - (self._timer() - self._begin)

    def part(self, share: float) -> Deadline:
        """One with the same beginning and stop, and this share of the time limit."""
        part = Deadline(share * self.limit_s, self.stop, self._timer)
        part._begin = self._begin
        return part


class TimedStop(Stop):
    """A stop that requests itself when a deadline is over: for work that knows of stops alone, and should leave with its best."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    @property
    def is_requested(self) -> bool:
        """Whether somebody asked, or the deadline is over."""
        return self._requested or self._deadline.is_over
