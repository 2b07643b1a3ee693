"""The process of a command: its standard streams. (Ctrl-C: see `_interrupts`.)

**Standard output** has one writer, whatever Python made of it.  It writes all of what it is given, also where a single write takes
a part only (an unbuffered stream on a disk that fills up), and it remembers what could not be written: then the exit code is never
0.  Characters that the terminal's encoding lacks are written as escapes.

**Standard error** cannot fail: a message that nobody can read is no reason to end otherwise.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

from autoddl.costmodel.errors import UserError

from ._interrupts import Interrupts

__all__ = ["run"]

#: What PYTHONIOENCODING may ask for; the others raise where a character is missing.
_FORGIVING = ("backslashreplace", "replace", "ignore", "namereplace", "xmlcharrefreplace")


class UnwritableOutputError(UserError):
    """Standard output is closed, or its disk is full."""


class ReaderGoneError(BrokenPipeError):
    """Who read standard output has gone (a pager, head). There is nothing to be said about that."""

    exit_code = 128 + signal.SIGPIPE


def run() -> int:
    """Run the command of ``sys.argv``; the exit code."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as in the background of a shell
        return _run(contextlib.nullcontext)
    interrupts = Interrupts()
    code = _run(interrupts.working)
    interrupts.end(code)
    return code


def _run(working: Callable[[], contextlib.AbstractContextManager[object]]) -> int:
    output = _Output(is_closed=sys.stdout is None)
    _fill_standard_files()
    sys.stdout = _text(output, sys.stdout)
    sys.stderr = _text(_Messages(), sys.stderr)
    from . import _running

    code = _running.run_command(sys.argv[1:], working)
    if output.failure is not None and code == 0:  # somebody took the error for one of theirs
        code = _running.report(output.failure)
    return code


# ---- Standard streams ------------------------------------------------------------------------------------------------


class _Standard(io.RawIOBase):
    """One of the standard files, to be written to; it is never closed."""

    number: int

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """Its number."""
        return self.number

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self.number)


class _Output(_Standard):
    """Standard output: fails once, and then takes everything without a word, so that nothing fails again when Python ends."""

    number = 1

    def __init__(self, is_closed: bool) -> None:
        self._is_closed = is_closed
        self.failure: Exception | None = None

    def write(self, data: Any) -> int:
        """Write some of the data; the buffer in front of this writes the rest."""
        if self.failure is not None:
            return len(data)
        try:
            return self._write(data)
        except BrokenPipeError:
            self.failure = ReaderGoneError()
        except OSError as error:
            self.failure = UnwritableOutputError(f"standard output cannot be written ({error.strerror})")
        raise self.failure

    def _write(self, data: Any) -> int:
        if self._is_closed:
            raise OSError(0, "it is closed")
        while True:
            try:
                return os.write(1, data)
            except BlockingIOError:  # another program has set the terminal so
                select.select([], [1], [])


class _Messages(_Standard):
    """Standard error: takes everything, and writes what can be written."""

    number = 2

    def write(self, data: Any) -> int:
        """Write the data where that is possible."""
        with contextlib.suppress(OSError):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(2, rest) :]
        return len(data)


def _fill_standard_files() -> None:
    """Open what is closed among the standard files: else the next file that is opened takes its number, and its output."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)


def _text(raw: _Standard, before: TextIO | None) -> TextIO:
    """A text stream in place of Python's own, in its encoding."""
    at_once = raw.number == 2 or raw.isatty() or bool(getattr(before, "write_through", False))
    errors = getattr(before, "errors", None)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors=errors if errors in _FORGIVING else "backslashreplace",
        line_buffering=at_once,
    )
