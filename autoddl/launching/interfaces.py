"""Network interfaces: the ones that NCCL uses, and a probe between hosts over their addresses.

NCCL meets the other ranks over TCP, on interfaces that it chooses on each host by itself. NCCL_SOCKET_IFNAME changes the choice
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html):

    NCCL_SOCKET_IFNAME   interfaces
    eth,ib0              whose names begin with eth or ib0
    =eth0                eth0
    ^docker              whose names do not begin with docker
    (not set)            ib*, otherwise others than docker* and lo, otherwise docker*, otherwise lo

**Probe.** Each host listens at the address of its interface. Every other host connects from its own, and must be answered by the
right host: an address such as 172.17.0.1 of a container bridge exists on every host.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autoddl.pipelines.runtime.ranks.interfaces import Interface

__all__ = ["IFNAME_VARIABLE", "ProbeServer", "Target", "nccl_interfaces", "probe"]

IFNAME_VARIABLE = "NCCL_SOCKET_IFNAME"
_TOKEN_BYTES = 16
_PROBE_SECONDS = 5.0


def nccl_interfaces(interfaces: Sequence[Interface], setting: str | None) -> tuple[Interface, ...]:
    """The interfaces that NCCL may use, in its order.

    Args:
        interfaces: of the host.
        setting: value of NCCL_SOCKET_IFNAME; None if it is not set.

    >>> names = [Interface(name, True, "10.0.0.1") for name in ("lo", "docker0", "eth0", "eth1")]
    >>> [[found.name for found in nccl_interfaces(names, setting)] for setting in (None, "eth", "=eth", "^lo,eth")]
    [['eth0', 'eth1'], ['eth0', 'eth1'], [], ['docker0']]
    """
    if setting:
        excludes, text = setting.startswith("^"), setting.removeprefix("^")
        exact, text = text.startswith("="), text.removeprefix("=")
        words = [word.partition(":")[0] for word in text.split(",") if word]

        def is_named(interface: Interface) -> bool:
            return any(interface.name == word if exact else interface.name.startswith(word) for word in words)

        return tuple(interface for interface in interfaces if is_named(interface) != excludes)
    with_address = [interface for interface in interfaces if interface.address]
    by_preference = (
        [one for one in with_address if one.name.startswith("ib")],
        [one for one in with_address if not one.name.startswith(("docker", "lo"))],
        [one for one in with_address if one.name.startswith("docker")],
        with_address,
    )
    return tuple(next(filter(None, by_preference), []))


@dataclass(frozen=True)
class Target:
    """A host to be probed.

    Attributes:
        host: its name.
        address: at which it listens.
        port: at which it listens.
        token: what it answers.
    """

    host: str
    address: str
    port: int
    token: str


class ProbeServer:
    """Listens at an address of this host, and answers with a token, until it is closed.

    Raises:
        OSError: this host does not have the address.
    """

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._socket = socket.create_server((address, 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(self.token.encode())

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def probe(source: str, targets: Sequence[Target]) -> dict[str, str]:
    """Connect to other hosts from an address of this host, to all at the same time; returns why it failed, by host."""
    faults: dict[str, str] = {}

    def connect(target: Target) -> None:
        try:
            place = (target.address, target.port)
            with socket.create_connection(place, timeout=_PROBE_SECONDS, source_address=(source, 0)) as connection:
                said = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL).decode(errors="replace")
                if said != target.token:
                    faults[target.host] = "another process answers there"
        except OSError as error:
            is_late = isinstance(error, TimeoutError)
            faults[target.host] = f"no answer within {_PROBE_SECONDS:g} s" if is_late else error.strerror or str(error)

    threads = [threading.Thread(target=connect, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * _PROBE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(faults)
