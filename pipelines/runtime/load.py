"""Imports OneFlow together with its CUDA libraries. All other modules get OneFlow from `load_oneflow`.

OneFlow 0.9.0 is a CUDA 11.7 build. Its extension module is linked against cuBLAS 11 and cuDNN 8, and cannot be imported without
these libraries, even on machines without a GPU. The wheels ``nvidia-cublas-cu11`` and ``nvidia-cudnn-cu11`` install the libraries
in folders that the dynamic linker does not search. So this module loads the libraries first, dependencies before dependents, with
global symbols. Without the wheels, the linker may find the libraries of a system-wide CUDA.

OneFlow prints warnings on stderr while it loads (no InfiniBand, no CUDA driver). They are captured, and shown only if the import
fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from autoddl.costmodel.errors import UserError

from .availability import Availability
from .memory_files import MemoryFile
from .ranks.connections import send_at_once

__all__ = ["CUDA_LIBRARIES", "is_available", "load_oneflow", "preload_libraries"]

#: OneFlow's CUDA libraries in NVIDIA's packages.  Dependencies come first: cublas needs cublasLt, every cudnn_* needs cudnn, and
#: *_train needs *_infer.
CUDA_LIBRARIES = (
    "cublas/lib/libcublasLt.so.11",
    "cublas/lib/libcublas.so.11",
    "cudnn/lib/libcudnn.so.8",
    "cudnn/lib/libcudnn_ops_infer.so.8",
    "cudnn/lib/libcudnn_ops_train.so.8",
    "cudnn/lib/libcudnn_cnn_infer.so.8",
    "cudnn/lib/libcudnn_cnn_train.so.8",
)
_FIRST_PYTHON, _LAST_PYTHON = (3, 7), (3, 10)
_WHEELS = "oneflow==0.9.0, nvidia-cublas-cu11==11.10.3.66, nvidia-cudnn-cu11==8.5.0.96 and numpy<2"


def is_available() -> Availability:
    """Return whether `load_oneflow` is expected to work. Imports nothing and loads no library."""
    if sys.modules.get("oneflow") is not None:
        return Availability()
    system = f"{platform.system()} {platform.machine()}"
    if system != "Linux x86_64":
        return Availability(f"OneFlow 0.9.0 has wheels for Linux x86-64 only; this is {system}")
    if not _FIRST_PYTHON <= sys.version_info[:2] <= _LAST_PYTHON:
        return Availability(
            f"OneFlow 0.9.0 has wheels for CPython 3.7 to 3.10 only; this is Python {platform.python_version()}: "
            "use Python 3.10"
        )
    if importlib.util.find_spec("oneflow") is None:
        return Availability(f"OneFlow is not installed; in Python 3.10 on Linux x86-64 install {_WHEELS}")
    missing = [name for name in ("cublas", "cudnn") if not _wheel_has(name) and not ctypes.util.find_library(name)]
    if missing:
        return Availability(
            f"OneFlow needs the CUDA 11 libraries {' and '.join(missing)} even on CPU: install {_WHEELS}"
        )
    return Availability()


def load_oneflow() -> ModuleType:
    """Import OneFlow without its warnings, after its CUDA libraries, and return the module.

    If the environment identifies the process as a rank (``MASTER_ADDR``, ``WORLD_SIZE``, ``RANK`` and so on), the import joins the
    ranks. It returns when all ranks have joined. If OneFlow is already imported, the function only returns the module.

    Raises:
        UserError: OneFlow cannot be used. The message gives the reason and the versions that work.

    >>> load_oneflow().__version__
    '0.9.0'
    """
    if sys.modules.get("oneflow") is not None:
        return sys.modules["oneflow"]
    available = is_available()
    if not available:
        raise UserError(f"cannot run on OneFlow: {available.reason}")
    warnings = ""
    try:
        with _preserved_environment(), _captured_stderr() as transcript:
            # OneFlow reads this variable while it loads. Without it, the first tensor prints warnings of missing devices.
            os.environ.setdefault("GLOG_minloglevel", "3")
            try:
                preload_cuda_libraries()
                module = importlib.import_module("oneflow")
            finally:
                warnings = transcript()
    except (ImportError, OSError) as error:
        details = [str(error), *warnings.splitlines()[-1:]]
        text = re.sub(r"\s+", " ", "; ".join(details)).strip()
        raise UserError(
            f"cannot run on OneFlow: its import fails ({text}); known to work together: {_WHEELS}"
        ) from error
    send_at_once()
    return module


def preload_libraries() -> None:
    """Load the CUDA libraries and OneFlow's own library. This is the slow part of the import, and needs no other rank.

    Missing libraries are not reported here, but by the import.
    """
    preload_cuda_libraries()
    found = importlib.util.find_spec("oneflow")
    with _captured_stderr(), contextlib.suppress(OSError):  # warnings of missing devices
        for folder in (found.submodule_search_locations or []) if found else []:
            for path in Path(folder).glob("_oneflow_internal.*.so"):
                ctypes.CDLL(str(path))


def preload_cuda_libraries() -> None:
    """Load the CUDA libraries of the NVIDIA wheels, if they are installed."""
    for directory in _nvidia_directories():
        for name in CUDA_LIBRARIES:
            path = directory / name
            if path.exists():
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _nvidia_directories() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace package, which is found without an import
    return [Path(path) for path in (spec.submodule_search_locations or [])] if spec else []


def _wheel_has(name: str) -> bool:
    libraries = [library for library in CUDA_LIBRARIES if library.startswith(f"{name}/")]
    return any(all((directory / library).exists() for library in libraries) for directory in _nvidia_directories())


@contextlib.contextmanager
def _preserved_environment() -> Iterator[None]:
    """Undo the changes of the import to the environment.

    In a process that is not a rank, OneFlow sets the variables of rank -1 of 1. Processes started later would inherit them.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _captured_stderr() -> Iterator:
    """Redirect file descriptor 2, which C++ writes to, into a file. Yields a function that returns the text written so far."""
    sys.stderr.flush()
    original_fd = os.dup(2)
    with contextlib.closing(MemoryFile()) as file:  # the temporary folder may be full
        os.dup2(file.fd, 2)

        def transcript() -> str:
            return file.path.read_bytes().decode(errors="replace")

        try:
            yield transcript
        finally:
            os.dup2(original_fd, 2)
            os.close(original_fd)
