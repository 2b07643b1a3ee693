"""The TCP sockets of a network namespace, read from ``/proc/PID/net/tcp``, and those of this process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Socket", "connections", "port_of", "send_at_once"]


class Socket(NamedTuple):
    """A socket of a network namespace.

    Attributes:
        here: Local address in hexadecimal, ``ADDRESS:PORT``.
        there: Remote address, in the same form.
        inode: Inode of the socket. The links in ``/proc/PID/fd`` name it.
        is_listening: Whether the socket waits for connections.
        is_established: Whether the socket is connected.
    """

    here: str
    there: str
    inode: str
    is_listening: bool
    is_established: bool


def connections(pid: int | str = "self") -> Iterator[Socket]:
    """Iterate over the TCP sockets in the network namespace of a process. There are none if the process has ended."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, here, there, state, *fields = line.split()
                yield Socket(here, there, fields[5], state == "0A", state == "01")


def port_of(address: str) -> int:
    """Return the port of an address of a `Socket`."""
    return int(address.rpartition(":")[2], 16)


def send_at_once() -> int:
    """Have all TCP connections of this process send small messages at once (TCP_NODELAY); returns the number of changed ones.

    OneFlow 0.9.0 sets the option on the ranks that connect, not on those that accept. A message is several small writes. Without
    the option each of them waits until the other host has acknowledged the one before, which costs two latencies of the link. On a
    link of 5 ms, an all-gather of 4 KiB between two hosts takes 24 ms with the option and 42 ms without it.
    """
    changed = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            own = socket.socket(fileno=int(name))
            try:
                is_connection = own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM
                if is_connection and not own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
                    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    changed += 1
            finally:
                own.detach()  # the descriptor is not ours to close
    return changed
