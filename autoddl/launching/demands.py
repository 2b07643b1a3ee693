"""What a plan demands of the hosts that it runs on, and whether they have it.

A plan counts the devices of its cluster node by node, and so are the ranks of one without a pipeline. One with a pipeline says for
each of its workers which of these devices it has. Its runtime counts ranks worker by worker; so rank r is started on the device
that comes r-th in the lists of all workers, one behind the other. With workers of one device on each of two nodes of 2:

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

    from ..planfile import Plan

__all__ = ["ONEFLOW_VERSION", "Demands", "Difference", "check_script", "demands_of", "differences"]

ONEFLOW_VERSION = "0.9.0"
"""The one that the runtime is written for and measured with."""


_HEAD_BYTES = 5_000  # of a script, where its origin stands


@dataclass(frozen=True)
class Demands:
    """What a plan needs.

    Attributes:
        device: its name; ``on_gpus`` whether that is a GPU rather than a rank on a CPU.
        memory_bytes: of each rank.
        devices: of each rank the device that it is for, counted node by node; as the ranks are counted where it is empty.
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
        """The rank of a device, counted node by node."""
        return self.devices.index(device) if self.devices else device


@dataclass(frozen=True)
class Difference:
    """Something that a host has not, in one line; ``can_be_forced`` where a job may well run all the same."""

    text: str
    can_be_forced: bool = False


def demands_of(plan: Plan) -> Demands:
    """What the plan needs.

    Raises:
        UserError: the workers of its pipeline do not share out the ranks of its cluster.
    """
    cluster = plan.cluster
    memory = [float(plan.document["memory_bytes"])] * cluster.num_devices
    devices: list[int] = []
    pipeline = plan.document.get("pipeline")
    if pipeline is not None:
        workers = pipeline["workers"]
        devices = [device for worker in workers for device in worker["ranks"]]
        memory = [float(worker["memory_bytes"]) for worker in workers for _ in worker["ranks"]]
        if sorted(devices) != list(range(cluster.num_devices)):
            raise UserError(
                f"the plan's pipeline has ranks {devices}, should have each of 0 to {cluster.num_devices - 1} once"
            )
    return Demands(
        cluster.num_nodes,
        cluster.devices_per_node,
        cluster.device.name,
        not _is_cpu(cluster),
        tuple(memory),
        # OneFlow gives rank r the GPU of number r modulo a node's: there ranks can only be counted node by node.
        tuple(devices) if devices != sorted(devices) and _is_cpu(cluster) else (),
    )


def check_script(script: Path, plan: Plan) -> None:
    """Refuse a script that ``autoddl export`` wrote of another plan: it names the graph and the cluster of its own in its head.

    Raises:
        UserError: it cannot be read, or names another graph or cluster.
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
    """Whether the devices are ranks on a CPU: those share cores, or say so."""
    return cluster.cores_per_node is not None or "CPU" in cluster.device.name.upper()


def differences(
    demands: Demands,
    placements: Sequence[Placement],
    facts: Sequence[HostFacts],
    own: HostFacts,
    *,
    with_oneflow: bool = True,
) -> Iterator[Difference]:
    """Where the hosts are not what the plan and the launching machine need.

    Args:
        facts: of each placement's host.
        own: the launching machine's: versions, and the digests of the job's files, which all hosts must have alike.
        with_oneflow: whether the job needs OneFlow.
    """
    for placement, found in zip(placements, facts):
        name = placement.host.name
        if found.autoddl != own.autoddl:
            yield Difference(f"host {name} has AutoDDL {found.autoddl}, should have {own.autoddl} as here")
            continue
        if with_oneflow:
            yield from _oneflow(name, found)
        if not found.has_directory:
            yield Difference(
                f"host {name} has no directory {found.directory}; make it there, or give another with --chdir"
            )
        yield from _files(name, found.digests, own.digests)
        yield from _devices(name, demands, placement, found)


def _oneflow(name: str, found: HostFacts) -> Iterator[Difference]:
    if found.oneflow and found.oneflow != ONEFLOW_VERSION:
        yield Difference(f"host {name} has OneFlow {found.oneflow}, should have {ONEFLOW_VERSION}")
    elif found.oneflow_fault or not found.oneflow:
        yield Difference(f"host {name}: {found.oneflow_fault or 'OneFlow is not installed'}")


def _files(name: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[Difference]:
    for path, expected in ours.items():
        if not theirs[path]:
            yield Difference(f"host {name} has no file {path}; it should be there as it is here (copy it, or share it)")
        elif theirs[path] != expected:
            yield Difference(
                f"host {name} has another {path} (SHA-256 {theirs[path][:12]}) than this one ({expected[:12]}); copy it there"
            )


def _devices(name: str, demands: Demands, placement: Placement, found: HostFacts) -> Iterator[Difference]:
    needed = [demands.memory_bytes[rank] for rank in placement.ranks]
    if not demands.on_gpus:
        total = sum(needed)
        if total > found.free_memory_bytes:
            yield Difference(
                f"host {name} has {format_bytes(found.free_memory_bytes)} of memory free; the plan's {len(needed)} ranks there "
                f"need {format_bytes(total)}",
                can_be_forced=True,
            )
        return
    if len(found.gpu_memory_bytes) < len(needed):
        yield Difference(
            f"host {name} has {_gpus(len(found.gpu_memory_bytes))}; the plan is for {len(needed)} per node ({demands.device})",
            can_be_forced=True,
        )
        return
    for number, (memory, wanted) in enumerate(zip(found.gpu_memory_bytes, needed)):
        if memory < wanted:
            yield Difference(
                f"host {name}: GPU {number} has {format_bytes(memory)} of memory; the plan needs {format_bytes(wanted)} of "
                f"rank {placement.ranks[number]}",
                can_be_forced=True,
            )
            return


def _gpus(num: int) -> str:
    return "1 GPU" if num == 1 else f"{num} GPUs"
