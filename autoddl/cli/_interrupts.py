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
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]

_EXIT_CODE = 128 + signal.SIGINT
_DELAY_S = 0.05
_LONGEST_IMPORT_S = 60.0  # one that takes longer is a user's file that computes, which can be interrupted


class Interrupts:
    """Takes Ctrl-C from now on, in the main thread of a process that is there for one command."""

    def __init__(self) -> None:
        self._held_back_since: float | None = None
        self._timer: threading.Timer | None = None  # of the interrupt that is held back now
        self._comes_again = False
        self._has_worked = False
        self._lock = threading.Lock()
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
            with self._lock:
                self._has_worked = True
            if self._timer is not None:  # the command ended before it came again
                raise KeyboardInterrupt

    def end(self, code: int) -> None:
        """The command has ended with that exit code; what is left is Python's own end."""
        if code == _EXIT_CODE:  # that it was interrupted has been said
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(_EXIT_CODE))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        is_users, self._comes_again = not self._comes_again, False
        since = self._held_back_since
        if since is not None and (is_users or time.monotonic() - since > _LONGEST_IMPORT_S):  # a second Ctrl-C
            self._forget()
            raise KeyboardInterrupt
        if not _is_importing(frame):
            self._forget()
            raise KeyboardInterrupt
        self._hold_back()

    def _on_unraisable(self, unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._hold_back()
        else:
            sys.__unraisablehook__(unraisable)

    def _hold_back(self) -> None:
        if self._held_back_since is None:
            self._held_back_since = time.monotonic()
        self._timer = threading.Timer(_DELAY_S, self._send_again)
        self._timer.daemon = True
        self._timer.start()

    def _forget(self) -> None:
        self._held_back_since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_again(self) -> None:
        with self._lock:
            if self._has_worked:
                return
            if signal.getsignal(signal.SIGINT) == self._interrupt:
                self._comes_again = True
            else:  # the command's own handler takes it
                self._timer = None
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
