"""Lists the TCP sockets of a network namespace, read from ``/proc/PID/net/tcp``. Nothing is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Socket", "connections", "port_of"]


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
