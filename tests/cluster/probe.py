"""A message and its answer over TCP, in tests of links.

``probe.py serve ADDRESS`` runs on one host, ``probe.py ask ADDRESS BYTES`` on another. The second prints the seconds until the
answer to a message of so many bytes has come, least of three.
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 5555


def serve(address: str) -> None:
    """Answer each message with a byte, until the connection ends."""
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            while header := connection.recv(8):
                left = int.from_bytes(header, "big")
                while left:
                    left -= len(connection.recv(min(left, 1 << 20)))
                connection.sendall(b"!")


def ask(address: str, size: int) -> float:
    """Send messages; returns the least time until an answer [s]."""
    with socket.create_connection((address, PORT), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = []
        for _ in range(3):
            start = time.monotonic()
            connection.sendall(size.to_bytes(8, "big") + bytes(size))
            assert connection.recv(1) == b"!"
            seconds.append(time.monotonic() - start)
    return min(seconds)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(ask(sys.argv[2], int(sys.argv[3])))
