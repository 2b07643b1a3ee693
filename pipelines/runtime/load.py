"""Loading OneFlow: the only place that imports it first.

OneFlow 0.9.0 is a CUDA 11.7 build. Its extension module is linked against cuBLAS 11 and cuDNN 8 and cannot be imported
without them, even on machines without a GPU. The wheels ``nvidia-cublas-cu11`` and ``nvidia-cudnn-cu11`` install the libraries
where the dynamic linker does not look, so they are loaded here first, dependencies before dependents, with their symbols made
global. Without the wheels the linker may find a system-wide CUDA.

OneFlow also prints warnings on stderr while it loads (no InfiniBand, no CUDA driver). They are captured, and shown only if the
import fails.
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
    """Whether ``load_oneflow`` can be expected to work; nothing is imported and no library is loaded."""
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
    """Import OneFlow quietly, its CUDA libraries first, and return the module; cheap if it is already loaded.

    In a process that a launcher gave ``MASTER_ADDR``, ``WORLD_SIZE``, ``RANK`` and so on, the import itself joins the ranks:
    it returns when all of them have joined.

    Raises:
        UserError: OneFlow cannot be used; the message gives the reason and the versions that work.

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
            # Read once, while the library loads; otherwise OneFlow warns of missing devices with the first tensor.
            os.environ.setdefault("GLOG_minloglevel", "3")
            try:
                preload_cuda_libraries()
                return importlib.import_module("oneflow")
            finally:
                warnings = transcript()
    except (ImportError, OSError) as error:
        details = [str(error), *warnings.splitlines()[-1:]]
        text = re.sub(r"\s+", " ", "; ".join(details)).strip()
        raise UserError(
            f"cannot run on OneFlow: its import fails ({text}); known to work together: {_WHEELS}"
        ) from error


def preload_libraries() -> None:
    """Load the libraries that OneFlow's import needs, and its own: the slow part of the import, which needs no other rank.

    Missing libraries are not reported here: the import does that.
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
    spec = importlib.util.find_spec("nvidia")  # a namespace package: found without importing anything
    return [Path(path) for path in (spec.submodule_search_locations or [])] if spec else []


def _wheel_has(name: str) -> bool:
    wanted = [library for library in CUDA_LIBRARIES if library.startswith(f"{name}/")]
    return any(all((directory / library).exists() for library in wanted) for directory in _nvidia_directories())


@contextlib.contextmanager
def _preserved_environment() -> Iterator[None]:
    """Undo the import's changes to the environment.

    Outside a launcher OneFlow sets the variables of rank -1 of 1, which processes started later would take as their own.
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
    """Redirect file descriptor 2, which C++ writes to, into a file; yields a function that returns the text written so far."""
    sys.stderr.flush()
    kept = os.dup(2)
    with contextlib.closing(MemoryFile()) as file:  # the temporary folder may be full
        os.dup2(file.fd, 2)

        def transcript() -> str:
            return file.path.read_bytes().decode(errors="replace")

        try:
            yield transcript
        finally:
            os.dup2(kept, 2)
            os.close(kept)
