"""Run as a script by test_network.py, since a namespace is for a whole process.

``send N ...``: on a network of its own, send N bytes over TCP and print how many were counted, for each N; then start ``visit``,
which has to see more packets than there were.
``visit PID PORT``: join the network of process PID, connect to the port there, print the number of packets.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

from autoddl.pipelines.runtime.ranks.network import create_namespace, join_namespace, read_loopback
from autoddl.pipelines.runtime.ranks.wire import HEADER_BYTES


def send(*sizes: int) -> None:
    create_namespace()
    assert read_loopback().num_bytes == read_loopback().num_packets == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        for num_bytes in sizes:
            print(counted(server, num_bytes), flush=True)
        before = read_loopback().num_packets
        visit = [sys.executable, __file__, "visit", str(os.getpid()), str(server.getsockname()[1])]
        visited = subprocess.run(visit, capture_output=True, text=True, timeout=60, check=True)
        assert int(visited.stdout) > before


def counted(server: socket.socket, num_bytes: int) -> int:
    """The payload that the counters see when so many bytes go over a connection of their own."""
    with socket.create_connection(server.getsockname()) as client, server.accept()[0] as other:
        before = read_loopback()
        for start in range(0, num_bytes, 1000):  # in pieces: many packets, many acknowledgements
            client.sendall(bytes(min(1000, num_bytes - start)))
        while num_bytes:
            num_bytes -= len(other.recv(1 << 20))
        after = read_loopback()
    num_packets = after.num_packets - before.num_packets
    return after.num_bytes - before.num_bytes - HEADER_BYTES * num_packets


def visit(pid: int, port: int) -> None:
    join_namespace(pid)
    with socket.create_connection(("127.0.0.1", port)):
        print(read_loopback().num_packets)


if __name__ == "__main__":
    actions: dict[str, Callable[..., None]] = {"send": send, "visit": visit}
    actions[sys.argv[1]](*map(int, sys.argv[2:]))
