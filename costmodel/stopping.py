"""Ending a search early: at its time limit, or on request.

The caller that may interrupt a search (the command line's signal handler, another thread, a test) passes it a `Stop`.  The search
polls a `Deadline`, which combines the time limit with the `Stop`.  Work without an intermediate result calls `Stop.check`, which
raises `StopRequestedError`; the search around it catches the exception and returns its best result so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Deadline", "SlicedStop", "Stop", "StopRequestedError", "TimedStop"]


class StopRequestedError(Exception):
    """A stop was requested before the work had a result."""


class Stop:
    """A request that a search end soon and return its best result so far.

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
        """Request the stop.  Safe in signal handlers and from other threads; it cannot be undone."""
        self._requested = True

    @property
    def is_requested(self) -> bool:
        """Whether a stop was requested."""
        return self._requested

    def check(self) -> None:
        """Raise if a stop was requested.

        Raises:
            StopRequestedError: a stop was requested.
        """
        if self.is_requested:
            raise StopRequestedError


class Deadline:
    """A time limit, counted from construction, that also ends when a stop is requested.

    Args:
        limit_s: seconds of the timer; None for no limit.
        stop: a stop that ends the deadline early; None for none.
        timer: ``time.perf_counter``, or ``time.process_time`` so that a busy machine does not change the result.

    Attributes:
        stopped: whether :attr:`is_over` was ever true when a search read it, so that the search left something out.
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
        """Whether the search should end; sets ``stopped`` if so."""
        self.stopped = self.stopped or self.stop.is_requested or self.left_s <= 0
        return self.stopped

    @property
    def spent_s(self) -> float:
        """Seconds since construction."""
        return self._timer() - self._begin

    @property
    def left_s(self) -> float:
        """Seconds until the time limit; infinite without a limit."""
        return self.limit_s - self.spent_s

    def part(self, share: float) -> Deadline:
        """A deadline with the same start and stop, and ``share`` of the time limit."""
        part = Deadline(share * self.limit_s, self.stop, self._timer)
        part._begin = self._begin
        return part


class TimedStop(Stop):
    """A stop that is also requested when a deadline is over, for work that takes a `Stop` only."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    @property
    def is_requested(self) -> bool:
        """Whether a stop was requested, or the deadline is over."""
        return self._requested or self._deadline.is_over


class SlicedStop(Stop):
    """A stop that is also requested while a time slice is over, so that a search can limit the time of one of its steps.

    Args:
        stop: the stop of the whole search.

    >>> stop = SlicedStop(Stop())
    >>> with stop.until(Deadline(0.0)):
    ...     stop.is_requested
    True
    >>> stop.is_requested
    False
    """

    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self._stop = stop
        self._slices: list[Deadline] = []

    @property
    def is_requested(self) -> bool:
        """Whether a stop was requested, or a slice is over."""
        # Not `Deadline.is_over`: the stop of a deadline may be this one.
        return self._requested or self._stop.is_requested or any(part.left_s <= 0 for part in self._slices)

    @contextmanager
    def until(self, deadline: Deadline) -> Iterator[None]:
        """Request the stop inside of this context as soon as the deadline's time is over; contexts may be nested."""
        self._slices.append(deadline)
        try:
            yield
        finally:
            self._slices.pop()
