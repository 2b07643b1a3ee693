"""The facts about a host, gathered on the host itself: OneFlow, devices, memory, network, and the files of the job.

OneFlow is not loaded: its version is read from its metadata, and what it was built for from its files. GPUs are listed by
``nvidia-smi`` if it is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.gpus import VISIBLE_VARIABLE, Gpu, list_gpus
from autoddl.pipelines.runtime.ranks.interfaces import Interface, list_interfaces

from .interfaces import IFNAME_VARIABLE
from .oneflowbuild import OneFlowBuild, oneflow_build

__all__ = ["GpuFacts", "HostFacts", "digest", "gather_facts"]


@dataclass(frozen=True)
class GpuFacts:
    """The facts about a host that only a job on GPUs needs.

    Attributes:
        gpus: all GPUs of the host that its processes may open.
        visible_devices: value of CUDA_VISIBLE_DEVICES; None if it is not set.
        build: what OneFlow was built for.
        interfaces: network interfaces.
        ifname: value of NCCL_SOCKET_IFNAME; None if it is not set.
    """

    gpus: tuple[Gpu, ...] = ()
    visible_devices: str | None = None
    build: OneFlowBuild = field(default_factory=OneFlowBuild)
    interfaces: tuple[Interface, ...] = ()
    ifname: str | None = None

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> GpuFacts:
        """Facts from JSON."""
        build: dict[str, Any] = dict(document["build"])
        return GpuFacts(
            tuple(Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in document["gpus"]),
            document["visible_devices"],
            OneFlowBuild(build.pop("cuda"), **{name: tuple(values) for name, values in build.items()}),
            tuple(Interface(**interface) for interface in document["interfaces"]),
            document["ifname"],
        )


@dataclass(frozen=True)
class HostFacts:
    """The facts about a host.

    Attributes:
        name: its own host name.
        python: version of Python.
        autoddl: version of AutoDDL.
        oneflow: version of OneFlow; "" if it is not installed.
        oneflow_fault: why OneFlow cannot be used; "" if it can.
        free_memory_bytes: available memory of the host.
        digests: SHA-256 of each file of the job; "" if the file does not exist on this host.
        directory: working directory of the ranks.
        has_directory: whether it exists.
        address: address at which the launcher reached this host; "" for the launching machine.
        gpu_facts: of a job on GPUs; None for other jobs.
    """

    name: str
    python: str
    autoddl: str
    oneflow: str
    oneflow_fault: str
    free_memory_bytes: int
    digests: dict[str, str]
    directory: str
    has_directory: bool
    address: str
    gpu_facts: GpuFacts | None = None

    def document(self) -> dict[str, Any]:
        """The facts as JSON."""
        return asdict(self)

    @staticmethod
    def of_document(document: dict[str, Any]) -> HostFacts:
        """Facts from JSON. Missing and unknown fields are ignored, so that other versions of AutoDDL can be recognised."""
        empty: dict[str, Any] = asdict(HostFacts("", "", "", "", "", 0, {}, "", False, ""))
        known = {name: document.get(name, value) for name, value in empty.items()}
        gpu_facts = known["gpu_facts"]
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return HostFacts(**{**known, "gpu_facts": gpu_facts and GpuFacts.of_document(gpu_facts)})
        return HostFacts(**{**known, "gpu_facts": None})


def gather_facts(directory: str, files: Sequence[str], *, on_gpus: bool = False) -> HostFacts:
    """Gather the facts about this host.

    Args:
        directory: working directory of the ranks.
        files: paths of the files to digest.
        on_gpus: whether the job runs on GPUs.
    """
    available = is_available()
    return HostFacts(
        name=socket.gethostname(),
        python=platform.python_version(),
        autoddl=_version("autoddl"),
        oneflow=_version("oneflow"),
        oneflow_fault=available.reason,
        free_memory_bytes=_free_memory(),
        digests={path: digest(path) for path in files},
        directory=directory,
        has_directory=os.path.isdir(directory),
        address=_own_address(),
        gpu_facts=_gpu_facts() if on_gpus else None,
    )


def _gpu_facts() -> GpuFacts:
    return GpuFacts(
        list_gpus(),
        os.environ.get(VISIBLE_VARIABLE),
        oneflow_build(),
        list_interfaces(),
        os.environ.get(IFNAME_VARIABLE),
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
