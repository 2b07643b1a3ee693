"""Run as a script by test_network.py, since a namespace is for a whole process.

``send N``: on a network of its own, send N bytes over TCP and print how many were counted; then start ``visit`` and print how many
packets that saw.  ``visit PID PORT``: join the network of process PID, connect to the port there, print the number of packets.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from autoddl.pipelines.runtime.network import create_namespace, join_namespace, read_loopback
from autoddl.pipelines.runtime.wire import HEADER_BYTES


def send(num_bytes: int) -> None:
    create_namespace()
    assert read_loopback().num_bytes == read_loopback().num_packets == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client, server.accept()[0] as other:
            before = read_loopback()
            for start in range(0, num_bytes, 1000):  # in pieces: many packets, many acknowledgements
                client.sendall(bytes(min(1000, num_bytes - start)))
            while num_bytes:
                num_bytes -= len(other.recv(1 << 20))
            after = read_loopback()
        num_packets = after.num_packets - before.num_packets
        print(after.num_bytes - before.num_bytes - HEADER_BYTES * num_packets, flush=True)
        visit = [sys.executable, __file__, "visit", str(os.getpid()), str(address[1])]
        visited = subprocess.run(visit, capture_output=True, text=True, timeout=60, check=True)
        assert int(visited.stdout) > after.num_packets


def visit(pid: int, port: int) -> None:
    join_namespace(pid)
    with socket.create_connection(("127.0.0.1", port)):
        print(read_loopback().num_packets)


if __name__ == "__main__":
    {"send": send, "visit": visit}[sys.argv[1]](*map(int, sys.argv[2:]))
