"""TCP connections as the kernel lists them (``/proc/PID/net/tcp``); nothing is sent to find out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Socket", "connections", "port_of"]


class Socket(NamedTuple):
    """A socket of a network namespace.

    Attributes:
        here, there: addresses in hexadecimal, ``ADDRESS:PORT``.
        inode: of the socket, to which file descriptors point.
        is_listening, is_established: its state; both are False in others.
    """

    here: str
    there: str
    inode: str
    is_listening: bool
    is_established: bool


def connections(pid: int | str = "self") -> Iterator[Socket]:
    """All in the network namespace of a process; none where it is gone."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, here, there, state, *fields = line.split()
                yield Socket(here, there, fields[5], state == "0A", state == "01")


def port_of(address: str) -> int:
    """The port of an address of a `Socket`."""
    return int(address.rpartition(":")[2], 16)
