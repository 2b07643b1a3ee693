"""Lets ranks leave a finished job: all ranks stop using OneFlow's network before any rank exits.

OneFlow aborts a process if a connection to another rank breaks ("io_event_poller.cpp ... Check failed"), also if the other rank has
exited normally. So ranks leave in two phases:

1. Each rank removes OneFlow's sockets from the epoll sets that OneFlow's threads wait for (`leave_network`). No connection is
   closed. From then on, OneFlow ignores broken connections.
2. When all ranks have done this, they may exit in any order.

OneFlow's barriers use a separate network, its control service (gRPC). It tolerates the loss of a peer, and still works after the
first phase.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

from .connections import connections, port_of

__all__ = ["leave_network", "wait_for_departures"]

_TICK_SECONDS = 0.02


def leave_network() -> int:
    """Make OneFlow's threads ignore events of its connections to other ranks.

    OneFlow's sockets are recognised by their registration, which is edge-triggered and not exclusive. The only other sockets that
    are edge-triggered are gRPC's, and these are exclusive.

    Returns:
        The number of connections.
    """
    num_removed = 0
    for epoll_fd, socket_fd, events in list(_epoll_entries()):
        is_oneflow = bool(events & select.EPOLLET) and not events & select.EPOLLEXCLUSIVE
        if is_oneflow and _link_target(socket_fd).startswith("socket:"):
            with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(epoll_fd)) as epoll:
                epoll.unregister(socket_fd)
                num_removed += 1
    return num_removed


def _epoll_entries() -> Iterator[tuple[int, int, int]]:
    """Iterate over the entries of this process's epoll sets: (epoll file descriptor, registered file descriptor, events)."""
    for entry in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            for line in entry.read_text().splitlines():
                words = line.split()  # "tfd: 33 events: 8000001d data: ..."
                if words[:1] == ["tfd:"]:
                    yield int(entry.name), int(words[1]), int(words[3], 16)


def _link_target(fd: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def wait_for_departures(patience_s: float) -> bool:
    """Wait until no other process is connected to a port on which this process listens, for at most ``patience_s`` seconds.

    Rank 0, which serves OneFlow's control service, calls it before it exits.

    Returns:
        Whether all connections have ended in time.
    """
    deadline = time.monotonic() + patience_s
    while _num_clients():
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK_SECONDS)
    return True


def _num_clients() -> int:
    """Return the number of connections from other processes to ports on which this process listens."""
    own_links = {_link_target(int(entry.name)) for entry in Path("/proc/self/fd").iterdir()}
    own_sockets = [socket for socket in connections() if f"socket:[{socket.inode}]" in own_links]
    served_ports = {port_of(socket.here) for socket in own_sockets if socket.is_listening}
    established = [socket for socket in own_sockets if socket.is_established]
    own_addresses = {socket.here for socket in established}
    return sum(port_of(socket.here) in served_ports and socket.there not in own_addresses for socket in established)
