"""Files in memory, without a name: writing there cannot fail for lack of space on a disk, and nothing has to be swept."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import IO

__all__ = ["MemoryFile"]

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate
_PAGE_BYTES = 4096


class MemoryFile:
    """A file in memory, which this process and its children open by ``path`` as long as this object is there."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("autoddl")
        else:  # a Python that was built for an old system
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed with this object
            self.fd = self._file.fileno()

    @property
    def path(self) -> Path:
        """Where all processes of this user find it."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    def forget(self, num_bytes: int) -> None:
        """Give back the memory of the first ``num_bytes``, which read as zeros from now on; the file keeps its size."""
        whole = num_bytes // _PAGE_BYTES * _PAGE_BYTES
        if whole > 0:  # where it does not work the memory stays in use
            libc = ctypes.CDLL(None)
            libc.fallocate(self.fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(whole))

    def close(self) -> None:
        """Close it; processes that have opened it keep it."""
        if self._file is not None:
            self._file.close()
        else:
            os.close(self.fd)
