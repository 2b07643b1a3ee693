"""The bytes that ranks really send to each other.

In a network of its own (`network`) the counters of the loopback device hold what the ranks of a job sent and nothing else.
`measure` reads them around a section that all ranks of the job enter together:

    barrier, quiet, read; barrier; section; barrier, quiet, read; barrier

What is counted besides the tensors' bytes, and what becomes of it:

- *Headers.* Every packet carries 20 bytes of IP and 32 of TCP (with its timestamps); pure acknowledgements are nothing else. The
  device counts packets too, so ``bytes - 52 packets`` is the payload. (``lo`` takes the Ethernet header off before it counts.)
- *The barriers* within the measured span send some hundred bytes per rank, not always the same: `measure_baseline` measures
  them with an empty section, to be subtracted. What remains of them is noise of a few hundred bytes.
- *OneFlow's own messages* are left in: 448 bytes with every message between two ranks, collective or point-to-point
  (`MESSAGE_BYTES`; measured over 200 tiny transfers on 2, 4 and 8 ranks, to within a byte per message).

- *What TCP sends twice*, up to 64 KB at a time, is left in but reported: `Traffic.num_resent`. It does not happen with the settings
  of `network.create_namespace`, unless the system forbids them.

So ``payload_bytes = tensor bytes + 448 messages``, where a message is what the cost model counts: p - 1 per rank in an all-gather.
With messages of 16 KB it is 2.7 % more than the tensors' bytes, with 256 KB 0.2 %.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .load import load_oneflow
from .network import read_loopback

__all__ = [
    "BYTES_TOLERANCE",
    "HEADER_BYTES",
    "MESSAGE_BYTES",
    "NOISE_BYTES",
    "Meter",
    "Traffic",
    "measure",
    "measure_baseline",
    "synchronize",
]

#: IPv4 and TCP with the timestamp option, on every packet of ``lo``.
HEADER_BYTES = 20 + 32
#: What OneFlow sends for itself with every message between two ranks.
MESSAGE_BYTES = 448
#: What one barrier more or less sends, per rank: how far a count may be off, whatever is counted.
NOISE_BYTES = 400
#: How far a count may be off beyond that, of what is predicted.
BYTES_TOLERANCE = 0.03
# How many empty sections are measured.
_NUM_BASELINES = 9


@dataclass(frozen=True)
class Traffic:
    """What all ranks of a job together sent: ``payload_bytes`` in ``num_packets`` packets, ``num_resent`` of them again."""

    payload_bytes: int
    num_packets: int
    num_resent: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.payload_bytes - other.payload_bytes,
            self.num_packets - other.num_packets,
            self.num_resent - other.num_resent,
        )


def synchronize() -> None:
    """Wait until all pending operations of all ranks of the job are done; every rank has to call it.

    A rank whose partners do not come within ``ONEFLOW_TIMEOUT_SECONDS`` ends its process, with its stack in the log. (OneFlow's own
    barrier gives up only after one to two times as long.)
    """
    eager = load_oneflow()._oneflow_internal.eager
    eager.Sync()
    timeout_s = float(os.environ.get("ONEFLOW_TIMEOUT_SECONDS", 0))
    if timeout_s:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        eager.ClusterSync()
    finally:
        faulthandler.cancel_dump_traceback_later()


def measure_baseline() -> Traffic:
    """What `measure` would count for a section that sends nothing; every rank of the job has to call it."""
    return _median([measure(lambda: None, Traffic(0, 0, 0))[1] for _ in range(_NUM_BASELINES)])


def measure(section: Callable[[], Any], baseline: Traffic) -> tuple[Any, Traffic]:
    """Run ``section`` and count what all ranks of the job send meanwhile; every rank has to call it, on a private network.

    Returns:
        what ``section`` returned, and the traffic less ``baseline`` (see `measure_baseline`); the same on every rank.
    """
    before = _quiet_traffic()
    synchronize()
    result = section()
    after = _quiet_traffic()
    synchronize()
    return result, after - before - baseline


class Meter:
    """Counts sections that follow one another, at half the cost of `measure`: one reading ends a section and begins the next.

    Every rank of the job makes one and calls it with the same sections, on a private network; what is sent between two sections
    counts for the second one.
    """

    def __init__(self) -> None:
        self._baseline = Traffic(0, 0, 0)
        self._last = _quiet_traffic()
        self._baseline = _median([self(lambda: None)[1] for _ in range(_NUM_BASELINES)])

    def __call__(self, section: Callable[[], Any]) -> tuple[Any, Traffic]:
        """What ``section`` returned, and what all ranks of the job sent meanwhile; the same on every rank."""
        synchronize()
        result = section()
        traffic = _quiet_traffic()
        sent, self._last = traffic - self._last - self._baseline, traffic
        return result, sent


def _median(traffic: Sequence[Traffic]) -> Traffic:
    return sorted(traffic, key=lambda each: each.payload_bytes)[len(traffic) // 2]


def _quiet_traffic(quiet_s: float = 0.01) -> Traffic:
    """All traffic up to now, after a barrier and once no payload has moved for a while: a barrier's last messages are late.

    Acknowledgements come up to 40 ms later still, and do not matter.
    """
    synchronize()
    traffic = _traffic()
    since = time.monotonic()
    while time.monotonic() - since < quiet_s:
        time.sleep(quiet_s / 3)
        now = _traffic()
        if now.payload_bytes != traffic.payload_bytes:
            since = time.monotonic()
        traffic = now
    return traffic


def _traffic() -> Traffic:
    counters = read_loopback()
    payload_bytes = counters.num_bytes - HEADER_BYTES * counters.num_packets
    return Traffic(payload_bytes, counters.num_packets, counters.num_resent)
