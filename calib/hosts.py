"""The hosts of the ranks of a job, and what ranks tell each other about them.

All functions here run on ranks.  Ranks exchange facts on their CPUs, whatever device is measured.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoddl.costmodel.devices import CPU, GPU
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.ranks.interfaces import list_interfaces

from .measurements import BOTH_LEVELS

__all__ = ["LOOPBACK", "NCCL", "Hosts", "cores_of_ranks", "exchange", "exchange_texts", "hosts_of_job"]

#: Names of networks that are not interfaces of a host.
LOOPBACK, NCCL = "loopback", "NCCL"
#: Number of cores of a host that are distinguished.
_MAX_CORES = 1024


@dataclass(frozen=True)
class Hosts:
    """The hosts of the ranks of a job.

    Attributes:
        numbers: number of each rank's host.
        name: name of this rank's host.
        device_name: name of this rank's device.
        network: what ranks communicate over: an interface (``eth0``), ``loopback`` or ``NCCL``; empty if unknown.
        kernels: number of the system kernel that each rank's host runs on; empty if every host has its own. Containers are hosts of
            one kernel: they share its cores, and its clocks count the CPU time of all of them.
    """

    numbers: tuple[int, ...]
    name: str
    device_name: str = ""
    network: str = ""
    kernels: tuple[int, ...] = ()

    @property
    def machines(self) -> tuple[int, ...]:
        """Number of each rank's machine: ranks of hosts that share a kernel are on one machine."""
        return self.kernels or self.numbers

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(set(self.numbers))

    @property
    def ranks_per_node(self) -> int:
        """Largest number of ranks of a host."""
        return max(self.numbers.count(number) for number in set(self.numbers))

    def level(self, ranks: int, stride: int) -> str | None:
        """The network level of the groups along an axis.

        It is ``intra-node`` if every group is on one host, and ``inter-node`` if its ranks are all on different hosts.  The
        group of all ranks is on ``both`` levels if it is neither.  Other groups that mix the levels are None: plans have none.
        """
        size, found = len(self.numbers), set()
        for first in range(size):
            if first // stride % ranks == 0:
                hosts = [self.numbers[first + k * stride] for k in range(ranks)]
                found.add("intra-node" if len(set(hosts)) == 1 else "inter-node" if len(set(hosts)) == ranks else None)
        if len(found) == 1 and None not in found:
            return found.pop()
        return BOTH_LEVELS if ranks == size and self.num_hosts > 1 else None


def hosts_of_job(device: str) -> Hosts:
    """The hosts of this job, whose ranks use a type of device; every rank calls."""
    flow = load_oneflow()
    name = os.uname().nodename
    names = exchange_texts(name)
    numbers = tuple(names.index(other) for other in names)
    identities = exchange_texts(_kernel() or name)
    kernels = tuple(identities.index(other) for other in identities)
    device_name = flow.cuda.get_device_name() if device == GPU else CPU.upper()
    return Hosts(numbers, name, device_name, _network(numbers, device), kernels)


def _kernel() -> str:
    """What identifies the running kernel of the system; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _network(numbers: Sequence[int], device: str) -> str:
    """What the ranks communicate over; every rank calls."""
    if device == GPU:
        return NCCL
    if len(set(numbers)) == 1:
        return LOOPBACK
    # The route to the host of rank 0 tells most on another host.
    routes = exchange_texts(interface_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")))
    return next(route for route, number in zip(routes, numbers) if number != numbers[0])


def interface_towards(address: str) -> str:
    """The name of the interface through which this host reaches an address; empty if it is unknown.

    >>> interface_towards("127.0.0.1")
    'loopback'
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it only looks for the route
        own = probe.getsockname()[0]
        if own.startswith("127."):
            return LOOPBACK
        return next((interface.name for interface in list_interfaces() if interface.address == own), "")
    return ""


def cores_of_ranks(places: Sequence[int]) -> int:
    """Number of cores that the ranks of one place share (the union of their CPU affinities); every rank calls.

    Args:
        places: the place of each rank: `Hosts.numbers` or `Hosts.machines`.
    """
    mask = np.zeros(_MAX_CORES, dtype=np.int64)
    mask[[core for core in os.sched_getaffinity(0) if core < _MAX_CORES]] = 1
    own = places[load_oneflow().env.get_rank()]
    here = [place == own for place in places]
    return max(1, int(exchange(mask)[here].any(axis=0).sum()))


def exchange(values: np.ndarray) -> np.ndarray:
    """The values of all ranks (8 bytes each), shape (ranks, values); every rank calls."""
    flow = load_oneflow()
    from autoddl.pipelines.runtime.comm.collectives import all_gather
    from autoddl.pipelines.runtime.comm.mesh import RankAxis

    num_ranks = flow.env.get_world_size()
    row = flow.tensor(np.ascontiguousarray(values).reshape(1, prod(values.shape)), device=CPU)
    return all_gather(row, RankAxis(num_ranks, 1, num_ranks), 0).numpy()


def exchange_texts(text: str) -> list[str]:
    """The texts of all ranks; every rank calls."""
    own = text.encode()
    num_bytes = int(exchange(np.array([len(own)])).max())
    data = np.frombuffer(own.ljust(-(-max(1, num_bytes) // 8) * 8, b"\0"), dtype=np.int64)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in exchange(data)]


def processor() -> str:
    """The name of the processor; of the architecture if the system does not give it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2] for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return " ".join(names[0].split()) if names else os.uname().machine


def host_busy_s() -> float:
    """Total seconds that programs have used of all cores of this host, and a hypervisor has stolen; 0 if unknown.

    The time of the system itself is left out: that for the messages of ranks cannot be told from that for other processes.
    """
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, _, _, _, _, _, stolen, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + stolen) / os.sysconf("SC_CLK_TCK")
