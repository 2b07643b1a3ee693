"""Hosts, and the placement of ranks on them.

A plan numbers devices node by node: node k holds the devices k G, ..., k G + G - 1, where G is the number of devices per node.
Hosts are the nodes, in the order in which they are given:

    hosts h1, h2; 2 nodes of 2 devices       h1: devices 0 1       h2: devices 2 3

Ranks are numbered as devices are, except for some pipelines (:mod:`.demands`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import LONGEST_HOST_NAME, MAX_DEVICES, MAX_HOSTS
from autoddl.costmodel.reading import is_whole, read_text, shown_path, whole_number

__all__ = ["LOCALHOST", "Host", "Placement", "parse_hosts", "place", "read_hostfile", "renumbered"]

#: The host that is reached without ssh.
LOCALHOST = "localhost"

# A destination of ssh. It must not begin with "-", which ssh would parse as an option.
_NAME = re.compile(r"(?:[A-Za-z0-9_.+-]+@)?[A-Za-z0-9_\[][A-Za-z0-9_.:%\[\]-]*")


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: destination of ssh.
        num_slots: the most ranks that it may get; None if not given.
    """

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
    """The ranks of one host.

    Attributes:
        host: the host.
        ranks: in the order of their ``LOCAL_RANK``.
    """

    host: Host
    ranks: Sequence[int]


def parse_hosts(text: str) -> list[Host]:
    """Parse ``h1,user@h2,h3:4``; the number after a colon is the number of slots.

    >>> [host.name for host in parse_hosts("h1,user@h2:4")]
    ['h1', 'user@h2']

    Raises:
        UserError: a name is invalid or appears twice.
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if colon and is_whole(slots):
            hosts.append(_host(name, slots, "hosts"))
        else:
            hosts.append(_host(part.strip(), None, "hosts"))
    return _all_different(hosts, "hosts")


def read_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """Read a file with a line ``host [slots=N]`` per host; ``#`` begins a comment.

    Raises:
        UserError: the file cannot be read, or a line has another form.
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
        name, None if slots is None else whole_number(slots, f"{where}: slots of {quote(name)}", 1, MAX_DEVICES)
    )


def _all_different(hosts: list[Host], where: str) -> list[Host]:
    if len(hosts) > MAX_HOSTS:
        raise UserError(f"{where}: {len(hosts):,} hosts should be at most {MAX_HOSTS:,}")
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise UserError(f"{where}: host {quote(host.name)} is given twice; one entry per node of the plan")
        seen.add(host.name)
    return hosts


def place(hosts: Sequence[Host], num_nodes: int, devices_per_node: int, *, force: bool = False) -> list[Placement]:
    """Place the ranks of each node of the plan on one host.

    Args:
        hosts: one per node.
        num_nodes: number of nodes of the plan.
        devices_per_node: number of devices per node of the plan.
        force: accept hosts of another number or size if there is a slot for every rank. Hosts are then filled in order; those
            without a number of slots get an even share.

    Raises:
        UserError: the hosts do not match the nodes of the plan.
    """
    num_ranks = num_nodes * devices_per_node
    sizes = [devices_per_node] * num_nodes
    if len(hosts) != num_nodes and not force:
        given = "this host only" if hosts == [Host(LOCALHOST)] else ", ".join(host.name for host in hosts)
        raise UserError(
            f"the plan is for {_nodes(num_nodes)} of {_devices(devices_per_node)}, found {_nodes(len(hosts))}: {given}"
        )
    if force:
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
    """The placements with device numbers replaced by ranks."""
    return [replace(one, ranks=tuple(map(rank_on, one.ranks))) for one in placements]


def _nodes(num: int) -> str:
    return f"{num} node" if num == 1 else f"{num} nodes"


def _devices(num: int) -> str:
    return f"{num} device" if num == 1 else f"{num} devices"
