"""The processes of ranks, seen from outside: their environment, their port, their state, and their end.

The launcher's child is the rank's `keeper`, which ends as the rank does when nothing is left of what the rank started. Both lead
sessions of their own, so that Ctrl-C reaches the launcher alone. A keeper that has ended stays unreaped (a zombie) until `reap`:
until then its number cannot belong to anybody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .descendants import is_stopped
from .failures import RankFailure, last_position
from .messages import Inbox, write_message
from .rank import RankOptions

__all__ = ["LOG_TAIL_BYTES", "RankProcess", "is_listening", "rank_environment", "reserve_port", "share_of_cores"]

_START = (
    "import json, sys; paths, options = sys.argv[1:]; sys.argv[1:] = []; sys.path[:] = json.loads(paths); "
    "from autoddl.pipelines.runtime.keeper import keep; "
    "keep(*(json.loads(options)[name] for name in ('read_fd', 'write_fd', 'launcher_timeout_s'))); "
    "from autoddl.pipelines.runtime.rank import main; main(options)"
)
# A rank whose process is in state T for this long was stopped by somebody.
_STOPPED_SECONDS = 3.0
_SEND_SECONDS = 10.0  # how long a rank may leave messages unread until the next one is dropped
_REAP_SECONDS = 10.0  # how long a killed process may take to end
LOG_TAIL_BYTES = 20_000
"""How much of the end of a log is looked at after a rank's death."""


def rank_environment(
    rank: int,
    num_ranks: int,
    port: int,
    stall_timeout_s: float,
    overrides: Mapping[str, str],
    *,
    address: str = "127.0.0.1",
    local_rank: int | None = None,
) -> dict[str, str]:
    """Environment variables of one rank: who it is, and what makes ranks fast, deterministic and quick to give up.

    Rank 0 is at ``address`` and ``port``; ``local_rank`` counts the ranks of this host, by default the job is on one host.

    - One thread per rank for BLAS and OpenMP: ranks share the machine's cores, and sums keep their order.
    - Freed memory stays with the process: else every large message pays for its page faults (twice the time at 64 MB).
    - OneFlow gives up on communication that another rank does not join after ``stall_timeout_s``.
    """
    environment = dict(os.environ)
    environment.update(
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        WORLD_SIZE=str(num_ranks),
        RANK=str(rank),
        LOCAL_RANK=str(rank if local_rank is None else local_rank),
        ONEFLOW_TIMEOUT_SECONDS=str(max(1, round(stall_timeout_s))),
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        MALLOC_MMAP_THRESHOLD_=str(4 << 30),
        MALLOC_TRIM_THRESHOLD_=str(16 << 30),
        MALLOC_TOP_PAD_=str(64 << 20),
        PYTHONHASHSEED="0",
        GLOG_minloglevel="2",
    )
    environment.update(overrides)
    return environment


def share_of_cores(rank: int, num_ranks: int) -> tuple[int, ...]:
    """The cores of a rank on a machine that ranks have for themselves: equal shares, or as few ranks to a core as can be.

    Threads of OneFlow that wait for others spin. Where they roam they take time from the other ranks' work, now here and now
    there: on 2 cores steps of 2 ranks took 0.16 to 0.57 s, and 0.17 to 0.33 s with a core for each. (How those on one core share
    it, see `turns`.)
    """
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // num_ranks)
    first = rank * size % len(cores)
    return tuple(cores[first : first + size])


