"""How the launcher and the supervisors of hosts talk: JSON objects, one per line, over any stream of bytes.

Every line begins with a mark: what shells say on their way in (a greeting in ``.bashrc``, say) is told apart and kept as noise.
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
    """Write one message, waiting while the pipe is full.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    rest = memoryview(_line(message))
    while rest:
        rest = rest[os.write(fd, rest) :]


def _line(message: Message) -> bytes:
    return _MARK + json.dumps(message).encode() + b"\n"


class LineSender:
    """Sends messages without ever waiting for the reader, who may be suspended: what the pipe does not take waits here.

    Whoever sends has to call `flush` from time to time. All of it may be called from any thread.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting = bytearray()
        self._lock = threading.Lock()
        os.set_blocking(fd, False)

    @property
    def num_waiting(self) -> int:
        """How many bytes the pipe has not taken yet."""
        return len(self._waiting)

    def send(self, message: Message) -> None:
        """Send one message behind those that wait.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        with self._lock:
            self._waiting += _line(message)
            self._write()

    def beat(self) -> None:
        """Give a sign of life: a message "alive", unless others wait, which are as good.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        with self._lock:
            if not self._waiting:
                self._waiting += _line({"do": "alive", "kind": "alive"})
            self._write()

    def flush(self) -> bool:
        """Go on with what waits; whether nothing does any more.

        Raises:
            BrokenPipeError: nobody reads any more.
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
    """Messages out of the pieces in which a stream delivers them; ``noise`` holds the last lines that were none."""

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
