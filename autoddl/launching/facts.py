"""The facts about a host, gathered on the host itself: OneFlow, devices, memory, and the files of the job.

Nothing slow is loaded: OneFlow's version is read from its metadata, and GPUs are listed by ``nvidia-smi`` if it is installed.
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
    """The facts about a host.

    Attributes:
        name: its own host name.
        python: version of Python.
        autoddl: version of AutoDDL.
        oneflow: version of OneFlow; "" if it is not installed.
        oneflow_fault: why OneFlow cannot be used; "" if it can.
        gpu_memory_bytes: memory of each GPU that ranks may use.
        free_memory_bytes: available memory of the host.
        digests: SHA-256 of each file of the job; "" if the file does not exist on this host.
        directory: working directory of the ranks.
        has_directory: whether it exists.
        address: address at which the launcher reached this host; "" for the launching machine.
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
        """The facts as JSON."""
        return asdict(self)

    @staticmethod
    def of_document(document: dict[str, Any]) -> HostFacts:
        """Facts from JSON. Missing and unknown fields are ignored, so that other versions of AutoDDL can be recognised."""
        empty: dict[str, Any] = asdict(HostFacts("", "", "", "", "", (), 0, {}, "", False, ""))
        known = {name: document.get(name, value) for name, value in empty.items()}
        return HostFacts(**{**known, "gpu_memory_bytes": tuple(known["gpu_memory_bytes"])})


def gather_facts(directory: str, files: Sequence[str]) -> HostFacts:
    """Gather the facts about this host.

    Args:
        directory: working directory of the ranks.
        files: paths of the files to digest.
    """
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
    """SHA-256 of a file; "" if it cannot be read."""
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
    """Memory [bytes] of each NVIDIA GPU that CUDA_VISIBLE_DEVICES allows."""
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
                break  # as CUDA does: devices after an invalid index are invisible
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
    """This host's end of the ssh connection: an address that other hosts of the network can reach too."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else ""
