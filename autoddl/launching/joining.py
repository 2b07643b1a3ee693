"""Joining a job that another launcher starts: Slurm's ``srun``, ``mpirun`` of OpenMPI, MPICH or Intel, or any that sets RANK.

Each of its processes is one rank, identified by its environment:

    launcher     rank                   ranks                  on its host                  address of rank 0
    OpenMPI      OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE   OMPI_COMM_WORLD_LOCAL_RANK   MASTER_ADDR; this host if it has all
    others       RANK                   WORLD_SIZE             LOCAL_RANK                   MASTER_ADDR, MASTER_PORT
    Slurm        SLURM_PROCID           SLURM_NTASKS           SLURM_LOCALID                first of SLURM_STEP_NODELIST
    MPICH, Intel PMI_RANK               PMI_SIZE               MPI_LOCALRANKID              MASTER_ADDR; this host if it has all

MASTER_ADDR and MASTER_PORT take precedence if they are set. Without MASTER_PORT the port is derived from the job's number, so
that all ranks use the same one without communication. It is below the ports that the system assigns.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import MAX_DEVICES, MAX_HOSTS
from autoddl.costmodel.reading import is_whole, whole_number

from .demands import Demands
from .job import Rendezvous
from .nodelist import expand_nodelist

__all__ = ["Membership", "SharedError", "check_membership", "find_membership", "in_slurm_step"]

_FIRST_PORT, _NUM_PORTS = 12_000, 16_000
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
#: Slurm's step numbers from here on are not srun's steps, but the batch script and interactive shells.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


class SharedError(UserError):
    """An error that all ranks of a job have; it is raised on all ranks but rank 0, which reports it for all."""


@dataclass(frozen=True)
class Membership:
    """The rank of this process in a job that another launcher started.

    Attributes:
        launcher: name of the launcher.
        rank: of this process.
        num_ranks: of the job.
        local_rank: of this process among those of its host.
        num_local: number of ranks of this host; None if unknown.
        node: index of this host; None if unknown.
        rendezvous: where rank 0 listens.
    """

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int
    num_local: int | None
    node: int | None
    rendezvous: Rendezvous


def find_membership(environ: Mapping[str, str]) -> Membership | None:
    """The rank of this process by its environment; None if no launcher started it.

    Raises:
        UserError: variables contradict each other, or the address of rank 0 is missing.
    """
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _openmpi(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _plain(environ)
    if in_slurm_step(environ):
        return _slurm(environ)
    if "PMI_RANK" in environ:
        return _mpich(environ)
    return None


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of ``srun``, not a shell or a batch script in an allocation."""
    step = environ.get("SLURM_STEP_ID", "")
    return is_whole(step) and int(step) < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in environ


def _openmpi(environ: Mapping[str, str]) -> Membership:
    num_ranks = _number(environ, "OMPI_COMM_WORLD_SIZE")
    num_local = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if num_local == num_ranks else "")
    if not address:
        raise UserError(
            "mpirun has ranks on several hosts and MASTER_ADDR is not set; give it: mpirun -x MASTER_ADDR=HOST ..."
        )
    seed = (
        environ.get("PMIX_NAMESPACE")
        or environ.get("OMPI_MCA_ess_base_jobid")
        or environ.get("OMPI_MCA_orte_ess_jobid", "")
    )
    rank, local_rank = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    return _member("OpenMPI", rank, num_ranks, local_rank, num_local, None, Rendezvous(address, _port(environ, seed)))


