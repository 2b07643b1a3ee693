"""The process that carries all packets of an emulated cluster, each at its time (:mod:`.links`).

``python relay.py DESCRIPTION`` where the description is a JSON list of hosts:

    {"name": ..., "pid": a process there, "address": ..., "wire": [bandwidth, latency], "loopback": the same or null}

It creates the device ``eth0`` in each namespace, and redirects packets of limited loopbacks to a device ``inside``.  Both are TUN
devices, whose packets this process reads and, when they are due, writes back: the kernel's own delay queue (netem) is not there
in every kernel, and a token bucket lets bursts pass faster than the bandwidth.  Commands are JSON lines on standard input, each
answered by a line; the end of standard input ends the process, and with it the devices.

    {"host": ..., "wire": [bandwidth, latency]}     {"host": ..., "is_cut": true}     {"counts": true}

Packets that a host sends wait for its wire in its own kernel, behind a token bucket that holds little more than one packet: TCP
keeps short what waits there, as before a real network card, and the rest waits in the sockets.  If they waited here,
acknowledgements would be behind megabytes of data, and hosts that send to each other, or in a circle, would be as if on wires of
70 to 80 % of the bandwidth.  A packet is small enough to pass its wire in a millisecond, and few of a connection wait: more
would keep short messages of other connections waiting, and rings, whose hosts ask each other for data, would be slower than on
real wires.

It runs before all other processes (a real-time priority), so that ranks that spin do not delay packets.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.links import Link, LinkState  # noqa: E402 - a script of its own

_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
#: Bytes of the smallest and the largest packets that wires take: those of Ethernet, and of what a device allows.
_MTUS = 1500, 65500
#: How long a packet may keep a wire busy, in seconds.  Smaller packets cost this process more: each takes about the same time.
_PACKET_S = 1e-3
#: Packets of one connection that TCP lets wait for a wire.
_MAX_WAITING = 2
#: Bytes that may wait for a wire in the kernel: more than TCP ever lets.
_QUEUE = 1 << 26
#: What a token bucket holds beside one packet, in seconds of its wire: the kernel's timers may be late, and round its size.
_BUCKET_S = 1e-3
#: Packets that are read from one device before the others have their turn.
_BURST = 16


@dataclass
class _Port:
    """A device whose packets the relay reads: a host's wire or its loopback."""

    pid: int
    fd: int
    state: LinkState
    is_loopback: bool


class Relay:
    """All links of a cluster.

    Args:
        hosts: the description; see the module's docstring.
    """

    def __init__(self, hosts: list[dict[str, Any]]) -> None:
        self._wires: dict[str, _Port] = {}
        self._loopbacks: dict[str, _Port] = {}
        self._by_address: dict[bytes, _Port] = {}
        for host in hosts:
            _enter(host["pid"])
            _widen_tcp_windows()
            wire = _Port(host["pid"], _tun("eth0"), LinkState(_link(host["wire"])), is_loopback=False)
            _run(f"ip address add {host['address']}/24 dev eth0", "ip link set eth0 up")
            _set_up_wire(wire.state.link)
            self._wires[host["name"]] = wire
            self._by_address[bytes(map(int, host["address"].split(".")))] = wire
            if host["loopback"] is not None:
                port = _Port(host["pid"], _tun("inside"), LinkState(_link(host["loopback"])), is_loopback=True)
                self._loopbacks[host["name"]] = port
                _redirect_loopback(port.state.link)
        _enter(os.getppid())
        self._ports = {port.fd: port for port in (*self._wires.values(), *self._loopbacks.values())}
        # Packets under way: (due time, number, device to write to, packet).
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._num_packets = 0

    def run(self) -> None:
        """Carry packets until standard input ends."""
        command = b""
        while True:
            wait = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            ready, _, _ = select.select([*self._ports, 0], [], [], wait)
            self._deliver()
            for fd in ready:
                if fd:
                    self._read(self._ports[fd])
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, command = (command + data).split(b"\n")
                for line in lines:
                    print(json.dumps(self._obey(json.loads(line))), flush=True)
            self._deliver()

    def _read(self, port: _Port) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(port.fd, _MTUS[1] + 100)
            except BlockingIOError:
                return
            if packet[0] >> 4 == 4:  # the hosts have no IPv6 addresses
                self._schedule(port, packet)

    def _schedule(self, port: _Port, packet: bytes) -> None:
        now, size = time.monotonic(), len(packet)
        if port.is_loopback:
            header = 4 * (packet[0] & 15)
            connection = packet[header : header + 4]  # source and destination port
            due, target = port.state.send(now, size, connection) + port.state.link.latency_s, port
        else:
            found = self._by_address.get(packet[16:20])
            sent = port.state.send(now, size)
            if found is None or port.state.is_cut or found.state.is_cut:
                return
            target = found
            latency = (port.state.link.latency_s + target.state.link.latency_s) / 2
            due = target.state.receive(sent, size) + latency
        self._num_packets += 1
        heapq.heappush(self._under_way, (due, self._num_packets, target.fd, packet))

    def _deliver(self) -> None:
        """Write the packets that are due; a host that is gone takes none."""
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, fd, packet = heapq.heappop(self._under_way)
            with contextlib.suppress(OSError):
                os.write(fd, packet)

    def _obey(self, command: dict[str, Any]) -> Any:
        if "counts" in command:
            return {
                name: {
                    "wire": port.state.sent,
                    "loopback": self._loopbacks[name].state.sent if name in self._loopbacks else None,
                }
                for name, port in self._wires.items()
            }
        wire = self._wires[command["host"]]
        if "wire" in command:
            wire.state.link = _link(command["wire"])
            _enter(wire.pid)
            _set_up_wire(wire.state.link)
            _enter(os.getppid())
        if "is_cut" in command:
            wire.state.is_cut = command["is_cut"]
        return True


