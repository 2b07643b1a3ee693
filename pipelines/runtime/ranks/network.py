"""A private network for a job: a Linux network namespace whose loopback device carries only the job's traffic.

The counters of ``lo`` then count exactly the bytes that the ranks of the job send to each other. The first rank creates the
namespace, and the other ranks join it. Root can create a network namespace directly. Other users need a user namespace in addition,
which not every system allows.

Inside the namespace TCP's tail loss probes are switched off. If there are more ranks than cores, acknowledgements are often late,
and every probe sends 64 KB a second time (in a third of the 8 MB collectives of 8 ranks on 2 cores; never without probes).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..availability import Availability

__all__ = ["LoopbackCounters", "create_namespace", "join_namespace", "namespace_available", "read_loopback"]

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_IFREQ = struct.Struct("16sH22x")  # struct ifreq with ifr_flags


@dataclass(frozen=True)
class LoopbackCounters:
    """Traffic over ``lo`` since the namespace was created.

    Attributes:
        num_bytes: Number of bytes sent, with the headers of every packet.
        num_packets: Number of packets sent.
        num_resent: Number of TCP segments, of up to 64 KB, that were retransmitted.
    """

    num_bytes: int
    num_packets: int
    num_resent: int


def read_loopback() -> LoopbackCounters:
    """Return the counters of this process's network namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            fields = numbers.split()
            return LoopbackCounters(int(fields[8]), int(fields[9]), _num_resent())
    raise OSError("the loopback device has no counters in /proc/self/net/dev")


def _num_resent() -> int:
    names, values = (
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


def create_namespace() -> None:
    """Move this process into a new network namespace, and activate its loopback device. The process must have a single thread.

    Raises:
        OSError: The system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNET) != 0:
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            raise _last_error("a network namespace cannot be created")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = b"lo".ljust(16, b"\0")
        _, flags = _IFREQ.unpack(fcntl.ioctl(probe, _SIOCGIFFLAGS, _IFREQ.pack(name, 0)))
        fcntl.ioctl(probe, _SIOCSIFFLAGS, _IFREQ.pack(name, flags | _IFF_UP))
    with contextlib.suppress(OSError):  # /proc/sys is read-only in some containers: retransmissions are then counted
        Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")


def join_namespace(pid: int) -> None:
    """Move this process into the network namespace of process ``pid``. The process must have a single thread.

    Raises:
        OSError: The system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, flag in (("user", _CLONE_NEWUSER), ("net", _CLONE_NEWNET)):
        path = f"/proc/{pid}/ns/{kind}"
        if os.readlink(path) == os.readlink(f"/proc/self/ns/{kind}"):
            continue
        with open(path) as namespace:
            if libc.setns(namespace.fileno(), flag) != 0:
                raise _last_error(f"the {kind} namespace of process {pid} cannot be joined")


def namespace_available() -> Availability:
    """Check, by trying in a new process, whether processes started by this process can create a network namespace."""
    if not sys.platform.startswith("linux"):
        return Availability(f"network namespaces need Linux; this is {sys.platform}")
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {__name__} import create_namespace; create_namespace()"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot create a user namespace
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    if done.returncode == 0:
        return Availability()
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Availability(f"this system does not allow a process to create a network namespace ({last})")


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
