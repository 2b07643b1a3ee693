"""Heartbeats: the launcher and the supervisors send them to each other, and either ends the job when the other's stop.

A process that is suspended, or whose host is frozen, keeps its connections open: only its silence shows the failure. Heartbeats
are sent by a thread of their own, so that long work does not delay them, while a suspended process sends none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["DEFAULT_HOST_TIMEOUT_S", "HeartbeatThread", "HeartbeatTimes"]

DEFAULT_HOST_TIMEOUT_S = 30.0
_HEARTBEATS_PER_TIMEOUT = 6
_SUPERVISOR_PATIENCE = 2.0  # longer than the launcher's, which reports the silent host
_RUNNING_PATIENCE = 4.0


@dataclass(frozen=True)
class HeartbeatTimes:
    """Interval and timeouts of a job's heartbeats.

    Attributes:
        host_timeout_s: how long a host may be silent before the launcher gives it up.
    """

    host_timeout_s: float = DEFAULT_HOST_TIMEOUT_S

    @property
    def interval_s(self) -> float:
        """Time between heartbeats."""
        return self.host_timeout_s / _HEARTBEATS_PER_TIMEOUT

    @property
    def launcher_timeout_s(self) -> float:
        """How long the launcher may be silent before a supervisor ends its ranks."""
        return self.host_timeout_s * _SUPERVISOR_PATIENCE

    @property
    def running_timeout_s(self) -> float:
        """How long a host may be silent if its supervisor is not suspended: the machine may be overloaded."""
        return self.host_timeout_s * _RUNNING_PATIENCE


class HeartbeatThread:
    """Calls ``beat`` regularly in a thread, until it is stopped or ``beat`` raises BrokenPipeError."""

    def __init__(self, times: HeartbeatTimes, beat: Callable[[], None]) -> None:
        self._interval_s, self._beat = times.interval_s, beat
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._beat()
            except BrokenPipeError:  # reported where messages are read
                return
