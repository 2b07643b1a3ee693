"""Whether processes that a test knows by their numbers still run."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["is_running"]


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for the system's first process to take its exit code."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
