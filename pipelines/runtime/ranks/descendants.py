"""Finding all descendants of a process in /proc, and killing them.

A child that calls ``setsid`` or whose parent has exited leaves the process group, but not the tree: below a sub-reaper (see
`keeper`) an orphan becomes the sub-reaper's child. If the sub-reaper was killed and the tree is broken, descendants are recognised
by a mark in the environment that they inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

__all__ = ["become_subreaper", "descendants", "die_with_parent", "end_descendants", "is_stopped"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDED = "ZX"  # states of processes of which only the exit code is left
_PAUSE_SECONDS = 0.005


def become_subreaper() -> None:
    """Make this process, instead of init, the parent of orphans below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent, process ``parent``, exits; at once if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def is_stopped(pid: int) -> bool:
    """Whether a process is suspended."""
    found = _status(pid)
    return found is not None and found[0] in "Tt"


def _status(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None if there is no such process."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return state, int(parent)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(roots: Collection[int], mark: str = "") -> set[int]:
    """The running processes below ``roots``, and those with ``mark`` (``NAME=VALUE``) in their environment; without the roots."""
    children: dict[int, list[int]] = {}
    running = set()
    for pid in _all_pids():
        found = _status(pid)
        if found is not None:
            children.setdefault(found[1], []).append(pid)
            if found[0] not in _ENDED:
                running.add(pid)
    below: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in below:
                below.add(child)
                waiting.append(child)
    if mark:
        below |= {pid for pid in running if _has_mark(pid, mark.encode())}
    return (below & running) - set(roots) - {os.getpid()}


def _has_mark(pid: int, mark: bytes) -> bool:
    with contextlib.suppress(OSError):  # it has just exited, or belongs to another user
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def end_descendants(roots: Collection[int], patience_s: float, mark: str = "") -> set[int]:
    """Kill everything that `descendants` finds until it finds nothing; returns what is left after ``patience_s``.

    The roots are not killed: as long as they live, processes orphaned meanwhile become their children and are found next time.
    """
    deadline = time.monotonic() + patience_s
    while left := descendants(roots, mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        time.sleep(_PAUSE_SECONDS)
    return set()
