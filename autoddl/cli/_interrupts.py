"""Ctrl-C while a command starts, works and ends.

**Start and end.**  While modules are imported and arguments read, and while Python ends, Ctrl-C takes effect at once: there is
nothing to be put in order then.

**Work.**  While the command works Ctrl-C is a KeyboardInterrupt, or whatever the command makes of it.  Two kinds of places lose a
KeyboardInterrupt: destructors and callbacks, where Python drops it, and imports, where libraries catch it (numpy makes an
ImportError of it).  There it is held back, and comes a moment later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]

_EXIT_CODE = 128 + signal.SIGINT
_DELAY_S = 0.05
_MOST_DELAYS = 100  # an import that takes longer is a user's file that computes, which can be interrupted


class Interrupts:
    """Takes Ctrl-C from now on, in the main thread of a process that is there for one command."""

    def __init__(self) -> None:
        self._num_delays = 0
        self._is_held_back = False
        signal.signal(signal.SIGINT, _leave)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Within it the command works."""
        signal.signal(signal.SIGINT, self._interrupt)
        sys.unraisablehook = self._on_unraisable
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, _leave)
            if self._is_held_back:  # the command ended before it came again
                raise KeyboardInterrupt

    def end(self, code: int) -> None:
        """The command has ended with that exit code; what is left is Python's own end."""
        if code == _EXIT_CODE:  # that it was interrupted has been said
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(_EXIT_CODE))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if _is_importing(frame) and self._num_delays < _MOST_DELAYS:
            self._hold_back()
        else:
            raise KeyboardInterrupt

    def _on_unraisable(self, unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._hold_back()
        else:
            sys.__unraisablehook__(unraisable)

    def _hold_back(self) -> None:
        self._num_delays += 1
        self._is_held_back = True
        timer = threading.Timer(_DELAY_S, self._send_again)
        timer.daemon = True
        timer.start()

    def _send_again(self) -> None:
        self._is_held_back = False
        os.kill(os.getpid(), signal.SIGINT)


def _leave(number: int, frame: FrameType | None) -> None:
    """One line, and away, whatever is being imported or ended."""
    with contextlib.suppress(OSError):
        os.write(2, b"autoddl: interrupted\n")
    os._exit(_EXIT_CODE)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False
