"""Lists the NVIDIA GPUs of this machine, and those of them that a process sees. Needs neither OneFlow nor CUDA.

``nvidia-smi`` lists every GPU that the process may open (Slurm hides others by cgroups), in the order of the PCI bus.
``CUDA_VISIBLE_DEVICES`` then selects and orders the GPUs that CUDA numbers from 0:

    CUDA_VISIBLE_DEVICES   of 4 GPUs, visible are
    (not set)              0 1 2 3
    2,0                    2 0
    GPU-8f2a               the one whose UUID begins so
    0,9,1                  0          (behind an invalid entry nothing is visible)
    2,-1,0                 2          (-1 is invalid)
    0,0                    none       (nothing is visible if one is given twice)
    (empty)                none

These are the rules of CUDA's driver (CUDA C++ Programming Guide, "CUDA Environment Variables"); that of duplicates is not in the
guide, and is as PyTorch reads it (``torch.cuda._parse_visible_devices``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from autoddl.costmodel.devices import chosen_device

__all__ = ["VISIBLE_VARIABLE", "Gpu", "list_gpus", "parse_gpus", "present_device", "sees_gpus", "visible_gpus"]

#: Environment variable that selects and orders the GPUs of a process.
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_FIELDS = "index,uuid,name,driver_version,compute_cap,memory.total,memory.free"
#: Drivers before 510 know no field ``compute_cap``.
_OLD_FIELDS = _FIELDS.replace(",compute_cap", "")
_PATIENCE_S = 30.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU, as ``nvidia-smi`` describes it.

    Attributes:
        index: In the order of the PCI bus.
        uuid: ``GPU-...``.
        name: Of the product.
        driver: Version of the NVIDIA driver.
        capability: Compute capability (major, minor); (0, 0) if the driver is too old to tell it.
        memory_bytes: Total memory.
        free_bytes: Free memory.
    """

    index: int
    uuid: str
    name: str
    driver: str
    capability: tuple[int, int]
    memory_bytes: int
    free_bytes: int


def list_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs that this process may open, whatever CUDA_VISIBLE_DEVICES says; none without ``nvidia-smi``."""
    if shutil.which("nvidia-smi") is None:
        return ()
    for fields in (_FIELDS, _OLD_FIELDS):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
        except (OSError, subprocess.TimeoutExpired):
            return ()
        if done.returncode == 0:
            return parse_gpus(done.stdout)
    return ()


def present_device() -> str:
    """Return the type of device that `DEVICE_VARIABLE` names; else GPUs if this process sees any, and CPU ranks if not."""
    return chosen_device(sees_gpus())


def sees_gpus() -> bool:
    """Return whether this process sees a GPU."""
    return bool(visible_gpus(list_gpus(), os.environ.get(VISIBLE_VARIABLE)))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs that the output of ``nvidia-smi --query-gpu`` lists; lines of another form are ignored.

    >>> (gpu,) = parse_gpus("0, GPU-8f2a, NVIDIA A100-SXM4-80GB, 515.65.01, 8.0, 81920, 81100")
    >>> gpu.name, gpu.capability, gpu.memory_bytes >> 30
    ('NVIDIA A100-SXM4-80GB', (8, 0), 80)
    """
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 6:
            fields.insert(4, "0.0")
        if len(fields) == 7 and fields[0].isdigit():
            known = re.fullmatch(r"(\d+)\.(\d+)", fields[4])
            capability = (int(known[1]), int(known[2])) if known else (0, 0)
            index, total, free = (int(fields[k]) if fields[k].isdigit() else 0 for k in (0, 5, 6))
            gpus.append(Gpu(index, fields[1], fields[2], fields[3], capability, total * _MIB, free * _MIB))
    return tuple(gpus)


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a process sees, in CUDA's order.

    Args:
        gpus: All GPUs, in the order of the PCI bus.
        visible: Value of CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    if visible is None:
        return tuple(gpus)
    seen: list[Gpu] = []
    for entry in visible.split(","):
        found = _gpu_of(gpus, entry.strip())
        if found is None:
            break
        if found in seen:
            return ()
        seen.append(found)
    return tuple(seen)


def _gpu_of(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    """The GPU that an entry of CUDA_VISIBLE_DEVICES names: by its index, or by the beginning of its UUID if only one begins so."""
    if entry.startswith("GPU-"):
        found = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        return found[0] if len(found) == 1 else None
    digits = re.match(r"\+?(\d+)", entry)  # CUDA reads the number at the beginning of an entry
    return gpus[int(digits[1])] if digits and int(digits[1]) < len(gpus) else None
