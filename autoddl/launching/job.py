"""The description of a launch, made by the command line or the Python API."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoddl.costmodel.devices import DEVICE_VARIABLE
from autoddl.pipelines.runtime.ranks.ownnodes import OWN_NODES_VARIABLE

from .demands import Demands
from .heartbeat import HeartbeatTimes
from .hosts import Placement

__all__ = ["Job", "Rendezvous"]


@dataclass(frozen=True)
class Rendezvous:
    """Where rank 0 listens for the other ranks.

    Attributes:
        address: of rank 0's host.
        port: of rank 0.
    """

    address: str
    port: int


@dataclass(frozen=True)
class Job:
    """A script to run on all ranks of a plan, or of a measuring job.

    Attributes:
        plan: absolute path, the same on every host; None: the script needs no plan.
        script: absolute path, the same on every host.
        arguments: arguments of the script.
        demands: requirements of the plan.
        placements: the ranks that this launcher starts, by host.
        directory: working directory of the ranks.
        log_dir: folder for the output of the ranks.
        environment: additional variables of the ranks.
        checkpoints: folder for the script's checkpoints, passed to it; None: none.
        rendezvous: where rank 0 listens, for a launcher that starts only some of the ranks (it joins a job); None for one that
            starts all of them: rank 0's host then chooses the port.
        local_ranks: ``LOCAL_RANK`` of the ranks for which it is not their position on the host.
        master_address: address of rank 0's host; None: the one at which ssh reached it.
        python: Python of the remote hosts.
        ssh: command that reaches them.
        stall_timeout_s: how long a rank may wait for another in communication.
        start_timeout_s: how long the start may take until all ranks have joined.
        grace_s: how long ranks may take to end after an interrupt.
        heartbeat: how long hosts may be silent.
        max_restarts: number of times that the job may be restarted after a failure.
        with_oneflow: whether the script uses OneFlow.
        is_edited: accept a plan that was edited, without its claims.
        forced: accept hosts that differ from the plan's cluster.
    """

    plan: Path | None
    script: Path
    arguments: tuple[str, ...]
    demands: Demands
    placements: tuple[Placement, ...]
    directory: Path
    log_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    checkpoints: Path | None = None
    rendezvous: Rendezvous | None = None
    local_ranks: Mapping[int, int] = field(default_factory=dict)
    master_address: str | None = None
    python: str = sys.executable
    ssh: tuple[str, ...] = ("ssh",)
    stall_timeout_s: float = 60.0
    start_timeout_s: float = 180.0
    grace_s: float = 10.0
    heartbeat: HeartbeatTimes = field(default_factory=HeartbeatTimes)
    max_restarts: int = 0
    with_oneflow: bool = True
    is_edited: bool = False
    forced: bool = False

    @property
    def num_ranks(self) -> int:
        return self.demands.num_ranks

    @property
    def files(self) -> list[str]:
        """The files that every host needs."""
        return [str(path) for path in (self.plan, self.script) if path is not None]

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this machine, so that no address has to be reachable from other hosts."""
        return self.rendezvous is None and all(placement.host.is_local for placement in self.placements)

    @property
    def has_own_nodes(self) -> bool:
        """Whether each rank has to be a node of its own for OneFlow, which expects equally many ranks on each host, numbered host
        by host."""
        sizes = {len(placement.ranks) for placement in self.placements}
        return self.with_oneflow and bool(self.demands.stray_worker or (self.rendezvous is None and len(sizes) > 1))

    def rank_variables(self, restart: int) -> dict[str, str]:
        """The variables that describe the job to a script (`autoddl.launched` reads them), and the user's own."""
        variables = {"AUTODDL_RESTART": str(restart)}
        if self.plan is not None:
            variables["AUTODDL_PLAN"] = str(self.plan)
        if self.checkpoints is not None:
            variables["AUTODDL_CHECKPOINTS"] = str(self.checkpoints)
        if self.is_edited:
            variables["AUTODDL_EDITED"] = "1"
        if self.demands.device_type:
            variables[DEVICE_VARIABLE] = self.demands.device_type
        if self.has_own_nodes:
            variables[OWN_NODES_VARIABLE] = "1"
        return {**variables, **self.environment}

    def local_rank(self, placement: Placement, rank: int) -> int:
        """``LOCAL_RANK`` of a rank: its position on the host if ranks are numbered host by host.

        OneFlow identifies ranks by (node, ``LOCAL_RANK``) and assumes that numbering. If a pipeline numbers ranks differently,
        each gets the position that OneFlow expects; otherwise OneFlow would not find it in a placement. A rank that is a node of
        its own has its position on the host here, by which it chooses its GPU.
        """
        if self.demands.devices and not self.has_own_nodes:
            return rank % self.demands.devices_per_node
        return self.local_ranks.get(rank, placement.ranks.index(rank))
