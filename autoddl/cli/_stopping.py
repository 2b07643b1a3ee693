"""Ctrl-C while a command searches: the first one asks for the best answer until now, the second one ends the command at once."""

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

__all__ = ["Interruptible", "interruptible"]

#: What asks for the end: Ctrl-C, a scheduler, a terminal that is closed.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interruptible:
    """A search's stop, and what the command says and returns when a signal has requested it.

    Attributes:
        stop: to be passed to the search.
        number: the signal's; 0 where there was none.
    """

    def __init__(self) -> None:
        self.stop = Stop()
        self.number = 0

    def exit_code(self, answer: str) -> int:
        """0, or 128 + the signal's number, and then a line on stderr that says what the ``answer`` is worth."""
        if self.number:
            print(f"autoddl: interrupted; {answer}", file=sys.stderr)
        return 128 + self.number if self.number else 0


@contextlib.contextmanager
def interruptible(answer: str = "a plan") -> Iterator[Interruptible]:
    """While entered, the first signal requests the stop, and gives the signals back: the next one does what it always does.

    Where the search has no answer yet when it is stopped, one line says so, and the command ends with 128 + the signal's number.

    Raises:
        SystemExit: then.
    """
    asked = Interruptible()
    before: dict[int, Any] = {}

    def give_back() -> None:
        while before:
            number, handler = before.popitem()
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        asked.number = number
        asked.stop.request()
        give_back()

    # Python handles signals in its main thread alone; a signal that is ignored (as nohup has it) stays so.
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, request)
    try:
        yield asked
    except (StopRequestedError, UserError):
        if not asked.number:
            raise
        print(f"autoddl: interrupted before {answer} was found", file=sys.stderr)
        raise SystemExit(128 + asked.number) from None
    finally:
        give_back()
