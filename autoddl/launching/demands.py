"""The requirements of a plan, and the differences between them and what the hosts have.

A plan numbers the devices of its cluster node by node. Without a pipeline, ranks are numbered in the same way. A pipeline lists
for each of its workers the devices it uses, and its runtime numbers ranks worker by worker: rank r runs on the r-th device of the
concatenated lists. With workers of one device on each of two nodes of 2:

    worker 0: devices 0 2    worker 1: devices 1 3        node 0: ranks 0 2    node 1: ranks 1 3
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.reading import read_bytes
from autoddl.costmodel.units import format_bytes

from .facts import HostFacts
from .hosts import Placement

if TYPE_CHECKING:
    from autoddl.costmodel.cluster import Cluster

    from ..planfile import PlanFile

__all__ = ["ONEFLOW_VERSION", "Demands", "UnmetDemand", "check_script", "demands_of", "differences"]

#: The OneFlow version that the runtime is written for.
ONEFLOW_VERSION = "0.9.0"


_HEAD_BYTES = 5_000  # of a script; its origin is recorded there


@dataclass(frozen=True)
class Demands:
    """The requirements of a plan.

    Attributes:
        num_nodes: number of nodes.
        devices_per_node: number of devices of a node.
        device: name of the device.
        on_gpus: whether the device is a GPU, not a rank on a CPU.
        memory_bytes: memory of each rank.
        devices: device of each rank, numbered node by node; empty if ranks are numbered as devices are.
    """

    num_nodes: int
    devices_per_node: int
    device: str
    on_gpus: bool
    memory_bytes: tuple[float, ...]
    devices: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.devices_per_node

    def rank_on(self, device: int) -> int:
        """The rank of a device."""
        return self.devices.index(device) if self.devices else device


@dataclass(frozen=True)
class UnmetDemand:
    """A requirement that a host does not meet.

    Attributes:
        text: one line for the user.
        can_be_forced: whether the job may succeed nevertheless.
    """

    text: str
    can_be_forced: bool = False


def demands_of(plan: PlanFile) -> Demands:
    """The requirements of a plan.

    Raises:
        UserError: the workers of its pipeline do not use each rank of its cluster once.
    """
    cluster = plan.cluster
    workers = plan.document["workers"]
    devices = [device for worker in workers for device in worker["ranks"]]
    memory = [float(worker["memory_bytes"]) for worker in workers for _ in worker["ranks"]]
    if sorted(devices) != list(range(cluster.num_devices)):
        raise UserError(f"the plan has ranks {devices}, should have each of 0 to {cluster.num_devices - 1} once")
    return Demands(
        cluster.num_nodes,
        cluster.devices_per_node,
        cluster.device.name,
        not _is_cpu(cluster),
        tuple(memory),
        # OneFlow gives rank r the GPU of index r modulo the devices per node: on GPUs, ranks must be numbered node by node.
        tuple(devices) if devices != sorted(devices) and _is_cpu(cluster) else (),
    )


def check_script(script: Path, plan: PlanFile) -> None:
    """Check that a script written by ``autoddl export``, which records graph and cluster in its head, belongs to the plan.

    Raises:
        UserError: the script cannot be read, or was exported from a plan of another graph or cluster.
    """
    head = read_bytes(script, "script")[:_HEAD_BYTES].decode("utf-8", errors="replace")
    for what in ("graph", "cluster"):
        expected = plan.document[f"{what}_hash"]
        found = re.search(rf"^#(?: Plan)? +{what} (sha256:[0-9a-f]{{64}})$", head, re.MULTILINE)
        if found is not None and found[1] != expected:
            raise UserError(
                f"{script.name} was exported from a plan of another {what} ({found[1][:19]}...) than this one "
                f"({expected[:19]}...); export this plan"
            )


def _is_cpu(cluster: Cluster) -> bool:
    """Whether the devices are ranks on a CPU: the cluster file gives cores, or the device's name contains CPU."""
    return cluster.cores_per_node is not None or "CPU" in cluster.device.name.upper()


def differences(
    demands: Demands,
    placements: Sequence[Placement],
    facts: Sequence[HostFacts],
    own: HostFacts,
    *,
    with_oneflow: bool = True,
) -> Iterator[UnmetDemand]:
    """The differences between the hosts and the requirements of the plan and of the launching machine.

    Args:
        demands: requirements of the plan.
        placements: hosts and their ranks.
        facts: of each placement's host.
        own: facts of the launching machine: all hosts need its versions and the same files.
        with_oneflow: whether the job needs OneFlow.
    """
    for placement, found in zip(placements, facts):
        name = placement.host.name
        if found.autoddl != own.autoddl:
            yield UnmetDemand(f"host {name} has AutoDDL {found.autoddl}, should have {own.autoddl} as here")
            continue
        if with_oneflow:
            yield from _oneflow(name, found)
        if not found.has_directory:
            yield UnmetDemand(
                f"host {name} has no directory {found.directory}; make it there, or give another directory=FOLDER"
            )
        yield from _files(name, found.digests, own.digests)
        yield from _devices(name, demands, placement, found)


def _oneflow(name: str, found: HostFacts) -> Iterator[UnmetDemand]:
    if found.oneflow and found.oneflow != ONEFLOW_VERSION:
        yield UnmetDemand(f"host {name} has OneFlow {found.oneflow}, should have {ONEFLOW_VERSION}")
    elif found.oneflow_fault or not found.oneflow:
        yield UnmetDemand(f"host {name}: {found.oneflow_fault or 'OneFlow is not installed'}")


def _files(name: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[UnmetDemand]:
    for path, expected in ours.items():
        if not theirs[path]:
            yield UnmetDemand(
                f"host {name} has no file {path}; it should be there as it is here (copy it, or share it)"
            )
        elif theirs[path] != expected:
            yield UnmetDemand(
                f"host {name} has another {path} (SHA-256 {theirs[path][:12]}) than this one ({expected[:12]}); copy it there"
            )


def _devices(name: str, demands: Demands, placement: Placement, found: HostFacts) -> Iterator[UnmetDemand]:
    needed = [demands.memory_bytes[rank] for rank in placement.ranks]
    if not demands.on_gpus:
        total = sum(needed)
        if total > found.free_memory_bytes:
            yield UnmetDemand(
                f"host {name} has {format_bytes(found.free_memory_bytes)} of memory free; the plan's {len(needed)} ranks there "
                f"need {format_bytes(total)}",
                can_be_forced=True,
            )
        return
    if len(found.gpu_memory_bytes) < len(needed):
        yield UnmetDemand(
            f"host {name} has {_gpus(len(found.gpu_memory_bytes))}; the plan is for {len(needed)} per node ({demands.device})",
            can_be_forced=True,
        )
        return
    for number, (memory, wanted) in enumerate(zip(found.gpu_memory_bytes, needed)):
        if memory < wanted:
            yield UnmetDemand(
                f"host {name}: GPU {number} has {format_bytes(memory)} of memory; the plan needs {format_bytes(wanted)} of "
                f"rank {placement.ranks[number]}",
                can_be_forced=True,
            )
            return


def _gpus(num: int) -> str:
    return "1 GPU" if num == 1 else f"{num} GPUs"
