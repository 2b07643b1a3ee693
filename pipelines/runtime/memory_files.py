"""Anonymous files in memory. They need no space on a disk, and no process has to remove them."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import IO

__all__ = ["MemoryFile"]

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of fallocate
_PAGE_BYTES = 4096


class MemoryFile:
    """A file in memory. This process and its children can open it by its ``path`` until it is closed."""

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
        """Path under which all processes of this user can open the file."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    def forget(self, num_bytes: int) -> None:
        """Free the memory of the first ``num_bytes``, rounded down to pages. They read as zeros afterwards; the size stays."""
        page_bytes = num_bytes // _PAGE_BYTES * _PAGE_BYTES
        if page_bytes > 0:  # if the system does not support it, the memory stays in use
            libc = ctypes.CDLL(None)
            libc.fallocate(self.fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(page_bytes))

    def close(self) -> None:
        """Close the file. Processes that have opened it can still use it."""
        if self._file is not None:
            self._file.close()
        else:
            os.close(self.fd)
