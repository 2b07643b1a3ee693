"""Messages between the launcher and a rank: pickled values, each after its length, over a pipe."""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

__all__ = ["Inbox", "read_message", "write_message"]

_LENGTH = struct.Struct("<Q")


def write_message(fd: int, value: Any) -> None:
    """Write one message, waiting while the pipe is full."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[os.write(fd, rest) :]


def read_message(fd: int) -> Any:
    """Wait for one message.

    Raises:
        EOFError: the other side is gone.
    """
    return pickle.loads(_read_exactly(fd, _LENGTH.unpack(_read_exactly(fd, _LENGTH.size))[0]))


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = os.read(fd, min(num_bytes, 1 << 20))
        if not part:
            raise EOFError("the other side of the pipe is closed")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


class Inbox:
    """Messages out of the pieces in which a pipe delivers them, for a reader that must not wait."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[Any]:
        """The messages that ``piece`` completes."""
        self._bytes += piece
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            messages.append(pickle.loads(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return messages