def _mpich(environ: Mapping[str, str]) -> Membership:
    """Hydra starts the ranks of MPICH and Intel.  It gives jobs no name: jobs at once on one host need a MASTER_PORT each."""
    num_ranks, num_local = _number(environ, "PMI_SIZE"), _number(environ, "MPI_LOCALNRANKS")
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if num_local == num_ranks else "")
    if not address:
        raise UserError(
            "mpirun has ranks on several hosts and MASTER_ADDR is not set; give it: mpirun -genv MASTER_ADDR HOST ..."
        )
    rank, local_rank = _number(environ, "PMI_RANK"), _number(environ, "MPI_LOCALRANKID")
    rendezvous = Rendezvous(address, _port(environ, environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID", "")))
    return _member("MPICH", rank, num_ranks, local_rank, num_local, None, rendezvous)


def _plain(environ: Mapping[str, str]) -> Membership:
    rank, num_ranks = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK")
    num_local = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise UserError(f"RANK and WORLD_SIZE are set, {name} is not: it should say where rank 0 listens")
    rendezvous = Rendezvous(environ["MASTER_ADDR"], _port(environ, ""))
    return _member("the environment", rank, num_ranks, local_rank, num_local, None, rendezvous)


def _slurm(environ: Mapping[str, str]) -> Membership:
    nodes = expand_nodelist(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    num_ranks = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if len(nodes) == 1 else nodes[0])
    seed = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    node = _number(environ, "SLURM_NODEID")
    sizes = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return _member(
        "Slurm",
        _number(environ, "SLURM_PROCID"),
        num_ranks,
        _number(environ, "SLURM_LOCALID"),
        sizes[node] if node < len(sizes) else None,
        node,
        Rendezvous(address, _port(environ, seed)),
    )


def _member(
    launcher: str,
    rank: int,
    num_ranks: int,
    local_rank: int,
    num_local: int | None,
    node: int | None,
    rendezvous: Rendezvous,
) -> Membership:
    if not 0 <= rank < num_ranks:
        raise UserError(f"{launcher} says that this is rank {rank} of {num_ranks}; it should be below {num_ranks}")
    return Membership(launcher, rank, num_ranks, local_rank, num_local, node, rendezvous)


def _number(environ: Mapping[str, str], name: str) -> int:
    return whole_number(environ.get(name, ""), f"environment variable {name}", 0, MAX_DEVICES)


def _port(environ: Mapping[str, str], seed: str) -> int:
    if environ.get("MASTER_PORT"):
        return whole_number(environ["MASTER_PORT"], "environment variable MASTER_PORT", 1, 65535)
    return _FIRST_PORT + int(hashlib.sha256(seed.encode()).hexdigest(), 16) % _NUM_PORTS


def _tasks_per_node(text: str) -> list[int]:
    """Parse the number of tasks per node: ``2(x3),1`` is [2, 2, 2, 1].

    Raises:
        UserError: the text has another form, or more nodes than a job can have.
    """
    sizes: list[int] = []
    what = "environment variable SLURM_STEP_TASKS_PER_NODE"
    for part in text.split(",") if text else ():
        match = _TASKS.fullmatch(part)
        if match is None:
            raise UserError(f"{what} is {quote(text)}, should be like 2(x3),1")
        times = whole_number(match[2] or "1", f"{what}: times", 1, MAX_HOSTS)
        if len(sizes) + times > MAX_HOSTS:
            raise UserError(f"{what} is {quote(text)}, of more than {MAX_HOSTS:,} nodes")
        sizes += [whole_number(match[1], f"{what}: tasks", 0, MAX_DEVICES)] * times
    return sizes


def check_membership(member: Membership, demands: Demands, *, force: bool = False) -> None:
    """Check that a job has the plan's number of ranks, on the plan's nodes.

    Args:
        member: the rank of this process.
        demands: requirements of the plan.
        force: accept ranks on other nodes than the plan's.

    Raises:
        UserError: naming the difference; a `SharedError` if rank 0 raises the same error.
    """
    if member.num_ranks != demands.num_ranks:
        message = f"the plan is for {demands.num_ranks} ranks, {member.launcher} started {member.num_ranks}"
        raise SharedError(message) if member.rank > 0 else UserError(message)
    size = demands.devices_per_node
    if force:
        return
    if member.num_local is not None and member.num_local != size:
        raise UserError(f"the plan has {size} ranks per node, {member.launcher} started {member.num_local} on this one")
    node, local_rank = divmod(member.rank, size)
    if member.local_rank != local_rank or member.node not in (None, node):
        found = f"its number {member.local_rank}" + ("" if member.node is None else f" of node {member.node}")
        raise UserError(
            f"the plan has rank {member.rank} as number {local_rank} of node {node}, {member.launcher} made it {found}; "
            "start ranks node by node (srun --distribution=block, mpirun --map-by slot)"
        )
