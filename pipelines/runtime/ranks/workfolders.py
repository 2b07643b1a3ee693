"""Temporary folders that are removed even if the process that created them is killed.

Every folder contains a lock file, which is locked as long as the process that created the folder runs. A process that creates a
folder first removes all folders of this user whose lock files are not locked. Folders without a lock file are never removed; this
keeps the logs of a failed rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType

__all__ = ["WorkFolder"]

_PREFIX, _LOCK = "autoddl-", "lock"
_MAX_CREATION_SECONDS = 60.0  # an empty folder that is older than this was abandoned while it was created


class WorkFolder:
    """A folder ``autoddl-PURPOSE-...`` in the system's folder for temporary files, which is removed when the context ends.

    Args:
        purpose: Part of the folder's name.

    Raises:
        OSError: The folder cannot be created.
    """

    def __init__(self, purpose: str) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-")).resolve()
        try:
            # The lock file is renamed after it is locked, because another process would remove a folder with an unlocked lock file.
            unlocked = self.path / f"{_LOCK}.new"
            self._lock = unlocked.open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unlocked.rename(self.path / _LOCK)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the folder and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def keep(self) -> None:
        """Keep the folder: remove its lock file, so that no process removes the folder."""
        (self.path / _LOCK).unlink(missing_ok=True)
        self._lock.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def _remove_abandoned() -> None:
    """Remove the folders of this user whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            if time.time() - folder.stat().st_mtime > _MAX_CREATION_SECONDS:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
