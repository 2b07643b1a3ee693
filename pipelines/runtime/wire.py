"""The bytes that ranks really send to each other.

In a network of its own (`network`) the counters of the loopback device hold what the ranks of a job sent and nothing else.
`measure` reads them around a section that all ranks of the job enter together:

    barrier, quiet, read; barrier; section; barrier, quiet, read; barrier

What is counted besides the tensors' bytes, and what becomes of it:

- *Headers.* Every packet carries 14 bytes of Ethernet, 20 of IP and 32 of TCP (with its timestamps), and pure acknowledgements
  are nothing else. The device counts packets too, so ``bytes - 66 packets`` is the payload.
- *The barriers* within the measured span send about 500 bytes per rank, give or take some hundred in all: `measure_baseline`
  measures them with an empty section, to be subtracted.
- *OneFlow's own messages* remain: 310 to 330 bytes for every message (measured on 2, 4 and 8 ranks, all collectives and
  point-to-point, with tensors of a few bytes), that is `MESSAGE_BYTES` for each of the messages that
  the cost model counts.

So `Traffic.payload_bytes` = bytes of the tensors + about 320 for each message; with messages of 16 KB and more it is within 2 % of
the former alone, with 1 MB within 0.1 to 0.5 % (the kernel sometimes sends a segment twice).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .load import load_oneflow
from .network import LoopbackCounters, read_loopback

__all__ = ["HEADER_BYTES", "MESSAGE_BYTES", "Traffic", "measure", "measure_baseline", "synchronize"]

#: Ethernet, IPv4 and TCP with the timestamp option, on every packet of ``lo``.
HEADER_BYTES = 14 + 20 + 32
#: What OneFlow sends for itself with every message between two ranks.
MESSAGE_BYTES = 320


@dataclass(frozen=True)
class Traffic:
    """What all ranks of a job together sent: ``payload_bytes`` in ``num_packets`` packets."""

    payload_bytes: int
    num_packets: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.payload_bytes - other.payload_bytes, self.num_packets - other.num_packets)


def synchronize() -> None:
    """Wait until all pending operations of all ranks of the job are done; every rank has to call it."""
    eager = load_oneflow()._oneflow_internal.eager
    eager.Sync()
    eager.ClusterSync()


def measure_baseline() -> Traffic:
    """What `measure` would count for a section that sends nothing; every rank of the job has to call it."""
    return measure(lambda: None, Traffic(0, 0))[1]


def measure(section: Callable[[], Any], baseline: Traffic) -> tuple[Any, Traffic]:
    """Run ``section`` and count what all ranks of the job send meanwhile; every rank has to call it, on a private network.

    Returns:
        what ``section`` returned, and the traffic less ``baseline`` (see `measure_baseline`); the same on every rank.
    """
    before = _quiet_counters()
    synchronize()
    result = section()
    after = _quiet_counters()
    synchronize()
    counted = after - before
    payload_bytes = counted.num_bytes - HEADER_BYTES * counted.num_packets
    return result, Traffic(payload_bytes, counted.num_packets) - baseline


def _quiet_counters(quiet_s: float = 0.01) -> LoopbackCounters:
    """The counters after a barrier, once nothing has moved for a while: the last messages of a barrier are late."""
    synchronize()
    counters = read_loopback()
    since = time.monotonic()
    while time.monotonic() - since < quiet_s:
        time.sleep(quiet_s / 5)
        now = read_loopback()
        if now != counters:
            counters, since = now, time.monotonic()
    return counters
