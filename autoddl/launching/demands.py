"""The requirements of a plan, and the differences between them and what the hosts have.

A plan numbers the devices of its cluster node by node. Without a pipeline, ranks are numbered in the same way. A pipeline lists
for each of its workers the devices it uses, and its runtime numbers ranks worker by worker: rank r runs on the r-th device of the
concatenated lists. With workers of one device on each of two nodes of 2:

    worker 0: devices 0 2    worker 1: devices 1 3        node 0: ranks 0 2    node 1: ranks 1 3

OneFlow expects rank r on node r // G, on GPU r % G, if there are G devices per node. So with these workers it would look for rank
1 on node 0. CPU ranks get along by their `Job.local_rank`. On GPUs, where a rank must have the GPU that OneFlow expects, each rank
is then made a node of its own (:mod:`autoddl.pipelines.runtime.ranks.ownnodes`); which GPU of a node a rank has does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoddl.costmodel.devices import CPU, GPU, check_device_type
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.precision import precision_of
from autoddl.costmodel.reading import read_bytes
from autoddl.costmodel.units import format_bytes

from .facts import HostFacts
from .gpuchecks import gpu_faults, interface_faults
from .hosts import Placement
from .unmet import UnmetDemand

if TYPE_CHECKING:
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
        on_gpus: whether ranks compute on GPUs.
        memory_bytes: memory of each rank.
        devices: device of each rank, numbered node by node; empty if ranks are numbered as devices are.
        precision: in which ranks compute.
        device_type: type of device that ranks of a plan for GPUs compute on; "" for other plans.
        stray_worker: on GPUs, the first worker whose ranks are not where OneFlow expects them, in words; "" if there is none.
    """

    num_nodes: int
    devices_per_node: int
    device: str
    on_gpus: bool
    memory_bytes: tuple[float, ...]
    devices: tuple[int, ...] = ()
    precision: str = "float32"
    device_type: str = ""
    stray_worker: str = ""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.devices_per_node

    def rank_on(self, device: int) -> int:
        """The rank of a device."""
        return self.devices.index(device) if self.devices else device


def demands_of(plan: PlanFile, device_type: str | None = None) -> Demands:
    """The requirements of a plan.

    Args:
        plan: the plan.
        device_type: type of device that ranks compute on; None: that of the plan's cluster.

    Raises:
        UserError: the workers of its pipeline do not use each rank of its cluster once; or the type of device is unknown, or that
            of GPUs and the plan is for CPU ranks.
    """
    cluster = plan.cluster
    workers = plan.document["workers"]
    devices = [device for worker in workers for device in worker["ranks"]]
    memory = [float(worker["memory_bytes"]) for worker in workers for _ in worker["ranks"]]
    if sorted(devices) != list(range(cluster.num_devices)):
        raise UserError(f"the plan has ranks {devices}, should have each of 0 to {cluster.num_devices - 1} once")
    if device_type is not None:
        check_device_type(device_type)
    if device_type == GPU and not cluster.has_gpus:
        raise UserError(f"device={GPU!r} is for plans for GPUs; this plan is for {cluster.device.name}")
    on_gpus = cluster.has_gpus and device_type != CPU
    planned = precision_of(plan.workload.precision)
    used = planned if on_gpus else planned.on_cpu()  # CPU ranks run wider types in place of half precision
    return Demands(
        cluster.num_nodes,
        cluster.devices_per_node,
        cluster.device.name,
        on_gpus,
        tuple(size * used.itemsize / planned.itemsize for size in memory),
        tuple(devices) if devices != sorted(devices) else (),
        used.name,
        (GPU if on_gpus else CPU) if cluster.has_gpus else "",
        _stray_worker([worker["ranks"] for worker in workers], cluster.devices_per_node) if on_gpus else "",
    )


def _stray_worker(workers: Sequence[Sequence[int]], devices_per_node: int) -> str:
    """The first worker whose ranks are not where OneFlow expects them on GPUs, in words; "" if there is none.

    OneFlow expects each ``devices_per_node`` consecutive ranks on one node; which of the nodes and GPUs they are does not matter.

    >>> _stray_worker([[2, 3], [1, 0]], 2), _stray_worker([[0, 2], [1, 3]], 2)
    ('', 'worker 0 of the plan has the devices 0, 2 of the nodes 0, 1; OneFlow would expect its ranks 0, 1 on the same node')
    """
    nodes = [device // devices_per_node for devices in workers for device in devices]
    first = 0
    for number, devices in enumerate(workers):
        ranks = range(first, first + len(devices))
        for rank in ranks:
            begin = rank - rank % devices_per_node
            if len(set(nodes[begin : begin + devices_per_node])) > 1:
                shown = [", ".join(map(str, values)) for values in (devices, sorted({nodes[one] for one in ranks}))]
                expected = ", ".join(str(one) for one in ranks if one // devices_per_node == rank // devices_per_node)
                return (
                    f"worker {number} of the plan has the devices {shown[0]} of the nodes {shown[1]}; OneFlow would expect its "
                    f"ranks {expected} on the same node"
                )
        first += len(devices)
    return ""


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


def differences(
    demands: Demands,
    placements: Sequence[Placement],
    facts: Sequence[HostFacts],
    own: HostFacts,
    *,
    with_oneflow: bool = True,
    environment: Mapping[str, str] | None = None,
    joined_as: int | None = None,
) -> Iterator[UnmetDemand]:
    """The differences between the hosts and the requirements of the plan and of the launching machine.

    Args:
        demands: requirements of the plan.
        placements: hosts and their ranks.
        facts: of each placement's host.
        own: facts of the launching machine: all hosts need its versions and the same files.
        with_oneflow: whether the job needs OneFlow.
        environment: additional variables of the ranks.
        joined_as: ``LOCAL_RANK`` of the only rank that is started here, by a launcher that joins a job; None for all ranks.
    """
    spans_hosts = len(placements) > 1 or (joined_as is not None and demands.num_nodes > 1)
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
        if not demands.on_gpus:
            yield from _memory(name, demands, placement, found)
        elif found.gpu_facts is None:
            yield UnmetDemand(f"host {name} has not told what GPUs it has; install AutoDDL there as it is here")
        else:
            gpu_facts = found.gpu_facts
            ranks, more = placement.ranks, environment or {}
            yield from gpu_faults(name, demands, ranks, gpu_facts, more, joined_as, with_oneflow=with_oneflow)
            if with_oneflow and spans_hosts:
                yield from interface_faults(name, gpu_facts, more)


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


def _memory(name: str, demands: Demands, placement: Placement, found: HostFacts) -> Iterator[UnmetDemand]:
    total = sum(demands.memory_bytes[rank] for rank in placement.ranks)
    if total > found.free_memory_bytes:
        yield UnmetDemand(
            f"host {name} has {format_bytes(found.free_memory_bytes)} of memory free; the plan's {len(placement.ranks)} ranks "
            f"there need {format_bytes(total)}",
            can_be_forced=True,
        )
