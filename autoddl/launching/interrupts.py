"""Signals that ask the launcher to end. They are recorded here and handled where the ranks are watched."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["InterruptCounter", "Interrupted"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):  # noqa: N818  # not an error
    """The launcher was ended by a signal; all ranks have been ended.

    Attributes:
        number: number of the signal.
        is_reported: whether another launcher, which started this one, reports the signal.
    """

    def __init__(self, number: int, is_reported: bool = False) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.is_reported = is_reported


class InterruptCounter:
    """A context manager, for the main thread, in which SIGINT, SIGTERM and SIGHUP are only recorded.

    Args:
        on_urgent: called in the handler of the second signal, since the main thread may be blocked by its output.

    Attributes:
        number: the first signal received; 0 before.
        count: number of signals received.
    """

    def __init__(self, on_urgent: Callable[[], None] = lambda: None) -> None:
        self._on_urgent = on_urgent
        self.number = 0
        self.count = 0
        self._before: dict[int, Any] = {}

    @property
    def is_urgent(self) -> bool:
        """Whether a second signal was received."""
        return self.count > 1

    def __enter__(self) -> InterruptCounter:
        for number in _NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = self.number or number
        if self.count == 2:
            self._on_urgent()
