"""The network interfaces of this host."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Interface", "list_interfaces"]

_SIOCGIFADDR = 0x8915
_REQUEST_BYTES = 40  # of struct ifreq


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: of the interface.
        is_up: whether it is up and has a carrier.
        address: its IPv4 address; "" if it has none.
    """

    name: str
    is_up: bool
    address: str


def list_interfaces() -> tuple[Interface, ...]:
    """The network interfaces of this host."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            address = ""
            with contextlib.suppress(OSError):
                request = struct.pack(f"{_REQUEST_BYTES}s", name.encode())
                address = socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
            found.append(Interface(name, _is_up(name), address))
    return tuple(found)


def _is_up(name: str) -> bool:
    """Whether the kernel says that an interface is up; virtual ones such as lo are "unknown", and count as up by their flag."""
    folder = Path("/sys/class/net") / name
    try:
        state, flags = (folder / "operstate").read_text().strip(), int((folder / "flags").read_text(), 16)
    except (OSError, ValueError):
        return True  # not known: a connection will tell
    return state == "up" or (state == "unknown" and flags & 1 == 1)
