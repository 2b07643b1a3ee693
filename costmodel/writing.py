"""Atomic writing of files.

**Replacement.**  The content is written to a temporary file in the same folder, which then replaces the target.  So a reader sees
the old or the new content, and a full disk does not damage the old file.  The new file gets the mode of the old one, and its owner
if the system allows that.  Links are followed.  Devices and pipes are written to, not replaced.

**Clean-up.**  A process that is killed while it writes leaves its temporary file behind.  Each writer locks its temporary file; the
next writer into the folder removes the files that are not locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError
from .reading import shown_path

__all__ = ["is_same_file", "write_atomically", "write_document"]

_PREFIX, _SUFFIX = ".autoddl-", ".part"  # without the target's name, which may have the maximum length of a file name


def write_document(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write a JSON document atomically, with one value per line.

    Raises:
        UserError: the path cannot be written to.
    """
    write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically.

    Args:
        path: of the file.
        content: bytes, or text to encode as UTF-8; surrogates, which file names may contain, are written as escapes.

    Raises:
        UserError: the path cannot be written to.
    """
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    try:
        old = _status(Path(path))
        if old is None or stat.S_ISREG(old.st_mode):
            _replace(Path(os.path.realpath(path)), old, data)
        else:
            with open(path, "wb") as file:  # raises if it is a folder
                file.write(data)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{shown_path(path)}: cannot be written ({reason})") from None


def is_same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths name the same file, which need not exist; symbolic and hard links are followed."""
    try:
        if os.path.exists(one) and os.path.exists(other):
            return os.path.samefile(one, other)
        return os.path.realpath(one) == os.path.realpath(other)
    except (OSError, ValueError):
        return False


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _replace(target: Path, old: os.stat_result | None, data: bytes) -> None:
    _sweep(target.parent)
    # The new file must not be readable for users who cannot read the old one, also before its mode is set.
    with _part(target.parent, 0o666 if old is None else 0o600) as (handle, part):
        with open(handle, "wb", closefd=False) as file:
            file.write(data)
        if old is not None:
            with contextlib.suppress(PermissionError):  # only root can change the owner
                os.fchown(handle, old.st_uid, old.st_gid)
            os.fchmod(handle, stat.S_IMODE(old.st_mode))
        os.fsync(handle)
        os.replace(part, target)


@contextlib.contextmanager
def _part(folder: Path, mode: int) -> Iterator[tuple[int, Path]]:
    """A new locked temporary file; it is removed unless it was moved."""
    while True:
        part = folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with contextlib.suppress(
                OSError
            ):  # some network file systems have no locks; _sweep cannot lock there either
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_at(handle, part):  # another writer removed it before it was locked
                continue
            try:
                yield handle, part
            finally:
                part.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    found = _status(path)
    return found is not None and os.path.samestat(os.fstat(handle), found)


def _sweep(folder: Path) -> None:
    """Remove the temporary files of killed writers from a folder."""
    for part in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            handle = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(handle)
