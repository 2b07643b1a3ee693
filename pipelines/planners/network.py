"""Costs of communication on a cluster: placements, transfers between stages, all-reduces over replicas.

A **placement** counts a stage's devices per machine: ``(8, 7)`` is eight devices of machine 0 and seven of machine 1. All machines
are equal, and a stage's replicas are numbered machine by machine.

Effective bandwidth between machines
    A cluster file's inter-node bandwidth is per node (one card that the node's devices share) or per device (a card each). A
    step of a plan uses the whole bandwidth of its endpoints: with a shared card, the *full node bandwidth*
    (``link.bandwidth * devices_per_node``) divided by the devices that send in that step; with own cards, that of each device.
    Cards are full duplex. Steps of different stages do not slow each other down.

Transfer between two stages (one micro-batch of n bytes from P to Q replicas)
    Sender i has the slice [i/P, (i+1)/P) of the micro-batch, receiver k needs [k/Q, (k+1)/Q): the overlaps are the
    messages. This is the splitting and concatenating of stages of different width; for equal widths it is P messages in
    parallel. With out and in the bytes that a card (or a device's link inside its machine) sends and receives,

        t = alpha * (most messages at one device) + max over cards and links of max(out, in) / bandwidth

All-reduce of n bytes of gradients over c devices on each of m machines
    Reduce-scatter inside the machines, all-reduce of the shards between them, all-gather inside; rings, as in
    :mod:`autoddl.costmodel.collectives`:

        t = 2 (c-1) alpha_in + 2 (c-1)/c n beta_in  +  2 (m-1) alpha_out + 2 (m-1)/m n beta_card

    where beta_card is that of the whole machine: its shared card, or the cards of its c devices together (of the machine
    with the fewest devices, if they differ). If several groups of one machine reduce at the same time, as in a grid of equal
    pipelines, a shared card is divided by their number (``sharing``).

Grid
    w equal pipelines of d workers on d w devices (WPipe's H(d:w), Chimera's D and W) are laid out in one of two ways:
    *pipelines inside* machines (device k d + s is worker s of pipeline k; WPipe's placement A), or replicas inside (device
    s w + k; placement B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autoddl.costmodel.cluster import Cluster, Link
from autoddl.costmodel.collectives import Collective

__all__ = [
    "AlphaBeta",
    "Network",
    "PipelinePlacement",
    "Placement",
    "place_append_first",
    "place_fresh_first",
    "place_scatter_first",
]

#: Devices per machine.
Placement = tuple[int, ...]


class AlphaBeta(NamedTuple):
    """The alpha-beta cost of a communication step: seconds as a linear function of bytes.

    Attributes:
        latency_s: alpha.
        seconds_per_byte: beta.

    >>> AlphaBeta(1e-5, 1e-9).time(1_000_000)
    0.00101
    """

    latency_s: float
    seconds_per_byte: float

    def time(self, nbytes: float) -> float:
        """Seconds for ``nbytes``; 0 for none."""
        return self.latency_s + self.seconds_per_byte * nbytes if nbytes else 0.0


class PipelinePlacement(NamedTuple):
    """Equal pipelines on a cluster.

    Attributes:
        workers: per worker, the placement of its replicas, one per pipeline.
        sharing: the most workers with a device in one machine.
    """

    workers: tuple[Placement, ...]
    sharing: int


@dataclass(frozen=True)
class _Level:
    """A network level as seen by its endpoints.

    Attributes:
        link: bandwidth and latency.
        per_node: whether the devices of a machine share its card.
        devices_per_node: number of devices of a machine.
    """

    link: Link
    per_node: bool
    devices_per_node: int

    def busiest(self, volumes: dict[tuple[int, int], float]) -> float:
        """Seconds of the busiest sender (or receiver), given bytes per device as (machine, index)."""
        if not volumes:
            return 0.0
        if not self.per_node:
            return max(volumes.values()) / self.link.bandwidth
        machines: dict[int, float] = {}
        for (machine, _), volume in volumes.items():
            machines[machine] = machines.get(machine, 0.0) + volume
        return max(machines.values()) / (self.link.bandwidth * self.devices_per_node)

    def all_reduce(self) -> tuple[float, float]:
        """Latency and per-device bandwidth for all-reduces: the calibrated ones if the cluster file has them."""
        return self.link.collectives.get(Collective.ALL_REDUCE, (self.link.latency_s, self.link.bandwidth))


class Network:
    """The cost of transfers and all-reduces between placements on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        links = cluster.document.get("links", {})
        self.num_machines = cluster.num_nodes
        self.devices_per_machine = cluster.devices_per_node
        self._outer, self._inner = (
            _Level(link, links.get(name, {}).get("per") == "node", cluster.devices_per_node)
            for name, link in zip(("inter-node", "intra-node"), cluster.links)
        )
        # Latency of a message over the whole cluster.
        self.latency_s = cluster.links[0 if cluster.num_nodes > 1 else 1].latency_s
        self._transfers: dict[tuple[Placement, Placement], AlphaBeta] = {}
        self._all_reduces: dict[tuple[Placement, int], AlphaBeta] = {}

    def transfer(self, source: Placement, target: Placement) -> AlphaBeta:
        """Cost of sending one micro-batch's tensor from stage to stage, as a function of the bytes of the whole tensor."""
        # The cost does not depend on which of the equal machines are used: far fewer pairs differ.
        both = [pair for pair in zip(source, target) if pair != (0, 0)]
        key = (tuple(a for a, _ in both), tuple(b for _, b in both))
        if key not in self._transfers:
            self._transfers[key] = self._transfer(*key)
        return self._transfers[key]

    def _transfer(self, source: Placement, target: Placement) -> AlphaBeta:
        sent: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
        received: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
        messages: dict[tuple[str, tuple[int, int]], int] = {}
        for sender, receiver, share in _overlaps(source, target):
            outer = sender[0] != receiver[0]
            sent[outer][sender] = sent[outer].get(sender, 0.0) + share
            received[outer][receiver] = received[outer].get(receiver, 0.0) + share
            for end in (("out", sender), ("in", receiver)):
                messages[end] = messages.get(end, 0) + 1
        levels = ((self._outer, True), (self._inner, False))
        seconds = max(level.busiest(side[outer]) for level, outer in levels for side in (sent, received))
        latency = self._outer.link.latency_s if sent[True] else self._inner.link.latency_s
        return AlphaBeta(latency * max(messages.values()), seconds)

    def grid(self, depth: int, width: int, pipelines_inside: bool) -> PipelinePlacement:
        """The layout of ``width`` pipelines of ``depth`` workers (module's docstring)."""
        workers = []
        for worker in range(depth):
            counts = [0] * self.num_machines
            for pipeline in range(width):
                device = pipeline * depth + worker if pipelines_inside else worker * width + pipeline
                counts[device // self.devices_per_machine] += 1
            workers.append(tuple(counts))
        sharing = max(sum(1 for counts in workers if counts[machine]) for machine in range(self.num_machines))
        return PipelinePlacement(tuple(workers), sharing)

    def all_reduce(self, placement: Placement, sharing: int = 1) -> AlphaBeta:
        """Cost of averaging gradients over a stage's replicas, as a function of the bytes on one device.

        Args:
            placement: of the replicas.
            sharing: number of groups of one machine that reduce at the same time.
        """
        key = (tuple(sorted(count for count in placement if count)), sharing)
        if key not in self._all_reduces:
            self._all_reduces[key] = self._all_reduce(*key)
        return self._all_reduces[key]

    def _all_reduce(self, counts: Placement, sharing: int) -> AlphaBeta:
        machines, most, fewest = len(counts), max(counts), min(counts)
        latency, seconds = 0.0, 0.0
        if most > 1:
            alpha, bandwidth = self._inner.all_reduce()
            # On a shared level, each of a machine's devices gets its share of the whole bandwidth.
            own = bandwidth * self.devices_per_machine / (most * sharing) if self._inner.per_node else bandwidth
            latency += 2 * (most - 1) * alpha
            seconds += 2 * (most - 1) / most / own
        if machines > 1:
            alpha, bandwidth = self._outer.all_reduce()
            whole = bandwidth * (self.devices_per_machine / sharing if self._outer.per_node else fewest)
            latency += 2 * (machines - 1) * alpha
            seconds += 2 * (machines - 1) / machines / whole
        return AlphaBeta(latency, seconds)


def _devices(placement: Placement) -> list[tuple[int, int]]:
    """The replicas in order, as (machine, index)."""
    return [(machine, index) for machine, count in enumerate(placement) for index in range(count)]


def _overlaps(source: Placement, target: Placement) -> Iterator[tuple[tuple[int, int], tuple[int, int], float]]:
    """(sender, receiver, share of the micro-batch) of every message."""
    senders, receivers = _devices(source), _devices(target)
    common = len(senders) * len(receivers)
    i = k = 0
    at = 0
    while at < common:
        # Slices end at multiples of common/P and common/Q: whole numbers, so the comparison is exact.
        end = min((i + 1) * len(receivers), (k + 1) * len(senders))
        yield senders[i], receivers[k], (end - at) / common
        at = end
        i += end == (i + 1) * len(receivers)
        k += end == (k + 1) * len(senders)


# The three placement policies of DAPPLE. They place `count` more devices; `used` are per machine, of at most `capacity` each.


def place_fresh_first(used: Placement, count: int, capacity: int) -> Placement:
    """Machines without used devices first, then the others: keeps a stage inside one machine.

    >>> place_fresh_first((2, 0), 3, capacity=4)
    (0, 3)
    """
    fresh = [machine for machine, taken in enumerate(used) if not taken]
    return _fill(used, count, capacity, fresh + [machine for machine, taken in enumerate(used) if taken])


def place_append_first(used: Placement, count: int, capacity: int) -> Placement:
    """Partly used machines first, then the others: the least fragmentation.

    >>> place_append_first((2, 0), 3, capacity=4)
    (2, 1)
    """
    partly = [machine for machine, taken in enumerate(used) if taken]
    return _fill(used, count, capacity, partly + [machine for machine, taken in enumerate(used) if not taken])


def place_scatter_first(used: Placement, count: int, capacity: int) -> Placement:
    """Evenly over the used machines; over all machines if none is used or the used ones have too few devices left.

    >>> place_scatter_first((0, 0), 4, capacity=4)
    (2, 2)
    """
    partly = [machine for machine, taken in enumerate(used) if taken]
    room = sum(capacity - used[machine] for machine in partly)
    pool = partly if room >= count else list(range(len(used)))
    given = [0] * len(used)
    while count:
        open_ones = [machine for machine in pool if used[machine] + given[machine] < capacity]
        # All open machines have got equally many so far: each gets an equal share, or the first ones get the remainder.
        share = max(1, count // len(open_ones))
        for machine in open_ones[:count]:
            more = min(share, capacity - used[machine] - given[machine])
            given[machine] += more
            count -= more
    return tuple(given)


def _fill(used: Placement, count: int, capacity: int, order: list[int]) -> Placement:
    given = [0] * len(used)
    for machine in order:
        given[machine] = min(capacity - used[machine], count)
        count -= given[machine]
    return tuple(given)
