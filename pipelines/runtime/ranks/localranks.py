"""The processes of the ranks of a job on this machine: starts, polls and ends them. The caller sends them their jobs.

`launcher.RankPool` uses this module for jobs on this machine. A supervisor of ``autoddl launch`` uses it for the ranks of its host.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .descendants import end_descendants
from .failures import FailureKind, RankFailure
from .processes import RankProcess

__all__ = ["LocalRanks", "RankMessage"]

#: Rank, kind and value of a message; `rank` lists the kinds.
RankMessage = tuple[int, str, Any]

_POSITION_SECONDS = (
    2.0  # longest time that ranks may take to report their positions; a rank inside OneFlow never reports
)
_KILL_SECONDS = 5.0  # longest time that the system may take to remove killed processes
_MARK = "AUTODDL_STARTED_BY"  # in the environment of ranks and of all their descendants


class LocalRanks:
    """The ranks of a job on this machine, in the order of their start.

    Args:
        launcher_timeout_s: Longest time [s] that this process may be suspended before its ranks end; 0: no limit.
    """

    def __init__(self, launcher_timeout_s: float = 0.0) -> None:
        self._launcher_timeout_s = launcher_timeout_s
        self._mark = f"{os.getpid()}-{os.urandom(8).hex()}"
        self._ranks: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def of(self, rank: int) -> RankProcess:
        """Return the process of a rank."""
        return next(process for process in self._ranks if process.rank == rank)

    def start(
        self,
        rank: int,
        num_ranks: int,
        log: Path,
        environment: Mapping[str, str],
        *,
        private_network: int = 0,
        with_oneflow: bool = True,
        shows_output: bool = False,
        directory: Path | None = None,
        cores: Sequence[int] = (),
    ) -> RankProcess:
        """Start a rank; see `RankProcess.start`."""
        process = RankProcess.start(
            rank,
            num_ranks,
            log,
            {**environment, _MARK: self._mark},
            private_network,
            with_oneflow,
            shows_output,
            directory,
            cores,
            self._launcher_timeout_s,
        )
        self._ranks.append(process)
        os.set_blocking(process.from_rank, False)
        self._selector.register(process.from_rank, selectors.EVENT_READ, process)
        return process

    def poll(self, patience_s: float) -> tuple[list[RankMessage], list[RankFailure]]:
        """Wait for messages, at most ``patience_s`` seconds.

        Returns:
            The messages and the failures of all ranks. Every call returns the failures that last, such as a death.
        """
        messages: list[RankMessage] = []
        failures: list[RankFailure] = []
        dead = {rank.rank: failure for rank in self._ranks if (failure := rank.death())}  # before reading the pipes
        for key, _ in self._selector.select(0 if dead else patience_s):
            rank: RankProcess = key.data
            for kind, value in self._read(rank):
                if kind == "raised":
                    failures.append(RankFailure.of_exception(rank.rank, *value))
                elif kind == "pid":
                    rank.pid = value
                else:
                    messages.append((rank.rank, kind, value))
        failures += dead.values()
        for rank in self._ranks:
            if rank.is_stopped_for_long():
                failures.append(_stopped(rank))
        return messages, failures

    def _read(self, rank: RankProcess) -> list[tuple[str, Any]]:
        messages: list[tuple[str, Any]] = []
        while True:
            try:
                piece = os.read(rank.from_rank, 1 << 20)
            except BlockingIOError:
                return messages
            if not piece:  # the process is ending
                self._selector.unregister(rank.from_rank)
                return messages
            messages += rank.inbox.feed(piece)

    def suspended(self) -> RankFailure | None:
        """Return the failure of a suspended rank, for which other ranks may wait; None if no rank is suspended."""
        return next((_stopped(rank) for rank in self._living() if rank.is_stopped()), None)

    def positions(self) -> dict[int, str]:
        """Return the positions in the user's code of all running ranks that report them in time."""
        asked = {rank.rank: (rank, rank.ask_position()) for rank in self._living()}
        positions: dict[int, str] = {}
        deadline = time.monotonic() + _POSITION_SECONDS
        while len(positions) < len(asked) and time.monotonic() < deadline:
            time.sleep(0.05)
            positions = {
                number: text for number, (rank, asked_at) in asked.items() if (text := rank.position(asked_at))
            }
        return positions

    def _living(self) -> Sequence[RankProcess]:
        return [rank for rank in self._ranks if rank.death() is None]

    def part(self) -> None:
        """Make idle ranks stop using OneFlow's network. Each rank sends "parted" when it has stopped.

        All ranks of the job must have stopped before any of them exits.
        """
        for rank in self._ranks:
            rank.send("part")

    def leave(self, patience_s: float) -> None:
        """Make idle ranks exit by themselves, and wait for at most ``patience_s`` seconds."""
        for rank in self._ranks:
            rank.send("exit")
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(rank.death() is None for rank in self._ranks):
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill all ranks and all their descendants."""
        keepers = [rank.keeper.pid for rank in self._ranks if rank.keeper.returncode is None]
        if keepers:
            end_descendants(keepers, _KILL_SECONDS, f"{_MARK}={self._mark}")
        for rank in self._ranks:
            rank.kill_keeper()

    def end(self) -> None:
        """Kill and reap all ranks."""
        self.kill()
        for rank in self._ranks:
            with contextlib.suppress(KeyError):
                self._selector.unregister(rank.from_rank)
            rank.reap()
        self._selector.close()


def _stopped(rank: RankProcess) -> RankFailure:
    return RankFailure(rank.rank, FailureKind.STOPPED, "is stopped, as by SIGSTOP")
