"""How ranks leave a job that is done: all of them stop using OneFlow's network before any of them goes.

OneFlow aborts a process in which a connection to another rank breaks ("io_event_poller.cpp ... Check failed"): as a rank sees it, a
rank that has left is one that was lost. So ranks leave in two phases. First each takes OneFlow's sockets out of the sets of events
that OneFlow's threads wait for: nothing is closed, so nobody notices, and from then on a broken connection is no event. When all
have done so they may go, in any order.

The control service, over which OneFlow's barriers go, is another network (gRPC's): it bears the loss of a peer, and still works
after the first phase.
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
    """Let OneFlow's threads no longer hear of its connections to other ranks; how many there were.

    Its sockets are registered edge-triggered and not exclusively: gRPC's, the only others of that kind, are exclusive.
    """
    left = 0
    for waiting_fd, socket_fd, events in list(_registered()):
        is_oneflows = bool(events & select.EPOLLET) and not events & select.EPOLLEXCLUSIVE
        if is_oneflows and _target(socket_fd).startswith("socket:"):
            with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(waiting_fd)) as waiting:
                waiting.unregister(socket_fd)
                left += 1
    return left


def _registered() -> Iterator[tuple[int, int, int]]:
    """What this process waits for with epoll: the set, the file descriptor in it, and its events."""
    for entry in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            for line in entry.read_text().splitlines():
                words = line.split()  # "tfd: 33 events: 8000001d data: ..."
                if words[:1] == ["tfd:"]:
                    yield int(entry.name), int(words[1]), int(words[3], 16)


def _target(fd: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def wait_for_departures(patience_s: float) -> bool:
    """For the rank that serves OneFlow's control service: wait until no other process is connected to a port on which this one
    listens; False after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while _num_visitors():
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK_SECONDS)
    return True


def _num_visitors() -> int:
    """How many connections to ports on which this process listens come from other processes."""
    own = {_target(int(entry.name)) for entry in Path("/proc/self/fd").iterdir()}
    own_connections = [one for one in connections() if f"socket:[{one.inode}]" in own]
    served = {port_of(one.here) for one in own_connections if one.is_listening}
    established = [one for one in own_connections if one.is_established]
    ours = {one.here for one in established}
    return sum(port_of(one.here) in served and one.there not in ours for one in established)
