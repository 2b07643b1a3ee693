"""The process between a launcher and a rank: it keeps together all that the rank starts, and ends it with the rank.

    launcher -> keeper -> rank -> whatever the user's code starts

A keeper is a sub-reaper: a child of the rank that calls ``setsid``, forks twice, or both, stays below it and is found when the rank
has ended, however the rank ended. It is a process of its own because the launcher may be the user's, whose other children are none
of our business, and because the rank runs the user's code, which need not expect to become a parent of orphans.

- The rank ends: the keeper ends all that is left, and then itself in the rank's way, so that the launcher sees the rank's exit code
  or signal.
- The launcher ends, or is suspended for longer than it may be: the keeper ends the rank and all that is left.
- The keeper is killed: the system kills the rank.

It has no part in the conversation between the launcher and the rank.
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

_END_SECONDS = 5.0  # how long killed processes may take to end
_LOOKS_PER_TIMEOUT, _MOST_TICK_SECONDS = 4, 60.0
# What a terminal or a scheduler sends to all processes is the launcher's to act on.
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
    """Fork. Returns in the child, which is to be the rank and leads a session; the parent stays as its keeper.

    Args:
        read_fd: the pipe from the launcher, which closes with it; ``write_fd`` the one to it.
        launcher_timeout_s: how long the launcher may be suspended before the rank is ended; for ever if 0.
    """
    become_subreaper()
    keeper = os.getpid()
    rank = os.fork()
    if rank > 0:
        try:
            os.close(write_fd)  # the launcher is to notice when the rank closes it
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
        poll.register(self._read_fd, 0)  # no events but POLLHUP and POLLERR, which always come
        poll.register(self._woken, select.POLLIN)
        tick = None if self._timeout_s == 0 else 1000 * min(self._timeout_s / _LOOKS_PER_TIMEOUT, _MOST_TICK_SECONDS)
        while True:
            status = self._reap()
            if status is not None:
                end_descendants([os.getpid()], _END_SECONDS)
                _end_as(status)
            events = dict(poll.poll(tick))
            if self._read_fd in events or self._launcher_hangs():
                end_descendants([os.getpid()], _END_SECONDS)
                os._exit(1)
            if self._woken in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)

    def _reap(self) -> int | None:
        """Reap whatever has ended; how the rank did, None while it runs."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._rank:
                return status
            if pid == 0:
                return None

    def _launcher_hangs(self) -> bool:
        """Whether the launcher has been suspended for too long."""
        if self._timeout_s == 0 or not is_stopped(self._launcher):
            self._stopped_since = None
            return False
        now = time.monotonic()
        if self._stopped_since is None:
            self._stopped_since = now
        return now - self._stopped_since >= self._timeout_s


def _end_as(status: int) -> NoReturn:
    """End this process with another's exit code, or by the signal that ended the other."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left one, where they are wanted
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))
