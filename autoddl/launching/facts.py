"""What a host has, found out on the host itself: OneFlow, devices, memory, and the files of the job.

Nothing slow is loaded for it: OneFlow's version is read from its metadata, GPUs are counted by ``nvidia-smi`` where that is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoddl.pipelines.runtime.load import is_available

__all__ = ["HostFacts", "digest", "gather_facts"]

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_NVIDIA_SMI_PATIENCE_S = 30.0


@dataclass(frozen=True)
class HostFacts:
    """What was found on a host.

    Attributes:
        name: what the host calls itself.
        python, autoddl: versions.
        oneflow: version, "" where it is not installed; ``oneflow_fault`` says why it cannot be used, "" where it can.
        gpu_memory_bytes: of each GPU that ranks here may use.
        free_memory_bytes: what the host's memory can still hold.
        digests: SHA-256 of each file of the job as this host sees it, "" where it sees none.
        directory: where the ranks are to work; ``has_directory`` says whether it is there.
        address: at which the launcher reached this host, "" where it is the launcher's own.
    """

    name: str
    python: str
    autoddl: str
    oneflow: str
    oneflow_fault: str
    gpu_memory_bytes: tuple[int, ...]
    free_memory_bytes: int
    digests: dict[str, str]
    directory: str
    has_directory: bool
    address: str

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @staticmethod
    def of_document(document: dict[str, Any]) -> HostFacts:
        """From JSON; members that another version of AutoDDL lacks or adds do not hide its version."""
        empty: dict[str, Any] = asdict(HostFacts("", "", "", "", "", (), 0, {}, "", False, ""))
        known = {name: document.get(name, value) for name, value in empty.items()}
        return HostFacts(**{**known, "gpu_memory_bytes": tuple(known["gpu_memory_bytes"])})


def gather_facts(directory: str, files: Sequence[str]) -> HostFacts:
    """Look around on this host."""
    available = is_available()
    return HostFacts(
        name=socket.gethostname(),
        python=platform.python_version(),
        autoddl=_version("autoddl"),
        oneflow=_version("oneflow"),
        oneflow_fault=available.reason,
        gpu_memory_bytes=_gpus(),
        free_memory_bytes=_free_memory(),
        digests={path: digest(path) for path in files},
        directory=directory,
        has_directory=os.path.isdir(directory),
        address=_own_address(),
    )


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, "" where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus() -> tuple[int, ...]:
    """Memory [bytes] of each NVIDIA GPU that CUDA_VISIBLE_DEVICES leaves to us."""
    if shutil.which(_NVIDIA_SMI[0]) is None:
        return ()
    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=_NVIDIA_SMI_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    sizes = [int(line) << 20 for line in done.stdout.split() if line.isdigit()] if done.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(sizes)
    chosen = []
    for name in visible.split(","):
        if name.strip().isdigit():
            if int(name) >= len(sizes):
                break  # as CUDA does: what follows an invalid number is invisible too
            chosen.append(sizes[int(name)])
        elif name.strip():
            chosen.append(min(sizes, default=0))  # named by its UUID
    return tuple(chosen)


def _free_memory() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _own_address() -> str:
    """This host's end of the ssh connection: an address at which others in that network can reach it too."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else ""