def _link(values: list[float | None]) -> Link:
    """A link of (bandwidth, latency); no bandwidth is no limit."""
    bandwidth, latency = values
    return Link(inf if bandwidth is None else bandwidth, latency or 0.0)


def _enter(pid: int) -> None:
    """Enter the network namespace of a process."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to the network of process {pid}")
    os.close(namespace)


def _widen_tcp_windows() -> None:
    """Let a connection of the present network namespace fill its link from its first byte: latency and bandwidth alone count.

    What it sends ahead waits for the link, so it is limited: if it took longer than the retransmission timeout of 0.2 s, TCP would
    take packets for lost that are not, and send them again.
    """
    settings = {
        "tcp_rmem": "4096 4194304 16777216",
        "tcp_wmem": "4096 2097152 2097152",
        "tcp_slow_start_after_idle": "0",
    }
    for name, value in settings.items():
        Path(f"/proc/sys/net/ipv4/{name}").write_text(value)


def _mtu_of(link: Link) -> int:
    """Bytes of the largest packet of a link."""
    return round(min(max(_PACKET_S * link.bandwidth, _MTUS[0]), _MTUS[1]))


def _set_up_wire(link: Link) -> None:
    """Let packets of the present network namespace wait for its wire in the kernel (see the module's docstring)."""
    _run(f"ip link set eth0 mtu {_mtu_of(link)} gso_max_segs 1")
    Path("/proc/sys/net/ipv4/tcp_limit_output_bytes").write_text(str(_MAX_WAITING * _mtu_of(link)))
    if link.bandwidth < inf:
        bucket = _mtu_of(link) + round(_BUCKET_S * link.bandwidth)
        _run(f"tc qdisc replace dev eth0 root tbf rate {8 * link.bandwidth:.0f}bit burst {bucket} limit {_QUEUE}")
    else:
        _run("tc qdisc replace dev eth0 root pfifo_fast")


def _tun(name: str) -> int:
    """Create a device in the present network namespace; it exists as long as this process."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN_WITHOUT_HEADER))
    return fd


def _redirect_loopback(link: Link) -> None:
    """Send what leaves through the loopback to the device ``inside``, and accept there what comes back."""
    settings = ["inside.accept_local=1", "inside.route_localnet=1", "inside.rp_filter=0", "all.rp_filter=0"]
    _run(
        f"ip link set inside mtu {_mtu_of(link)} up",
        f"ip link set lo mtu {_mtu_of(link)}",
        f"sysctl -qw {' '.join(f'net.ipv4.conf.{setting}' for setting in settings)}",
        "tc qdisc add dev lo clsact",
        "tc filter add dev lo egress protocol ip u32 match u32 0 0 action mirred egress redirect dev inside",
    )


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def main() -> None:
    """Make the devices, say so with a line, and carry packets."""
    relay = Relay(json.loads(sys.argv[1]))
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except PermissionError:  # a control group without real-time budget
        os.nice(-20)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    print("true", flush=True)
    relay.run()


if __name__ == "__main__":
    main()
