"""Runs a command as a process: replaces the standard streams, and handles Ctrl-C with :mod:`._interrupts`.

**Standard output** is written by one class, whatever stream Python opened.  All data is written, even if a single write accepts
only a part of it (an unbuffered stream on a disk that fills up).  A failed write is remembered, so that the exit code is not 0.
Characters that the encoding of the terminal lacks are written as escapes.

**Standard error** ignores failed writes: a message that cannot be written does not change the exit code.
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

#: Error handlers that PYTHONIOENCODING may set; all others raise an exception if the encoding lacks a character.
_SAFE_ERROR_HANDLERS = ("backslashreplace", "replace", "ignore", "namereplace", "xmlcharrefreplace")


class UnwritableOutputError(UserError):
    """Standard output cannot be written: it is closed, or its disk is full."""


class ReaderGoneError(BrokenPipeError):
    """The reader of standard output (a pager, ``head``) has closed the pipe.  This is not reported."""

    exit_code = 128 + signal.SIGPIPE


def run() -> int:
    """Run the command in ``sys.argv`` and return its exit code."""
    # SIGINT is ignored in the background of a shell, and stays ignored.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return _run(contextlib.nullcontext)
    interrupts = Interrupts()
    code = _run(interrupts.working)
    interrupts.end(code)
    return code


def _run(working: Callable[[], contextlib.AbstractContextManager[object]]) -> int:
    output = _Output(is_closed=sys.stdout is None)
    _open_closed_streams()
    sys.stdout = _text_stream(output, sys.stdout)
    sys.stderr = _text_stream(_Messages(), sys.stderr)
    from . import _running

    code = _running.run_command(sys.argv[1:], working)
    if output.failure is not None and code == 0:  # the command caught the error
        code = _running.report(output.failure)
    return code


# ---- Standard streams ------------------------------------------------------------------------------------------------


class _StandardStream(io.RawIOBase):
    """Base class of the two standard streams for output.  They are never closed."""

    number: int

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the number of the file descriptor."""
        return self.number

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return os.isatty(self.number)


class _Output(_StandardStream):
    """Standard output.  After one failed write it discards all data, so that nothing fails again when Python exits."""

    number = 1

    def __init__(self, is_closed: bool) -> None:
        self._is_closed = is_closed
        self.failure: Exception | None = None

    def write(self, data: Any) -> int:
        """Write a part of the data; the buffer that calls this method writes the rest."""
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
            except BlockingIOError:  # another program made the terminal non-blocking
                select.select([], [1], [])


class _Messages(_StandardStream):
    """Standard error.  Failed writes are ignored."""

    number = 2

    def write(self, data: Any) -> int:
        """Write the data, if possible."""
        with contextlib.suppress(OSError):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(2, rest) :]
        return len(data)


def _open_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams; otherwise the next file that is opened would receive their output."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)


def _text_stream(raw: _StandardStream, original: TextIO | None) -> TextIO:
    """Return a text stream that replaces one of Python's streams, with the same encoding."""
    is_line_buffered = raw.number == 2 or raw.isatty() or bool(getattr(original, "write_through", False))
    errors = getattr(original, "errors", None)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(original, "encoding", None) or "utf-8",
        errors=errors if errors in _SAFE_ERROR_HANDLERS else "backslashreplace",
        line_buffering=is_line_buffered,
    )
