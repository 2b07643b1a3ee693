"""Hosts, and which ranks go where.

A plan counts devices node by node, and inside a node device by device, so that node k of the plan holds the devices k G, ...,
k G + G - 1, G being the devices per node. Hosts are taken in the order in which they are given:

    hosts h1, h2; 2 nodes of 2 devices       h1: devices 0 1       h2: devices 2 3

Ranks are counted as devices are, but by some pipelines (:mod:`.demands`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import LONGEST_HOST_NAME, MOST_DEVICES, MOST_HOSTS
from autoddl.costmodel.reading import is_whole, read_text, shown_path, whole_number

__all__ = ["LOCALHOST", "Host", "Placement", "parse_hosts", "place", "read_hostfile", "renumbered"]

LOCALHOST = "localhost"
"""The host that needs no ssh."""

# What ssh takes for a destination. It must not begin with "-", which ssh would take for an option.
_NAME = re.compile(r"(?:[A-Za-z0-9_.+-]+@)?[A-Za-z0-9_\[][A-Za-z0-9_.:%\[\]-]*")


@dataclass(frozen=True)
class Host:
    """A host by the name that ssh takes; ``num_slots`` is how many ranks it may get at most, if that was said."""

    name: str
    num_slots: int | None = None

    @property
    def is_local(self) -> bool:
        return self.name == LOCALHOST

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True)
class Placement:
    """The ranks of one host, in the order of their ``LOCAL_RANK``."""

    host: Host
    ranks: Sequence[int]


def parse_hosts(text: str) -> list[Host]:
    """Hosts out of ``h1,user@h2,h3:4`` (the number after a colon counts slots).

    Raises:
        UserError: a name is none, or appears twice.
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if colon and is_whole(slots):
            hosts.append(_host(name, slots, "--hosts"))
        else:
            hosts.append(_host(part.strip(), None, "--hosts"))
    return _all_different(hosts, "--hosts")


def read_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """Hosts out of a file with a line ``host [slots=N]`` for each; ``#`` begins a comment.

    Raises:
        UserError: it cannot be read, or a line has another form.
    """
    lines = read_text(path, "hostfile").splitlines()
    shown = f"hostfile {shown_path(path)}"
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{shown}, line {number}"
        name, *rest = words
        if len(rest) > 1 or (rest and not re.fullmatch(r"slots=[0-9]+", rest[0])):
            raise UserError(f"{where}: {quote(line.strip())} should be: host [slots=N]")
        hosts.append(_host(name, rest[0].partition("=")[2] if rest else None, where))
    if not hosts:
        raise UserError(f"{shown} names no host")
    return _all_different(hosts, shown)


def _host(name: str, slots: str | None, where: str) -> Host:
    if len(name) > LONGEST_HOST_NAME or not _NAME.fullmatch(name):
        raise UserError(f"{where}: {quote(name)} is not the name of a host")
    return Host(
        name, None if slots is None else whole_number(slots, f"{where}: slots of {quote(name)}", 1, MOST_DEVICES)
    )


def _all_different(hosts: list[Host], where: str) -> list[Host]:
    if len(hosts) > MOST_HOSTS:
        raise UserError(f"{where}: {len(hosts):,} hosts should be at most {MOST_HOSTS:,}")
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise UserError(f"{where}: host {quote(host.name)} is given twice; one entry per node of the plan")
        seen.add(host.name)
    return hosts


def place(hosts: Sequence[Host], num_nodes: int, devices_per_node: int, *, anyhow: bool = False) -> list[Placement]:
    """Which ranks each host gets: those of one node of the plan.

    Args:
        anyhow: take hosts of another number or size too, as long as there is a slot for every rank: they are filled in order, and
            share the ranks evenly where they do not say how many slots they have.

    Raises:
        UserError: the hosts are not the nodes of the plan; it names the difference.
    """
    num_ranks = num_nodes * devices_per_node
    sizes = [devices_per_node] * num_nodes
    if len(hosts) != num_nodes and not anyhow:
        given = "this host only" if hosts == [Host(LOCALHOST)] else ", ".join(host.name for host in hosts)
        raise UserError(
            f"the plan is for {_nodes(num_nodes)} of {_devices(devices_per_node)}, found {_nodes(len(hosts))}: {given}"
        )
    if anyhow:
        even = -(-num_ranks // len(hosts))
        sizes, left = [], num_ranks
        for host in hosts:
            sizes.append(min(left, even if host.num_slots is None else host.num_slots))
            left -= sizes[-1]
        if left:
            raise UserError(f"the plan is for {num_ranks} ranks, the hosts have slots for {num_ranks - left}")
    placements, first = [], 0
    for host, size in zip(hosts, sizes):
        if host.num_slots is not None and host.num_slots < size:
            raise UserError(f"the plan is for {_devices(size)} per node, host {host.name} has {host.num_slots} slots")
        if size:
            placements.append(Placement(host, range(first, first + size)))
        first += size
    return placements


def renumbered(placements: Sequence[Placement], rank_on: Callable[[int], int]) -> list[Placement]:
    """The same places with the ranks of their devices."""
    return [replace(one, ranks=tuple(map(rank_on, one.ranks))) for one in placements]


def _nodes(num: int) -> str:
    return f"{num} node" if num == 1 else f"{num} nodes"


def _devices(num: int) -> str:
    return f"{num} device" if num == 1 else f"{num} devices"
