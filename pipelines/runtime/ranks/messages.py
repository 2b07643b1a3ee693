"""Messages between the launcher and a rank: pickled values, each preceded by its length, over a pipe."""

from __future__ import annotations

import io
import os
import pickle
import select
import struct
import time
from typing import Any

__all__ = ["MessageReader", "read_message", "write_message"]

_LENGTH = struct.Struct("<Q")


class _Pickler(pickle.Pickler):
    """Rejects OneFlow's objects, because the launcher would have to load OneFlow to read them."""

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] == "oneflow":
            raise TypeError(
                f"{kind.__module__}.{kind.__qualname__} cannot be sent between processes; "
                "send numpy arrays or plain values"
            )
        return NotImplemented


def write_message(fd: int, value: Any, patience_s: float | None = None) -> None:
    """Write one message; blocks while the pipe is full.

    Args:
        fd: File descriptor of the pipe.
        value: Any picklable value without objects of OneFlow.
        patience_s: Longest time to block [s], if ``fd`` is non-blocking. None: no limit.

    Raises:
        TypeError: ``value`` cannot be pickled (or AttributeError, or pickle.PicklingError). Nothing has been written.
        TimeoutError: The pipe is full, and the other side does not read it.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    body = buffer.getvalue()
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    deadline = None if patience_s is None else time.monotonic() + patience_s
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([], [fd], [], remaining_s)[1]:
                raise TimeoutError("the messages are not read") from None


def read_message(fd: int) -> Any:
    """Wait for one message and return its value.

    Raises:
        EOFError: The other side has closed the pipe.
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


class MessageReader:
    """Assembles messages from the pieces that a non-blocking pipe returns.

    >>> inbox = MessageReader()
    >>> body = pickle.dumps(("ready", None))
    >>> inbox.feed(_LENGTH.pack(len(body)) + body[:3]), inbox.feed(body[3:])
    ([], [('ready', None)])
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[Any]:
        """Add the next bytes of the pipe, and return the messages that are now complete."""
        self._bytes += piece
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            messages.append(pickle.loads(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return messages
