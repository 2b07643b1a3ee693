"""Processes that a test knows by their numbers: whether they still run, and who started them."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["is_running", "parent"]


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for the system's first process to take its exit code."""
    with contextlib.suppress(OSError):
        return _status(pid)[0] not in "ZX"
    return False


def parent(pid: int) -> int:
    """The process that started a process, or has taken it over."""
    return int(_status(pid)[1])


def _status(pid: int) -> list[str]:
    """State, parent and more; the command's name before them may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
