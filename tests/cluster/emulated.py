"""A cluster of N hosts of G ranks on this machine, with links and cores as slow as they are asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autoddl.pipelines.runtime.availability import Availability

from .links import UNLIMITED, Link
from .namespaces import links_available
from .polling import COMPILER, polling_environment
from .ssh import SshHosts

__all__ = ["ClusterSize", "EmulatedCluster", "cluster_available", "emulated"]

#: Period of the CPU quota [us]: short beside a step, so that a slow host computes slowly rather than in bursts.
_PERIOD_US = 5000


@dataclass(frozen=True)
class ClusterSize:
    """What is emulated.

    Attributes:
        num_hosts: number of hosts; they are called ``host1``, ``host2``, ...
        ranks_per_host: number of ranks of each host.
        wire: link between a host and all others.
        loopback: link between two ranks of a host; without limits packets pass the kernel alone.
        other_wires: links of single hosts, in place of ``wire``.
        cores: CPU quota of single hosts, in cores; all that run there share it.
    """

    num_hosts: int
    ranks_per_host: int = 1
    wire: Link = UNLIMITED
    loopback: Link = UNLIMITED
    other_wires: Mapping[str, Link] = field(default_factory=dict)
    cores: Mapping[str, float] = field(default_factory=dict)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts."""
        return tuple(f"host{number + 1}" for number in range(self.num_hosts))

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.ranks_per_host < 1:
            raise ValueError(f"{self.num_hosts} hosts of {self.ranks_per_host} ranks should be at least 1 of 1")
        for name in (*self.other_wires, *self.cores):
            if name not in self.hosts:
                raise ValueError(f"host {name!r} should be one of {', '.join(self.hosts)}")
        for name, number in self.cores.items():
            if not number > 0:
                raise ValueError(f"{name} has {number:g} cores, should have more than 0")

    def described(self) -> str:
        """What is emulated, in words: the caption of a table."""
        wires = f"wires {shown(self.wire)}, inside a host {shown(self.loopback)}"
        others = [f"{name} at {shown(link)}" for name, link in self.other_wires.items()]
        slow = [f"{name} with {number:g} cores" for name, number in self.cores.items()]
        return ", ".join([f"{self.num_hosts} hosts x {self.ranks_per_host} ranks", wires, *others, *slow])


def cluster_available() -> Availability:
    """Whether clusters can be emulated here."""
    return links_available("sshd", "ssh", "ssh-keygen", COMPILER)


def shown(link: Link) -> str:
    """A link in words.

    >>> shown(Link(37.5e6, 2e-3)), shown(UNLIMITED)
    ('300 Mbit/s + 2 ms', 'unlimited')
    """
    parts = [f"{link.bandwidth * 8 / 1e6:g} Mbit/s"] if link.bandwidth < float("inf") else []
    parts += [f"{link.latency_s * 1e3:g} ms"] if link.latency_s else []
    return " + ".join(parts) or "unlimited"


class EmulatedCluster(SshHosts):
    """Hosts that ``login`` reaches by ssh, as slow as a `ClusterSize` says.

    Args:
        folder: an empty folder for the files of the hosts.
        size: what is emulated.
    """

    def __init__(self, folder: Path, size: ClusterSize) -> None:
        wires = {name: size.other_wires.get(name, size.wire) for name in size.hosts}
        loopbacks = {name: size.loopback for name in size.hosts} if size.loopback.is_limited else {}
        names = ["login", *size.hosts]
        super().__init__(
            folder,
            names,
            wires=wires if any(link.is_limited for link in wires.values()) else {},
            loopbacks=loopbacks,
            environment=polling_environment(folder),
        )
        self.size = size
        for name, cores in size.cores.items():
            self._limit_cores(name, cores)

    def _limit_cores(self, host: str, cores: float) -> None:
        """Limit all that the host's sshd starts to a number of cores."""
        group = _control_group_of_cpu() / f"cluster-{os.getpid()}-{host}"
        group.mkdir()
        self.remove_at_end(group)
        quota = round(cores * _PERIOD_US)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        for pid in (self.pid(host), *(daemon.pid for daemon in self.daemons_of(host))):
            (group / "cgroup.procs").write_text(str(pid))

    @property
    def slots(self) -> str:
        """The hosts with their numbers of ranks, as ``calibrate --hosts`` takes them."""
        return ",".join(f"{name}:{self.size.ranks_per_host}" for name in self.size.hosts)

    @property
    def environment(self) -> dict[str, str]:
        """How commands on login find the hosts: ``CLUSTER_SSH``, ``CLUSTER_HOSTS`` and ``CLUSTER_SLOTS``."""
        return {"CLUSTER_SSH": self.ssh, "CLUSTER_HOSTS": ",".join(self.size.hosts), "CLUSTER_SLOTS": self.slots}


def _control_group_of_cpu() -> Path:
    """The folder of the control groups that limit CPU time: version 1 or 2.

    Raises:
        OSError: this system has none.
    """
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    if (first / "cpu.cfs_quota_us").exists() or (first / "cgroup.procs").exists():
        return first
    if "cpu" in (second / "cgroup.subtree_control").read_text().split():
        return second
    raise OSError("no control groups that limit CPU time are mounted at /sys/fs/cgroup")


@contextlib.contextmanager
def emulated(folder: Path, size: ClusterSize) -> Iterator[EmulatedCluster]:
    """A cluster for the time of this context."""
    with contextlib.closing(EmulatedCluster(folder, size)) as cluster:
        yield cluster


def pairs(text: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` words.

    Raises:
        ValueError: a word is not of this form.
    """
    found = {}
    for word in text:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} should be HOST=VALUE")
        found[name] = value
    return found
