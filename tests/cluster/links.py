"""Links as formulas: when a packet that a host sends arrives.

A link has a bandwidth B and a latency a.  Packets pass it one after the other; a packet of n bytes occupies it for n / B.  Between
two hosts, a packet that is sent at t arrives at

    sent(t)    = max(t, time at which the sender's wire is free) + n / B_sender
    arrival(t) = max(sent(t), time at which the receiver's wire is free + n / B_receiver) + (a_sender + a_receiver) / 2

so a message takes a + n / B between equal wires, at any size: there is no bucket whose burst small messages could use.  A wire
sends and receives at the same time.  A host's loopback is a link for each direction of each connection, as between devices that
have links of their own: arrival(t) = max(t, time at which it is free) + n / B + a.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf

__all__ = ["UNLIMITED", "Link", "LinkState", "parse_link"]

_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_PER_SECOND = {"s": 1, "ms": 1000, "us": 1000000}


@dataclass(frozen=True)
class Link:
    """A link.

    Attributes:
        bandwidth: bytes per second in each direction.
        latency_s: seconds that a packet needs in addition.
    """

    bandwidth: float = inf
    latency_s: float = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether the link delays packets at all."""
        return self.bandwidth < inf or self.latency_s > 0


UNLIMITED = Link()


def parse_link(text: str) -> Link:
    """Parse ``300Mbit``, ``2ms`` or both, separated by a comma.

    >>> parse_link("300Mbit,2ms")
    Link(bandwidth=37500000.0, latency_s=0.002)

    Raises:
        ValueError: the text is not of this form.
    """
    bandwidth, latency = inf, 0.0
    for part in text.split(","):
        rate = re.fullmatch(r"([0-9.]+)([kMG]?)bit", part.strip())
        time = re.fullmatch(r"([0-9.]+)(s|ms|us)", part.strip())
        if rate:
            bandwidth = float(rate[1]) * _FACTORS[rate[2].lower()] / 8
        elif time:
            latency = float(time[1]) / _PER_SECOND[time[2]]
        else:
            raise ValueError(f"link {text!r} should be a bandwidth, a latency or both, such as 300Mbit,2ms")
    return Link(bandwidth, latency)


@dataclass
class LinkState:
    """A link in use.

    Attributes:
        link: the link; it may be replaced by another one.
        is_cut: whether packets are lost.
        sent: bytes and packets that were sent over the link so far, those that were lost included.
    """

    link: Link
    is_cut: bool = False
    sent: list[int] = field(default_factory=lambda: [0, 0])
    _sending_until: dict[object, float] = field(default_factory=dict)
    _receiving_until: float = 0.0

    def send(self, now: float, size: int, connection: object = None) -> float:
        """Send a packet; returns the time at which the last byte has left.

        Args:
            now: present time [s].
            size: bytes.
            connection: packets of one connection wait for each other.
        """
        self.sent[0] += size
        self.sent[1] += 1
        until = max(now, self._sending_until.get(connection, 0.0)) + size / self.link.bandwidth
        self._sending_until[connection] = until
        return until

    def receive(self, sent: float, size: int) -> float:
        """Receive a packet whose last byte left at ``sent``; returns the time at which the last byte is here, without latency."""
        self._receiving_until = max(sent, self._receiving_until + size / self.link.bandwidth)
        return self._receiving_until
