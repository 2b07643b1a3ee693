"""Finds all descendants of a process in /proc, and kills them.

A child that calls ``setsid`` leaves the process group, but remains in the tree of processes. An orphan below a sub-reaper (see
`keeper`) becomes a child of the sub-reaper. If the sub-reaper has been killed, descendants are recognised by a mark in their
environment, which they have inherited.
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
_ENDED_STATES = "ZX"  # zombie, dead
_PAUSE_SECONDS = 0.005


def become_subreaper() -> None:
    """Make this process, instead of init, the parent of orphans below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Make the system kill this process when its parent, process ``parent``, exits. Exit now if the parent has already exited."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def is_stopped(pid: int) -> bool:
    """Return whether a process is suspended."""
    status = _state_and_parent(pid)
    return status is not None and status[0] in "Tt"


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    """Return the state and the parent of a process, or None if there is no such process."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return state, int(parent)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(roots: Collection[int], mark: str = "") -> set[int]:
    """Return the running descendants of ``roots``, and the running processes with ``mark`` in their environment.

    Args:
        roots: Processes. The result does not contain them.
        mark: An environment variable, ``NAME=VALUE``; "" for none.
    """
    children: dict[int, list[int]] = {}
    running = set()
    for pid in _all_pids():
        status = _state_and_parent(pid)
        if status is not None:
            state, parent = status
            children.setdefault(parent, []).append(pid)
            if state not in _ENDED_STATES:
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
    """Kill all processes that `descendants` finds, repeatedly, until it finds none.

    The roots are not killed. While they run, processes that are orphaned meanwhile become their children, and the next search finds
    them.

    Args:
        roots: Processes whose descendants are killed.
        patience_s: Longest time to try [s].
        mark: See `descendants`.

    Returns:
        The processes that still run after ``patience_s``.
    """
    deadline = time.monotonic() + patience_s
    while remaining := descendants(roots, mark):
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return remaining
        time.sleep(_PAUSE_SECONDS)
    return set()
