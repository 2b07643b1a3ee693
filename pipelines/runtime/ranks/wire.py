"""Measures the bytes that ranks send to each other.

In a private network (`network`) the counters of the loopback device count exactly the bytes that the ranks of a job send. `measure`
reads the counters before and after a section, which all ranks of the job run together. It waits until the counters are quiet:

    barrier, quiet, read; barrier; section; barrier, quiet, read; barrier

The counters include bytes that do not belong to tensors:

- *Headers.* Every packet has 20 bytes of IP and 32 bytes of TCP (with its timestamps). Pure acknowledgements consist of headers.
  The device also counts packets, so the payload is ``bytes - 52 packets``. (``lo`` does not count the Ethernet header.)
- *Barriers.* The barriers between the two readings send some hundred bytes per rank, and not always the same number.
  `measure_baseline` measures them with an empty section. After the subtraction, an error of a few hundred bytes remains.
- *OneFlow's own messages.* OneFlow adds 448 bytes to every message between two ranks, collective or point-to-point
  (`MESSAGE_BYTES`; measured over 200 tiny transfers on 2, 4 and 8 ranks, to within a byte per message). They are not subtracted.
- *TCP retransmissions*, of up to 64 KB each, are not subtracted, but counted in `Traffic.num_resent`. They do not occur with the
  settings of `network.create_namespace`, unless the system forbids these settings.

So ``payload_bytes = tensor bytes + 448 messages``, with the messages of the cost model: p - 1 per rank in an all-gather. For
messages of 16 KB this is 2.7 % more than the bytes of the tensors, for 256 KB 0.2 %.
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

#: Bytes of the headers of every packet: IPv4, and TCP with the timestamp option.
HEADER_BYTES = 20 + 32
#: Bytes that OneFlow sends for itself with every message between two ranks.
MESSAGE_BYTES = 448
#: Absolute error of a count [bytes per rank]: the bytes of one barrier.
NOISE_BYTES = 400
#: Relative error of a count, in addition to the absolute error.
BYTES_TOLERANCE = 0.03
# Number of empty sections whose median is the baseline.
_NUM_BASELINES = 9


@dataclass(frozen=True)
class Traffic:
    """Traffic of all ranks of a job together.

    Attributes:
        payload_bytes: Bytes without headers.
        num_packets: Number of packets.
        num_resent: Number of TCP segments that were retransmitted.
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
    """Wait until all pending operations of all ranks of the job have finished. Every rank must call it.

    If the other ranks do not join within ``ONEFLOW_TIMEOUT_SECONDS``, the process writes its stack to the log and ends. (OneFlow's
    own barrier gives up after one to two times as long.)
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
    """Return the traffic that `measure` counts for an empty section. Every rank of the job must call it."""
    return _median([measure(lambda: None, Traffic(0, 0, 0))[1] for _ in range(_NUM_BASELINES)])


def measure(section: Callable[[], Any], baseline: Traffic) -> tuple[Any, Traffic]:
    """Run ``section``, and count the bytes that all ranks of the job send meanwhile. Every rank must call it, on a private network.

    Args:
        section: The function to run.
        baseline: Result of `measure_baseline`, which is subtracted.

    Returns:
        The result of ``section``, and the traffic, which is the same on every rank.
    """
    before = _quiet_traffic()
    synchronize()
    result = section()
    after = _quiet_traffic()
    synchronize()
    return result, after - before - baseline


class Meter:
    """Counts the traffic of consecutive sections at half the cost of `measure`: one reading ends a section and begins the next.

    Every rank of the job must create a meter and call it with the same sections, on a private network. Traffic between two sections
    counts for the second section.
    """

    def __init__(self) -> None:
        self._baseline = Traffic(0, 0, 0)
        self._last = _quiet_traffic()
        self._baseline = _median([self(lambda: None)[1] for _ in range(_NUM_BASELINES)])

    def __call__(self, section: Callable[[], Any]) -> tuple[Any, Traffic]:
        """Run ``section``. Return its result and the traffic of all ranks of the job, which is the same on every rank."""
        synchronize()
        result = section()
        traffic = _quiet_traffic()
        sent, self._last = traffic - self._last - self._baseline, traffic
        return result, sent


def _median(traffic: Sequence[Traffic]) -> Traffic:
    return sorted(traffic, key=lambda each: each.payload_bytes)[len(traffic) // 2]


def _quiet_traffic(quiet_s: float = 0.01) -> Traffic:
    """Return all traffic so far, after a barrier and then ``quiet_s`` seconds without payload.

    A barrier's last messages are late. Acknowledgements arrive up to 40 ms later; they have no payload.
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
