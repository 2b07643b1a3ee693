"""The messages between launcher and supervisors: JSON objects, one per line, over any byte stream.

Every line begins with a mark. Lines without it, such as the output of ``.bashrc`` on login, are kept separately as noise.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

__all__ = ["LineReader", "LineSender", "Message", "write_line"]

_MARK = b"@autoddl "

Message = dict[str, Any]


def write_line(fd: int, message: Message) -> None:
    """Write one message; blocks while the pipe is full.

    Raises:
        BrokenPipeError: the reader is gone.
    """
    rest = memoryview(_line(message))
    while rest:
        rest = rest[os.write(fd, rest) :]


def _line(message: Message) -> bytes:
    return _MARK + json.dumps(message).encode() + b"\n"


class LineSender:
    """Sends messages without blocking on a suspended reader: bytes that the pipe does not take are queued.

    The sender has to call :meth:`flush` regularly. All methods may be called from any thread.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting = bytearray()
        self._lock = threading.Lock()
        os.set_blocking(fd, False)

    @property
    def num_waiting(self) -> int:
        """Number of queued bytes."""
        return len(self._waiting)

    def send(self, message: Message) -> None:
        """Send one message after those that are queued.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        with self._lock:
            self._waiting += _line(message)
            self._write()

    def beat(self) -> None:
        """Send a heartbeat: a message "alive", unless queued messages already serve as one.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        with self._lock:
            if not self._waiting:
                self._waiting += _line({"do": "alive", "kind": "alive"})
            self._write()

    def flush(self) -> bool:
        """Write queued bytes; returns whether none is left.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        with self._lock:
            self._write()
            return not self._waiting

    def _write(self) -> None:
        while self._waiting:
            try:
                written = os.write(self._fd, self._waiting)
            except BlockingIOError:
                return
            del self._waiting[:written]


class LineReader:
    """Splits a byte stream into messages.

    Attributes:
        noise: the last lines that were not messages.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.noise: list[str] = []

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that ``piece`` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        messages = []
        for line in lines:
            if line.startswith(_MARK):
                messages.append(json.loads(line[len(_MARK) :]))
            elif text := line.decode(errors="replace").strip():
                self.noise = [*self.noise[-9:], text]
        return messages
