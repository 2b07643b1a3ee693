"""Decides which GPU a rank computes on, before the rank imports OneFlow. On CPU ranks there is nothing to decide.

**What OneFlow does.** A rank of OneFlow 0.9.0 uses the GPU whose index, among those that CUDA shows it, is ``LOCAL_RANK``. There is
no other way to say it: in a job, ``flow.cuda.set_device`` refuses every other index, and ``CUDA_VISIBLE_DEVICES`` only has an
effect before the import (https://github.com/Oneflow-Inc/oneflow/issues/9389). So the environment decides:

    what the rank sees                           CUDA_VISIBLE_DEVICES   LOCAL_RANK    GPU
    a GPU for each rank of its host              as it is               as it is      index LOCAL_RANK
    one GPU, to which Slurm or mpirun bound it   as it is               0             index 0; each rank is a node (`ownnodes`)
    AUTODDL_OWN_NODES is set                     only its own GPU       0             index 0; each rank is a node

`prepare_device` decides and sets the environment, before the import. `take_gpu` checks what OneFlow found, after it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.costmodel.devices import on_gpu
from autoddl.costmodel.errors import UserError

from .gpus import VISIBLE_VARIABLE, Gpu, list_gpus, visible_gpus
from .ownnodes import OWN_NODES_VARIABLE, make_own_nodes

__all__ = ["GpuChoice", "choose_gpu", "prepare_device", "take_gpu"]

#: What Slurm and OpenMPI call the index of a task among those of its host; other launchers bind no GPUs.
_BINDING_LAUNCHERS = {"Slurm": "SLURM_LOCALID", "mpirun": "OMPI_COMM_WORLD_LOCAL_RANK"}


@dataclass(frozen=True)
class GpuChoice:
    """The GPU of a rank.

    Attributes:
        gpu: The GPU; None if ``nvidia-smi`` is not there to describe it.
        index: Its index for OneFlow, the rank's ``LOCAL_RANK``.
        visible: New value of CUDA_VISIBLE_DEVICES; None: as it is.
        has_own_node: Whether the rank is the only one of its node for OneFlow.
    """

    gpu: Gpu | None
    index: int
    visible: str | None = None
    has_own_node: bool = False


def choose_gpu(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> GpuChoice:
    """Return the GPU of a rank.

    Args:
        environ: Environment of the rank: ``RANK``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` (if known), CUDA_VISIBLE_DEVICES and the
            variables of Slurm or OpenMPI.
        gpus: All GPUs of the host; empty if they are not known.

    Raises:
        UserError: The rank sees fewer GPUs than its host has ranks.
    """
    local_rank, setting = int(environ["LOCAL_RANK"]), environ.get(VISIBLE_VARIABLE)
    wants_own_node = OWN_NODES_VARIABLE in environ
    seen = visible_gpus(gpus, setting)
    if len(seen) == 1 and _is_bound(environ):
        return GpuChoice(seen[0], 0, has_own_node=True)
    if not gpus:
        if not wants_own_node:
            return GpuChoice(None, local_rank)
        entries = [str(index) for index in range(local_rank + 1)] if setting is None else setting.split(",")
        if len(entries) > local_rank:
            return GpuChoice(None, 0, entries[local_rank].strip(), has_own_node=True)
    num_local = int(environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if len(seen) < max(num_local, local_rank + 1):
        because = "" if setting is None else f" (CUDA_VISIBLE_DEVICES={setting})"
        ranks = f"{num_local} ranks" if "LOCAL_WORLD_SIZE" in environ else f"LOCAL_RANK {local_rank}"
        raise UserError(
            f"rank {environ['RANK']}: host {socket.gethostname()} shows it {_counted(len(seen))}{because} for {ranks}; there "
            "should be one for each rank of the host"
        )
    chosen = seen[local_rank]
    return GpuChoice(chosen, 0, chosen.uuid, True) if wants_own_node else GpuChoice(chosen, local_rank)


def _is_bound(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this very rank as one of several tasks of the host, so that each task may see another GPU.

    Ranks that share a starter on their host, which counts them (``LOCAL_WORLD_SIZE``), all see what it sees.
    """
    if "LOCAL_WORLD_SIZE" in environ or not any(
        environ.get(name) == environ["LOCAL_RANK"] for name in _BINDING_LAUNCHERS.values()
    ):
        return False
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
        return environ["OMPI_COMM_WORLD_LOCAL_SIZE"] != "1"
    num_nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    return int(environ["WORLD_SIZE"]) > int(num_nodes)


def _counted(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number or 'no'} GPUs"


# ---- In the process of a rank ---------------------------------------------------------------------------------------------

# Module state, because a process is at most one rank: its GPU is claimed as long as the process lives.
_claims: list[socket.socket] = []


def prepare_device(environ: MutableMapping[str, str]) -> GpuChoice | None:
    """Choose the GPU of this rank, claim it, and set the environment for OneFlow's import. Returns None on a CPU rank.

    Raises:
        UserError: There is no GPU for the rank, or another rank of the job has it.
    """
    choice, has_own_node = None, OWN_NODES_VARIABLE in environ
    if on_gpu(environ):
        # The order of nvidia-smi, by which indices are understood here.
        environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        choice = choose_gpu(environ, list_gpus())
        has_own_node = choice.has_own_node
        if choice.gpu is not None:
            _claims.append(claim_gpu(choice.gpu, environ))
        if choice.visible is not None:
            environ[VISIBLE_VARIABLE] = choice.visible
    if has_own_node:
        environ["LOCAL_RANK"] = "0"
        make_own_nodes()
    return choice


def claim_gpu(gpu: Gpu, environ: Mapping[str, str]) -> socket.socket:
    """Claim a GPU for this rank of the job, until the result is closed or the process ends.

    The claim is the name of a socket that the kernel gives away once per host (in Linux's abstract namespace: there is no file).

    Raises:
        UserError: Another rank of the job has claimed the GPU.
    """
    job = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0autoddl-{job}-{gpu.uuid}")
    except OSError:
        claim.close()
        raise UserError(
            f"rank {environ['RANK']}: GPU {gpu.index} ({gpu.name}, {gpu.uuid}) of host {socket.gethostname()} is that of "
            "another rank of this job; each rank should see a GPU of its own, or all GPUs of the host (srun --gpu-bind=none)"
        ) from None
    return claim


def take_gpu(flow: Any, host_index: int | None = None, free_bytes: float | None = None) -> str:
    """Let this rank compute on the GPU of index ``LOCAL_RANK``, and return one line about it. Call it before the first tensor.

    Args:
        flow: OneFlow.
        host_index: Index of the GPU among all of the host, for the line; None: the index among the visible ones.
        free_bytes: Free memory of the GPU, for the line; None: the line tells the total memory.

    Raises:
        UserError: OneFlow sees no GPU of this index.
    """
    rank, index, num_gpus = os.environ["RANK"], int(os.environ["LOCAL_RANK"]), flow.cuda.device_count()
    if index >= num_gpus:
        raise UserError(
            f"rank {rank}: OneFlow sees {_counted(num_gpus)} on host {socket.gethostname()} and would use the one of index {index} "
            f"(LOCAL_RANK); CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')} should show one for "
            "each rank"
        )
    # OneFlow's threads choose the device themselves. Without this the main thread would occupy memory of GPU 0 on every rank.
    flow._oneflow_internal.SetCudaDeviceIndex(index)
    found = flow.cuda.get_device_properties(index)
    memory = f"{found.total_memory / 2**30:.1f} GiB" if free_bytes is None else f"{free_bytes / 2**30:.1f} GiB free"
    shown = index if host_index is None else host_index
    return f"rank {rank}: GPU {shown} ({found.name}, {memory}) of host {socket.gethostname()}"
