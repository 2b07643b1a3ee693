"""What crosses a cluster's links when stages talk and replicas average: placements, transfers, all-reduces.

A **placement** counts a stage's devices per machine: ``(8, 7)`` is eight devices of machine 0 and seven of machine 1. All machines
are alike, and a stage's replicas are numbered machine by machine.

Effective bandwidth between machines
    A cluster file's inter-node number is per node (one card that the node's devices share) or per device (a card each). A
    step of a plan uses the whole of what its endpoints have: through a shared card the *full node bandwidth*
    (``link.bandwidth * devices_per_node``), divided by whoever really sends in that step; through own cards each device's
    own. Cards are full duplex. Steps of different stages do not slow each other down.

Transfer between two stages (one micro-batch of n bytes from P to Q replicas)
    Sender i has the slice [i/P, (i+1)/P) of the micro-batch, receiver k wants [k/Q, (k+1)/Q): the overlaps are the
    messages. This is the splitting and concatenating of stages of different width; equal widths send P messages side by
    side. With out and in the bytes that a card (or a device's link inside its machine) sends and receives,

        t = alpha * (most messages at one device) + max over cards and links of max(out, in) / bandwidth

All-reduce of n bytes of gradients over c devices on each of m machines
    Reduce-scatter inside the machines, all-reduce of the shards between them, all-gather inside; rings, as in
    :mod:`autoddl.costmodel.collectives`:

        t = 2 (c-1) alpha_in + 2 (c-1)/c n beta_in  +  2 (m-1) alpha_out + 2 (m-1)/m n beta_card

    where beta_card belongs to the whole machine: its shared card, or the cards of its c devices together (of the
    machine with the fewest, where they are not equally many). Where several groups of one machine reduce at the same time,
    as in a grid of equal pipelines, a shared card is divided by their number (``sharing``).

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

__all__ = ["Grid", "Line", "Network", "Placement", "place_append_first", "place_fresh_first", "place_scatter_first"]

Placement = tuple[int, ...]
"""Devices per machine."""


class Line(NamedTuple):
    """Seconds as a line over bytes."""

    latency_s: float
    seconds_per_byte: float

    def time(self, nbytes: float) -> float:
        return self.latency_s + self.seconds_per_byte * nbytes if nbytes else 0.0


class Grid(NamedTuple):
    """Equal pipelines on a cluster."""

    workers: tuple[Placement, ...]
    """Per worker where its replicas, one per pipeline, are."""
    sharing: int
    """Most workers with a device in the same machine."""


@dataclass(frozen=True)
class _Level:
    """A network level as its endpoints see it."""

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
        """Latency and per-device bandwidth for all-reduces: calibrated ones where the cluster file has them."""
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
        self.latency_s = cluster.links[0 if cluster.num_nodes > 1 else 1].latency_s
        """Of a message over the whole cluster."""
        self._transfers: dict[tuple[Placement, Placement], Line] = {}
        self._all_reduces: dict[tuple[Placement, int], Line] = {}

    def transfer(self, source: Placement, target: Placement) -> Line:
        """Sending one micro-batch's tensor, all of whose bytes are the line's argument, from stage to stage."""
        # Which of the equal machines they are does not matter, so far fewer pairs are different.
        both = [pair for pair in zip(source, target) if pair != (0, 0)]
        key = (tuple(a for a, _ in both), tuple(b for _, b in both))
        if key not in self._transfers:
            self._transfers[key] = self._transfer(*key)
        return self._transfers[key]

    def _transfer(self, source: Placement, target: Placement) -> Line:
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
        return Line(latency * max(messages.values()), seconds)

    def grid(self, depth: int, width: int, pipelines_inside: bool) -> Grid:
        """Where the workers of ``width`` pipelines of ``depth`` workers are (module's text)."""
        workers = []
        for worker in range(depth):
            counts = [0] * self.num_machines
            for pipeline in range(width):
                device = pipeline * depth + worker if pipelines_inside else worker * width + pipeline
                counts[device // self.devices_per_machine] += 1
            workers.append(tuple(counts))
        sharing = max(sum(1 for counts in workers if counts[machine]) for machine in range(self.num_machines))
        return Grid(tuple(workers), sharing)

    def all_reduce(self, placement: Placement, sharing: int = 1) -> Line:
        """Averaging gradients, the line's argument their bytes on one device, over a stage's replicas.

        Args:
            sharing: groups of one machine that reduce at the same time.
        """
        key = (tuple(sorted(count for count in placement if count)), sharing)
        if key not in self._all_reduces:
            self._all_reduces[key] = self._all_reduce(*key)
        return self._all_reduces[key]

    def _all_reduce(self, counts: Placement, sharing: int) -> Line:
        machines, most, fewest = len(counts), max(counts), min(counts)
        latency, seconds = 0.0, 0.0
        if most > 1:
            alpha, bandwidth = self._inner.all_reduce()
            # A shared level gives each of a machine's devices its part of the whole.
            own = bandwidth * self.devices_per_machine / (most * sharing) if self._inner.per_node else bandwidth
            latency += 2 * (most - 1) * alpha
            seconds += 2 * (most - 1) / most / own
        if machines > 1:
            alpha, bandwidth = self._outer.all_reduce()
            whole = bandwidth * (self.devices_per_machine / sharing if self._outer.per_node else fewest)
            latency += 2 * (machines - 1) * alpha
            seconds += 2 * (machines - 1) / machines / whole
        return Line(latency, seconds)


def _devices(placement: Placement) -> list[tuple[int, int]]:
    """Replicas in order, as (machine, index)."""
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


# The three placement policies of DAPPLE: `used` devices per machine, `count` new ones wanted.


def place_fresh_first(used: Placement, count: int, capacity: int) -> Placement:
    """From machines with no device used yet, then from the others: keeps a stage inside one machine."""
    fresh = [machine for machine, taken in enumerate(used) if not taken]
    return _fill(used, count, capacity, fresh + [machine for machine, taken in enumerate(used) if taken])


def place_append_first(used: Placement, count: int, capacity: int) -> Placement:
    """From machines already partly used, then from fresh ones: the least fragmentation."""
    partly = [machine for machine, taken in enumerate(used) if taken]
    return _fill(used, count, capacity, partly + [machine for machine, taken in enumerate(used) if not taken])


def place_scatter_first(used: Placement, count: int, capacity: int) -> Placement:
    """Evenly over the used machines, or over all when all are fresh; over all, too, where the used ones lack room."""
    partly = [machine for machine, taken in enumerate(used) if taken]
    room = sum(capacity - used[machine] for machine in partly)
    pool = partly if room >= count else list(range(len(used)))
    given = [0] * len(used)
    while count:
        open_ones = [machine for machine in pool if used[machine] + given[machine] < capacity]
        # All open machines have been given equally many: each gets its share, or the first ones what is left.
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
