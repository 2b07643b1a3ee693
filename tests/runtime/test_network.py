"""Counting bytes on a network of one's own, against bytes that are sent by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autoddl.pipelines.runtime.network import namespace_available

AVAILABLE = namespace_available()
needs_namespace = pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason)

SEND = """
import os, socket, subprocess, sys
from autoddl.pipelines.runtime.network import create_namespace, join_namespace, read_loopback
from autoddl.pipelines.runtime.wire import HEADER_BYTES
create_namespace()
assert read_loopback().num_bytes == 0
num_bytes = int(sys.argv[1])
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
other, _ = server.accept()
before = read_loopback()
client.sendall(bytes(num_bytes)) if num_bytes < 10_000 else [client.send(bytes(1000)) for _ in range(num_bytes // 1000)]
while num_bytes:
    num_bytes -= len(other.recv(1 << 20))
after = read_loopback()
print(after.num_bytes - before.num_bytes - HEADER_BYTES * (after.num_packets - before.num_packets))
# A second process that joins sees the same counters and can connect.
joined = subprocess.run([sys.executable, "-c",
    "import os, socket, sys; from autoddl.pipelines.runtime.network import join_namespace, read_loopback\\n"
    "join_namespace(int(sys.argv[1])); socket.create_connection(('127.0.0.1', int(sys.argv[2])))\\n"
    "print(read_loopback().num_packets)", str(os.getppid() if False else os.getpid()), str(server.getsockname()[1])],
    capture_output=True, text=True, timeout=60, check=True)
assert int(joined.stdout) > after.num_packets
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_namespace
@pytest.mark.parametrize("num_bytes", [1, 5000, 40_000])
def test_the_payload_is_counted_exactly(num_bytes):
    assert run(SEND, str(num_bytes)) == f"{num_bytes}\n"


@needs_namespace
def test_the_callers_own_network_stays():
    assert (
        run(
            "from autoddl.pipelines.runtime.network import namespace_available, read_loopback\n"
            "import os; before = os.readlink('/proc/self/ns/net'); assert namespace_available()\n"
            "assert os.readlink('/proc/self/ns/net') == before; read_loopback(); print('same')"
        )
        == "same\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's namespaces")
def test_where_there_is_none_the_reason_is_given():
    """A system that forbids namespaces, as seen by a process whose libc refuses to make one."""
    code = (
        "import ctypes, sys\n"
        "from autoddl.pipelines.runtime import network\n"
        "class Forbidding:\n"
        "    def __init__(self, *args, **kwargs): ctypes.set_errno(1)\n"
        "    def unshare(self, flags): return -1\n"
        "network.ctypes.CDLL = Forbidding\n"
        "try:\n"
        "    network.create_namespace()\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    assert run(code) == "[Errno 1] a network namespace cannot be created: Operation not permitted\n"


def test_other_systems_are_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    available = namespace_available()
    assert not available
    assert available.reason == "network namespaces are Linux's; this is darwin"
