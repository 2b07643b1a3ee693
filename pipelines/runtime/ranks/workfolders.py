"""Temporary folders of our own, which do not stay behind when the process that made one is killed.

Each holds a file that its maker keeps locked as long as it lives.  Whoever makes one first removes those of this user's whose lock
nobody holds any more.  A folder that is evidence (the logs of a failed rank) is kept: it loses its lock's file, and is not ours any
longer.
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
_MAKING_SECONDS = 60.0  # an empty folder that is older is no longer being made


class WorkFolder:
    """A folder ``autoddl-PURPOSE-...`` in the system's folder for temporary files, removed when the context ends.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, purpose: str) -> None:
        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-")).resolve()
        try:
            # Under another name until it is locked: nobody may see a lock that nobody holds.
            unlocked = self.path / f"{_LOCK}.new"
            self._lock = unlocked.open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unlocked.rename(self.path / _LOCK)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def keep(self) -> None:
        """Leave the folder to the user, unlocked, for ever."""
        (self.path / _LOCK).unlink(missing_ok=True)
        self._lock.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def _sweep() -> None:
    """Remove the folders of this user's whose makers have gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            if time.time() - folder.stat().st_mtime > _MAKING_SECONDS:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