def reserve_port(address: str = "127.0.0.1") -> socket.socket:
    """A socket that holds a free port of ``address`` (of all of this host's where it is "") without listening on it.

    As long as it is open the kernel gives the port to nobody else; OneFlow's server can bind it all the same, since both
    allow the port to be reused.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((address, 0))
    return holder


def is_listening(pid: int | None, port: int) -> bool:
    """Whether somebody in the network namespace of process ``pid`` listens on ``port``; nothing is sent to find out."""
    if pid is None:  # it is just starting
        return False
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
    return False


@dataclass
class RankProcess:
    """One rank's process, its keeper (our child), its pipes and its log. ``pid`` is the rank's, known once it says so."""

    rank: int
    log: Path
    keeper: subprocess.Popen
    to_rank: int
    from_rank: int
    pid: int | None = None
    inbox: Inbox = field(default_factory=Inbox)
    stopped_since: float | None = None

    @staticmethod
    def start(
        rank: int,
        num_ranks: int,
        log: Path,
        environment: Mapping[str, str],
        private_network: int,
        with_oneflow: bool,
        shows_output: bool,
        directory: Path | None = None,
        cores: Sequence[int] = (),
        launcher_timeout_s: float = 0.0,
    ) -> RankProcess:
        """Start a rank, in ``directory`` and on ``cores`` where they are given; its output goes to ``log``, its standard output to
        the launcher's own if ``shows_output``. It ends when this process is suspended for longer than ``launcher_timeout_s``,
        unless that is 0."""
        rank_end, to_rank = os.pipe()
        from_rank, launcher_end = os.pipe()
        os.set_blocking(to_rank, False)
        options = RankOptions(
            rank, num_ranks, rank_end, launcher_end, private_network, with_oneflow, tuple(cores), launcher_timeout_s
        )
        try:
            with log.open("ab") as output:
                keeper = subprocess.Popen(
                    [sys.executable, "-u", "-c", _START, json.dumps(sys.path), options.to_json()],
                    stdin=subprocess.DEVNULL,
                    stdout=None if shows_output else output,
                    stderr=output,
                    env=environment,
                    cwd=directory,
                    pass_fds=(rank_end, launcher_end),
                    start_new_session=True,
                )
        except BaseException:
            os.close(to_rank)
            os.close(from_rank)
            raise
        finally:
            os.close(rank_end)
            os.close(launcher_end)
        return RankProcess(rank, log, keeper, to_rank, from_rank)

    def send(self, kind: str, value: object = None) -> None:
        """Send a short message; one to a rank that has died or does not read is dropped, since that is noticed elsewhere."""
        with contextlib.suppress(BrokenPipeError, TimeoutError):
            write_message(self.to_rank, (kind, value), patience_s=_SEND_SECONDS)

    def death(self) -> RankFailure | None:
        """Why the rank ended, None while it lives; its keeper is not reaped."""
        ended = os.waitid(os.P_PID, self.keeper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        by_signal = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        number, code = (ended.si_status, 0) if by_signal else (0, ended.si_status)
        return RankFailure.of_death(self.rank, number, code, self.log_tail())

    def is_stopped(self) -> bool:
        """Whether the rank, or its keeper, is suspended at this moment."""
        return (self.pid is not None and is_stopped(self.pid)) or is_stopped(self.keeper.pid)

    def stopped_for_long(self) -> bool:
        """Whether the process has been suspended for some seconds; to be asked regularly."""
        if not self.is_stopped():
            self.stopped_since = None
            return False
        now = time.monotonic()
        if self.stopped_since is None:
            self.stopped_since = now
        return now - self.stopped_since >= _STOPPED_SECONDS

    def log_tail(self) -> str:
        """The last part of the log."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")

    def ask_position(self) -> int:
        """Have the rank write into its log where its threads stand; where in the log that will begin."""
        before = self.log.stat().st_size
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)  # faulthandler writes all stacks
        return before

    def position(self, asked_at: int) -> str:
        """Where the rank's main thread stands in the user's code; "" where it does not say, or has not said all of it yet.

        Args:
            asked_at: what `ask_position` gave.
        """
        with self.log.open("rb") as file:
            file.seek(asked_at)
            dump = file.read().decode(errors="replace")
        is_whole = dump.endswith((" in <module>\n", "  ...\n"))  # of the main thread, which comes last
        return last_position(dump) if is_whole else ""

    def signal(self, number: int) -> None:
        """Send a signal to the rank and its process group."""
        if self.pid is not None and self.death() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill_keeper(self) -> None:
        """End the keeper, below which nothing may be left (`end_descendants`); a rank that is left all the same ends with it."""
        if self.keeper.returncode is None:  # the number of a reaped process may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.keeper.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for the killed process, and close its pipes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.keeper.wait(_REAP_SECONDS)
        for fd in (self.to_rank, self.from_rank):
            with contextlib.suppress(OSError):
                os.close(fd)
