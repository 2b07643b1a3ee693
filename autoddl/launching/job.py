"""What is to be launched: a value that the command line makes and everything else reads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .demands import Demands
from .hosts import Placement

__all__ = ["Job", "Rendezvous"]


@dataclass(frozen=True)
class Rendezvous:
    """Where rank 0 will listen for the others."""

    address: str
    port: int


@dataclass(frozen=True)
class Job:
    """A script to be run on all ranks of a plan.

    Attributes:
        plan, script: absolute paths, the same on every host; ``arguments`` are the script's.
        demands: of the plan.
        placements: the ranks that this launcher starts, by host.
        directory: where the ranks work.
        environment: further variables of the ranks.
        checkpoints: where the script keeps its checkpoints, passed on to it.
        rendezvous: where rank 0 listens, for a launcher that starts only some of the ranks (it joins a job); None for one that
            starts all of them and lets rank 0's host choose.
        local_ranks: ``LOCAL_RANK`` of each rank, where it is not its place on the host.
        master_address: of rank 0's host, where the one at which ssh reached it is not right.
        python: of the remote hosts; ``ssh`` the command that reaches them.
        stall_timeout_s: how long a rank may wait for another in communication.
        start_timeout_s: how long the start may take until all ranks have joined.
        grace_s: how long ranks may take to end after an interrupt.
        with_oneflow: whether the script is a OneFlow job.
        is_edited: take a plan that was edited, without what was claimed of it.
        forced: go on where hosts are not like the plan's cluster.
    """

    plan: Path
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
    max_restarts: int = 0
    with_oneflow: bool = True
    is_edited: bool = False
    forced: bool = False

    @property
    def num_ranks(self) -> int:
        return self.demands.num_ranks

    @property
    def is_here_alone(self) -> bool:
        """Whether all ranks are on this machine, so that nobody need be told where they are."""
        return self.rendezvous is None and all(placement.host.is_local for placement in self.placements)

    def rank_variables(self, restart: int) -> dict[str, str]:
        """The variables that tell a script what it was launched for (`autoddl.launched` reads them), and the user's own."""
        variables = {"AUTODDL_PLAN": str(self.plan), "AUTODDL_RESTART": str(restart)}
        if self.checkpoints is not None:
            variables["AUTODDL_CHECKPOINTS"] = str(self.checkpoints)
        if self.is_edited:
            variables["AUTODDL_EDITED"] = "1"
        return {**variables, **self.environment}

    def local_rank(self, placement: Placement, rank: int) -> int:
        """``LOCAL_RANK`` of a rank: its place on the host, where ranks are counted host by host.

        OneFlow knows ranks by (node, ``LOCAL_RANK``), and takes them to be counted so. Where a pipeline counts them otherwise they
        are given the place that it expects, or it would not find them in a placement.
        """
        if self.demands.devices:
            return rank % self.demands.devices_per_node
        return self.local_ranks.get(rank, placement.ranks.index(rank))
