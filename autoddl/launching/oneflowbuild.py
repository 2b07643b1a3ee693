"""What the installed OneFlow was built for, read from its files without loading them.

**GPUs.** A library with GPU code has a section ``.nv_fatbin`` of "fat binaries". Each is a header {magic 0xBA55ED50, version,
header size, size} and then entries {kind, version, header size, size, ..., architecture, ...}. An entry of kind 2 is machine code
for an architecture, such as 80 for compute capability 8.0; it runs on GPUs of the same major and the same or a higher minor number
(https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Binary Compatibility"). An entry of kind 1 is PTX, from which the driver
makes code for any later GPU. Only headers are read: a few pages of the library's 1.5 GB.

**CUDA's version** is that of the NCCL in the wheel, which says "NCCL version 2.12.10+cuda11.7".
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoddl.pipelines.runtime.load import CUDA_LIBRARIES

__all__ = ["OneFlowBuild", "architectures", "missing_libraries", "oneflow_build"]

_SECTION = b".nv_fatbin"
_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2
_HEADER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
_LDCONFIG_PATIENCE_S = 10.0


@dataclass(frozen=True)
class OneFlowBuild:
    """What OneFlow was built for.

    Attributes:
        cuda: version of CUDA; "" if OneFlow is not installed, or built without CUDA.
        machine_code: architectures that it has code for, such as 80 for compute capability 8.0.
        ptx: architectures that it has PTX for.
        missing_libraries: files of cuBLAS and cuDNN that it needs and that are not found.
    """

    cuda: str = ""
    machine_code: tuple[int, ...] = ()
    ptx: tuple[int, ...] = ()
    missing_libraries: tuple[str, ...] = ()

    def has_code_for(self, capability: tuple[int, int]) -> bool:
        """Whether it runs on a GPU of this compute capability.

        >>> build = OneFlowBuild("11.7", (70, 75, 80, 86))
        >>> [build.has_code_for(capability) for capability in ((7, 0), (8, 9), (9, 0))]
        [True, True, False]
        """
        major, minor = capability
        own = any(code // 10 == major and code % 10 <= minor for code in self.machine_code)
        return own or any(code <= 10 * major + minor for code in self.ptx)


def oneflow_build() -> OneFlowBuild:
    """What the installed OneFlow was built for."""
    found = importlib.util.find_spec("oneflow")
    folders = [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []
    libraries = [path for folder in folders for path in folder.with_name(f"{folder.name}.libs").glob("*.so*")]
    cuda, code = "", set[tuple[int, int]]()
    for path in libraries:
        if path.name.startswith("libnccl"):
            cuda = _cuda_of(path)
        elif path.name.startswith("liboneflow"):
            code |= architectures(path)
    machine_code, ptx = (sorted(number for kind, number in code if kind == wanted) for wanted in (_MACHINE_CODE, _PTX))
    return OneFlowBuild(cuda if code else "", tuple(machine_code), tuple(ptx), missing_libraries())


def _cuda_of(nccl: Path) -> str:
    with nccl.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        match = re.search(rb"NCCL version [0-9.]+\+cuda([0-9]+\.[0-9]+)", data)
        return match[1].decode() if match else ""


def architectures(library: Path) -> set[tuple[int, int]]:
    """The pairs (kind, architecture) of the GPU code in a shared library; kind 1 is PTX, 2 machine code."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {pair for begin, size in _fat_sections(data) for pair in _entries(data, begin, begin + size)}


def _fat_sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Offset and size of the sections with GPU code, from the section headers of a 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, num_sections, names_section = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", data, table + k * entry_size) for k in range(num_sections)]
    if names_section >= len(sections):
        return
    names = sections[names_section][4]
    for name, _, _, _, begin, size in sections:
        if data[names + name : names + name + len(_SECTION) + 1] == _SECTION + b"\0":
            yield begin, size


def _entries(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int]]:
    while at + _HEADER.size <= end:
        magic, _, header_size, size = _HEADER.unpack_from(data, at)
        if magic != _MAGIC:
            at += 8  # padding
            continue
        at += header_size
        binary_end = at + size
        while at + _ENTRY.size <= binary_end:
            kind, _, entry_header, entry_size, architecture = _ENTRY.unpack_from(data, at)
            yield kind, architecture
            at += entry_header + entry_size
        at = binary_end


def missing_libraries() -> tuple[str, ...]:
    """The files of cuBLAS 11 and cuDNN 8 that are neither in NVIDIA's Python packages nor where the dynamic linker looks."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    missing = [name for name in CUDA_LIBRARIES if not any((folder / name).exists() for folder in folders)]
    if not missing:
        return ()
    known = _linker_libraries()
    return tuple(base for name in missing if (base := name.rpartition("/")[2]) not in known)


def _linker_libraries() -> Sequence[str]:
    """Names of the libraries in LD_LIBRARY_PATH and in the linker's cache."""
    paths = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    names = [file.name for folder in paths if folder.is_dir() for file in folder.glob("lib*.so*")]
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            done = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=_LDCONFIG_PATIENCE_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        return names + [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    return names
