"""The links of hosts while they are used: starts the relay (:mod:`.relay`), and changes links."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from .links import UNLIMITED, Link

__all__ = ["Traffic", "Wires"]


class Traffic(NamedTuple):
    """What a host has sent.

    Attributes:
        wire_bytes: to other hosts, with all headers of the network.
        loopback_bytes: to itself; 0 if its loopback has no limits, and so is not counted.
    """

    wire_bytes: int
    loopback_bytes: int


class Wires:
    """The links of some hosts.

    Args:
        pids: a process in the namespace of each host.
        addresses: the address of each host.
        wires: links to other hosts; none: no limits.
        loopbacks: links inside hosts.
    """

    def __init__(
        self,
        pids: Mapping[str, int],
        addresses: Mapping[str, str],
        wires: Mapping[str, Link],
        loopbacks: Mapping[str, Link],
    ) -> None:
        hosts = [
            {
                "name": name,
                "pid": pid,
                "address": addresses[name],
                "wire": _described(wires.get(name, UNLIMITED)),
                "loopback": _described(loopbacks[name]) if name in loopbacks else None,
            }
            for name, pid in pids.items()
        ]
        # In a session of its own: Ctrl-C should not cut the wires before the launcher has ended its ranks.
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("relay.py")), json.dumps(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def limit(self, host: str, link: Link) -> None:
        """Replace the link between a host and all others."""
        self._ask({"host": host, "wire": _described(link)})

    def cut(self, host: str) -> None:
        """Lose all packets between a host and all others."""
        self._ask({"host": host, "is_cut": True})

    def restore(self, host: str) -> None:
        """End :meth:`cut`."""
        self._ask({"host": host, "is_cut": False})

    def traffic(self) -> dict[str, Traffic]:
        """What each host has sent since the start."""
        counts = self._ask({"counts": True})
        return {name: Traffic(found["wire"][0], (found["loopback"] or [0])[0]) for name, found in counts.items()}

    def cpu_s(self) -> float:
        """CPU seconds that the relay has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def close(self) -> None:
        """End the relay."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _ask(self, command: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the relay of the hosts' packets has ended with exit code {self._process.wait(10)}")
        return json.loads(line)


def _described(link: Link) -> list[float | None]:
    return [None if link.bandwidth == inf else link.bandwidth, link.latency_s]
