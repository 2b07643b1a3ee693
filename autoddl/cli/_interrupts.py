"""Handles Ctrl-C while a command starts, works and ends.

**Start and end.**  While Python imports modules, parses arguments or exits, Ctrl-C ends the process at once: no cleanup is needed.

**Work.**  While the command works, Ctrl-C raises KeyboardInterrupt, unless the command installs a handler of its own.  A
KeyboardInterrupt is lost in destructors and callbacks, where Python ignores exceptions, and during imports, where libraries catch
it (numpy raises ImportError instead).  In these places the interrupt is delayed: a timer sends SIGINT again a moment later.
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
#: Time until a delayed interrupt is sent again [s].
_DELAY_S = 0.05
#: Maximum time that an import delays an interrupt [s]: a longer import is a user's file that computes, which can be interrupted.
_MAX_IMPORT_S = 60.0


class Interrupts:
    """Handles SIGINT in the main thread of a process that runs a single command."""

    def __init__(self) -> None:
        self._delayed_since: float | None = None  # time of the first interrupt that is being delayed
        self._timer: threading.Timer | None = None  # sends the delayed interrupt again
        self._is_sent_again = False  # whether the next SIGINT is the delayed one, not a new Ctrl-C
        self._has_worked = False
        self._lock = threading.Lock()
        signal.signal(signal.SIGINT, _leave)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Return a context in which the command works: Ctrl-C raises KeyboardInterrupt."""
        signal.signal(signal.SIGINT, self._interrupt)
        sys.unraisablehook = self._on_unraisable
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, _leave)
            with self._lock:
                self._has_worked = True
            if self._timer is not None:  # the command ended before the delayed interrupt was sent again
                raise KeyboardInterrupt

    def end(self, code: int) -> None:
        """Prepare for the exit of Python after the command has ended with an exit code."""
        if code == _EXIT_CODE:  # the interrupt was reported already
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(_EXIT_CODE))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        is_new, self._is_sent_again = not self._is_sent_again, False
        since = self._delayed_since
        is_second = since is not None and is_new
        is_overdue = since is not None and time.monotonic() - since > _MAX_IMPORT_S
        if is_second or is_overdue or not _is_importing(frame):
            self._cancel_delayed()
            raise KeyboardInterrupt
        self._delay()

    def _on_unraisable(self, unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._delay()
        else:
            sys.__unraisablehook__(unraisable)

    def _delay(self) -> None:
        if self._delayed_since is None:
            self._delayed_since = time.monotonic()
        self._timer = threading.Timer(_DELAY_S, self._send_again)
        self._timer.daemon = True
        self._timer.start()

    def _cancel_delayed(self) -> None:
        self._delayed_since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_again(self) -> None:
        with self._lock:
            if self._has_worked:
                return
            if signal.getsignal(signal.SIGINT) == self._interrupt:
                self._is_sent_again = True
            else:  # the command has its own handler
                self._timer = None
            os.kill(os.getpid(), signal.SIGINT)


def _leave(number: int, frame: FrameType | None) -> None:
    """Report the interrupt in one line and exit at once."""
    with contextlib.suppress(OSError):
        os.write(2, b"autoddl: interrupted\n")
    os._exit(_EXIT_CODE)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False
