"""Measuring the bytes that ranks send to each other.

In a private network (`network`) the counters of the loopback device hold exactly what the ranks of a job sent. `measure` reads
them around a section that all ranks of the job enter together:

    barrier, quiet, read; barrier; section; barrier, quiet, read; barrier

Bytes other than the tensors', and their treatment:

- *Headers.* Every packet carries 20 bytes of IP and 32 of TCP (with its timestamps); pure acknowledgements are headers only. The
  device counts packets too, so ``bytes - 52 packets`` is the payload. (``lo`` removes the Ethernet header before it counts.)
- *The barriers* within the measured span send some hundred bytes per rank, not always the same number. `measure_baseline` measures
  them with an empty section, to be subtracted; noise of a few hundred bytes remains.
- *OneFlow's own messages* are included: 448 bytes with every message between two ranks, collective or point-to-point
  (`MESSAGE_BYTES`; measured over 200 tiny transfers on 2, 4 and 8 ranks, to within a byte per message).
- *TCP retransmissions*, up to 64 KB at a time, are included but reported: `Traffic.num_resent`. They do not occur with the settings
  of `network.create_namespace`, unless the system forbids these.

So ``payload_bytes = tensor bytes + 448 messages``, where a message is what the cost model counts: p - 1 per rank in an all-gather.
With messages of 16 KB this is 2.7 % more than the tensors' bytes, with 256 KB 0.2 %.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..load import load_oneflow
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
#: Bytes that OneFlow sends for itself with every message between two ranks.
MESSAGE_BYTES = 448
#: Bytes of one barrier per rank: the error of any count.
NOISE_BYTES = 400
#: Relative error of a count beyond that.
BYTES_TOLERANCE = 0.03
# Number of empty sections that are measured.
_NUM_BASELINES = 9


@dataclass(frozen=True)
class Traffic:
    """Traffic of all ranks of a job together.

    Attributes:
        payload_bytes: bytes without headers.
        num_packets: number of packets.
        num_resent: number of TCP segments that were retransmitted.
    """

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

    If the other ranks do not join within ``ONEFLOW_TIMEOUT_SECONDS``, the process ends, with its stack in the log. (OneFlow's own
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
    """The traffic that `measure` counts for an empty section; every rank of the job has to call it."""
    return _median([measure(lambda: None, Traffic(0, 0, 0))[1] for _ in range(_NUM_BASELINES)])


def measure(section: Callable[[], Any], baseline: Traffic) -> tuple[Any, Traffic]:
    """Run ``section`` and count what all ranks of the job send meanwhile; every rank has to call it, on a private network.

    Returns:
        The result of ``section``, and the traffic less ``baseline`` (see `measure_baseline`); the same on every rank.
    """
    before = _quiet_traffic()
    synchronize()
    result = section()
    after = _quiet_traffic()
    synchronize()
    return result, after - before - baseline


class Meter:
    """Counts consecutive sections, at half the cost of `measure`: one reading ends a section and begins the next.

    Every rank of the job creates one and calls it with the same sections, on a private network. Traffic between two sections
    counts for the second one.
    """

    def __init__(self) -> None:
        self._baseline = Traffic(0, 0, 0)
        self._last = _quiet_traffic()
        self._baseline = _median([self(lambda: None)[1] for _ in range(_NUM_BASELINES)])

    def __call__(self, section: Callable[[], Any]) -> tuple[Any, Traffic]:
        """The result of ``section``, and what all ranks of the job sent meanwhile; the same on every rank."""
        synchronize()
        result = section()
        traffic = _quiet_traffic()
        sent, self._last = traffic - self._last - self._baseline, traffic
        return result, sent


def _median(traffic: Sequence[Traffic]) -> Traffic:
    return sorted(traffic, key=lambda each: each.payload_bytes)[len(traffic) // 2]


def _quiet_traffic(quiet_s: float = 0.01) -> Traffic:
    """All traffic so far, after a barrier and after a time without payload: a barrier's last messages are late.

    Acknowledgements arrive up to 40 ms later; they are not counted.
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
