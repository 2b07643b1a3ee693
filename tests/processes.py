"""Processes of tests: how one of ours is started, and, of one known by its number, whether it still runs and who started it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["PATIENCE_S", "START", "is_running", "parent", "wait_until_ended"]

#: The command line of the installed package, for `python -c`, wherever it is started.
START = "import sys; sys.path[:] = [p for p in sys.path if p]; from autoddl.__main__ import main; sys.exit(main())"
PATIENCE_S = 120.0


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for the system's first process to take its exit code."""
    with contextlib.suppress(OSError):
        return _status(pid)[0] not in "ZX"
    return False


def wait_until_ended(pids: Iterable[int]) -> None:
    """Of these processes, whatever they have in their environment."""
    deadline = time.monotonic() + PATIENCE_S
    while left := {pid for pid in pids if is_running(pid)}:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


def parent(pid: int) -> int:
    """The process that started a process, or has taken it over."""
    return int(_status(pid)[1])


def _status(pid: int) -> list[str]:
    """State, parent and more; the command's name before them may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
