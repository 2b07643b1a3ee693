"""Signs of life: both the launcher and the supervisors of hosts give them, and each ends the job when it misses the other's.

A process that is suspended, or whose host froze, keeps its connections: nothing but its silence tells. The signs come from
threads of their own, so that long work does not delay them, while a suspended process gives none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["DEFAULT_HOST_TIMEOUT_S", "Beats", "Heart"]

DEFAULT_HOST_TIMEOUT_S = 30.0
_BEATS_PER_TIMEOUT = 6
_SUPERVISOR_PATIENCE = 2.0  # the launcher, which can name the silent host, is to be first
_RUNNING_PATIENCE = 4.0


@dataclass(frozen=True)
class Beats:
    """The times of one job.

    Attributes:
        host_timeout_s: how long a host may be silent until the launcher gives it up.
    """

    host_timeout_s: float = DEFAULT_HOST_TIMEOUT_S

    @property
    def interval_s(self) -> float:
        """Between signs of life."""
        return self.host_timeout_s / _BEATS_PER_TIMEOUT

    @property
    def launcher_timeout_s(self) -> float:
        """How long the launcher may be silent until a supervisor ends its ranks."""
        return self.host_timeout_s * _SUPERVISOR_PATIENCE

    @property
    def running_timeout_s(self) -> float:
        """How long a host may be silent whose supervisor is seen not to be suspended: the machine is busy beyond measure."""
        return self.host_timeout_s * _RUNNING_PATIENCE


class Heart:
    """Calls ``beat`` regularly, in a thread, until it is stopped or ``beat`` raises BrokenPipeError."""

    def __init__(self, beats: Beats, beat: Callable[[], None]) -> None:
        self._interval_s, self._beat = beats.interval_s, beat
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
            except BrokenPipeError:  # noticed where messages are read
                return
