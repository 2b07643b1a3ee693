"""Handles Ctrl-C during a search: the first one requests the best result so far, the second one ends the command at once."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.stopping import Stop, StopRequestedError

__all__ = ["SearchInterrupt", "interruptible"]

#: Signals that request a stop: Ctrl-C, the signal of a scheduler, a closed terminal.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class SearchInterrupt:
    """The stop of a search that signals can request.

    Attributes:
        stop: The stop, for the search.
        signal_number: Number of the signal that requested the stop; 0 if none did.
    """

    def __init__(self) -> None:
        self.stop = Stop()
        self.signal_number = 0

    def exit_code(self, note: str) -> int:
        """Return the exit code: 0, or 128 + the number of the signal.  After a signal, print ``note`` on the result to stderr."""
        if not self.signal_number:
            return 0
        print(f"autoddl: interrupted; {note}", file=sys.stderr)
        return 128 + self.signal_number


@contextlib.contextmanager
def interruptible() -> Iterator[SearchInterrupt]:
    """Return a context in which the first signal requests the stop of a search.

    The first signal also restores the previous handlers, so that a second signal has its usual effect.

    Raises:
        SystemExit: If the stop was requested before the search found a plan.  One line on stderr says so, and the exit code is 128
            + the number of the signal.
    """
    interrupt = SearchInterrupt()
    previous_handlers: dict[int, Any] = {}

    def restore_handlers() -> None:
        while previous_handlers:
            number, handler = previous_handlers.popitem()
            signal.signal(number, handler)

    def request_stop(number: int, frame: FrameType | None) -> None:
        interrupt.signal_number = number
        interrupt.stop.request()
        restore_handlers()

    # Python handles signals in its main thread only.  Signals that are ignored (as under nohup) stay ignored.
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                previous_handlers[number] = signal.signal(number, request_stop)
    try:
        yield interrupt
    except (StopRequestedError, UserError):
        if not interrupt.signal_number:
            raise
        print("autoddl: interrupted before a plan was found", file=sys.stderr)
        raise SystemExit(128 + interrupt.signal_number) from None
    finally:
        restore_handlers()
