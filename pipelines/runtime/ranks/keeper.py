"""The keeper: a process between the launcher and a rank, which ends all processes that the rank has started when the rank ends.

    launcher -> keeper -> rank -> processes started by the user's code

A keeper is a sub-reaper: descendants of the rank that call ``setsid`` or fork twice remain descendants of the keeper, and are found
after the rank has ended. The keeper is a separate process because the launcher may be the user's process, which has other children,
and because the rank runs the user's code, which may not expect orphans as its children.

- If the rank ends, the keeper kills the remaining descendants. Then it ends with the exit code or the signal of the rank, which the
  launcher sees.
- If the launcher ends, or is suspended for longer than its timeout, the keeper kills the rank and all descendants.
- If the keeper is killed, the system kills the rank.

The keeper does not read the messages between the launcher and the rank.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from typing import NoReturn

from .descendants import become_subreaper, die_with_parent, end_descendants, is_stopped
from .messages import write_message

__all__ = ["keep"]

_END_SECONDS = 5.0  # how long killed processes may take to exit
_CHECKS_PER_TIMEOUT, _MAX_TICK_SECONDS = 4, 60.0
# Signals that a terminal or a scheduler sends to all processes are handled by the launcher.
_IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)


def keep(read_fd: int, write_fd: int, launcher_timeout_s: float = 0.0) -> None:
    """Fork into a keeper and a rank. Returns only in the child, which becomes the rank and leads a new session.

    Args:
        read_fd: Pipe from the launcher. It is closed when the launcher exits.
        write_fd: Pipe to the launcher.
        launcher_timeout_s: Longest time [s] that the launcher may be suspended before the rank is ended; 0: no limit.
    """
    become_subreaper()
    keeper = os.getpid()
    rank = os.fork()
    if rank > 0:
        try:
            os.close(write_fd)  # so that the launcher notices when the rank closes it
            _Keeper(rank, read_fd, launcher_timeout_s).keep()
        finally:
            os._exit(1)
    os.setsid()
    die_with_parent(keeper)
    write_message(write_fd, ("pid", os.getpid()))


class _Keeper:
    def __init__(self, rank: int, read_fd: int, launcher_timeout_s: float) -> None:
        self._rank, self._read_fd, self._timeout_s = rank, read_fd, launcher_timeout_s
        self._launcher = os.getppid()
        self._stopped_since: float | None = None
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        self._woken, wake = os.pipe()
        for fd in (self._woken, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def keep(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._read_fd, 0)  # only POLLHUP and POLLERR, which are always reported
        poll.register(self._woken, select.POLLIN)
        tick = None if self._timeout_s == 0 else 1000 * min(self._timeout_s / _CHECKS_PER_TIMEOUT, _MAX_TICK_SECONDS)
        while True:
            status = self._reap()
            if status is not None:
                end_descendants([os.getpid()], _END_SECONDS)
                _end_as(status)
            events = dict(poll.poll(tick))
            if self._read_fd in events or self._is_launcher_stopped():
                end_descendants([os.getpid()], _END_SECONDS)
                os._exit(1)
            if self._woken in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)

    def _reap(self) -> int | None:
        """Reap all children that have ended. Return the rank's status, or None while it runs."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._rank:
                return status
            if pid == 0:
                return None

    def _is_launcher_stopped(self) -> bool:
        """Return whether the launcher has been suspended for longer than its timeout."""
        if self._timeout_s == 0 or not is_stopped(self._launcher):
            self._stopped_since = None
            return False
        now = time.monotonic()
        if self._stopped_since is None:
            self._stopped_since = now
        return now - self._stopped_since >= self._timeout_s


def _end_as(status: int) -> NoReturn:
    """End this process with the exit code or by the signal of ``status``, which is another process's status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has already dumped core
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))
