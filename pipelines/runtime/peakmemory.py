"""The peak memory of a process on its device.

On CPU ranks it is the largest resident set of the process so far, which includes Python and OneFlow.

On a GPU it is what the process holds there since `PeakMemory` was made, so without the context of CUDA if a tensor was made before.
OneFlow's allocator does not return memory to the driver while it can reuse it, so what the process holds is its peak. The driver
says how much of the GPU is used, by all processes together (``GetCUDAMemoryUsed``, in MiB); where that fails, nvidia-smi lists the
memory of this process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys

from autoddl.costmodel.devices import GPU

from .load import load_oneflow

__all__ = ["PeakMemory", "of_process"]

_NVIDIA_SMI = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_NVIDIA_SMI_PATIENCE_S = 30.0
#: Bytes of the unit of ``ru_maxrss``.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class PeakMemory:
    """Measures the peak memory of this process on a type of device, from now on for a GPU.

    Args:
        device: The type of device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = (_of_gpu() or 0) if device == GPU else 0

    def read(self) -> int | None:
        """Return the peak [bytes]; None if neither OneFlow nor nvidia-smi knows it."""
        if self._device != GPU:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        used = _of_gpu()
        return None if used is None else max(0, used - self._before)


def _of_gpu() -> int | None:
    flow = load_oneflow()
    with contextlib.suppress(Exception):  # OneFlow's errors have no common class
        return int(flow._oneflow_internal.GetCUDAMemoryUsed() * 2**20)
    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=_NVIDIA_SMI_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return of_process(done.stdout, os.getpid()) if done.returncode == 0 else None


def of_process(listed: str, pid: int) -> int | None:
    """Return the bytes that a process holds on all GPUs, by nvidia-smi's list of ``pid, MiB``; None if it is not listed.

    >>> of_process("11, 512\\n12, 20480\\n12, 1\\n13, [N/A]\\n", 12) == 20481 * 2**20
    True
    """
    rows = [[word.strip() for word in line.split(",")] for line in listed.splitlines()]
    sizes = [int(row[1]) for row in rows if len(row) == 2 and row[0] == str(pid) and row[1].isdigit()]
    return sum(sizes) * 2**20 if sizes else None
