"""The processes of ranks, seen from outside: their environment, their port, their state, and their end.

The launcher's child is the rank's `keeper`, which ends as the rank does, after all descendants of the rank. Both lead sessions of
their own, so that Ctrl-C reaches only the launcher. A keeper that has ended stays a zombie until `reap`: until then its process
number cannot be reused.
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

from .connections import connections, port_of
from .descendants import is_stopped
from .failures import RankFailure, last_position
from .messages import MessageReader, write_message
from .rank import RankOptions

__all__ = ["LOG_TAIL_BYTES", "RankProcess", "is_listening", "rank_environment", "reserve_port", "share_of_cores"]

_START = (
    "import json, sys; paths, options = sys.argv[1:]; sys.argv[1:] = []; sys.path[:] = json.loads(paths); "
    "from autoddl.pipelines.runtime.ranks.keeper import keep; "
    "keep(*(json.loads(options)[name] for name in ('read_fd', 'write_fd', 'launcher_timeout_s'))); "
    "from autoddl.pipelines.runtime.ranks.rank import main; main(options)"
)
# A rank whose process is in state T for this long has been stopped by a signal.
_STOPPED_SECONDS = 3.0
_SEND_SECONDS = 10.0  # how long a rank may leave messages unread before the next one is dropped
_REAP_SECONDS = 10.0  # how long a killed process may take to exit
#: How much of the end of a log is examined after a rank's death.
LOG_TAIL_BYTES = 20_000


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
    """Environment variables of one rank, which identify it and make ranks fast, deterministic and quick to give up.

    - One thread per rank for BLAS and OpenMP: ranks share the machine's cores, and sums keep their order.
    - Freed memory stays with the process: otherwise every large message pays for its page faults (twice the time at 64 MB).
    - OneFlow gives up communication that another rank does not join after ``stall_timeout_s``.

    Args:
        rank: of the process.
        num_ranks: of the job.
        port: at which rank 0 listens.
        stall_timeout_s: rounded to seconds, at least 1.
        overrides: additional variables, which take precedence.
        address: at which rank 0 listens.
        local_rank: of the process among those of its host; by default ``rank``, for a job on one host.
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
    """The cores of a rank on a machine that runs nothing but the ranks: equal shares, with as few ranks per core as possible.

    Threads of OneFlow that wait for others spin. If they migrate between cores they take time from the other ranks' work at
    random: on 2 cores, steps of 2 ranks took 0.16 to 0.57 s, and 0.17 to 0.33 s with a core for each. (For several ranks on one
    core, see `turns`.)
    """
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // num_ranks)
    first = rank * size % len(cores)
    return tuple(cores[first : first + size])


def reserve_port(address: str = "127.0.0.1") -> socket.socket:
    """A socket that holds a free port of ``address`` (of all addresses of this host if it is "") without listening on it.

    While it is open the kernel gives the port to no other process, but OneFlow's server can bind it, since both allow the port
    to be reused.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((address, 0))
    return holder


def is_listening(pid: int | None, port: int) -> bool:
    """Whether any process in the network namespace of process ``pid`` listens on ``port``; nothing is sent."""
    if pid is None:  # it is just starting
        return False
    return any(one.is_listening and port_of(one.here) == port for one in connections(pid))


@dataclass
class RankProcess:
    """One rank's process.

    Attributes:
        rank: of the job.
        log: file with its output.
        keeper: its keeper, a child of this process.
        to_rank: pipe to the rank.
        from_rank: pipe from the rank.
        pid: process of the rank; None until it reports it.
        inbox: messages received in part.
        stopped_since: when it was first seen suspended; None if it is not.
    """

    rank: int
    log: Path
    keeper: subprocess.Popen
    to_rank: int
    from_rank: int
    pid: int | None = None
    inbox: MessageReader = field(default_factory=MessageReader)
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
        """Start a rank.

        Args:
            rank: of the process.
            num_ranks: of the job.
            log: file for its output.
            environment: all its environment variables.
            private_network: see `RankOptions`.
            with_oneflow: whether it loads OneFlow.
            shows_output: whether its standard output goes to this process's instead of ``log``.
            directory: its working directory; None: that of this process.
            cores: cores that it may use; empty: all.
            launcher_timeout_s: how long this process may be suspended before the rank is ended; 0: forever.
        """
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
        """Send a short message. It is dropped if the rank has died or does not read, which is noticed elsewhere."""
        with contextlib.suppress(BrokenPipeError, TimeoutError):
            write_message(self.to_rank, (kind, value), patience_s=_SEND_SECONDS)

    def death(self) -> RankFailure | None:
        """Why the rank ended; None while it lives. Its keeper is not reaped."""
        ended = os.waitid(os.P_PID, self.keeper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        by_signal = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        number, code = (ended.si_status, 0) if by_signal else (0, ended.si_status)
        return RankFailure.of_death(self.rank, number, code, self.log_tail())

    def is_stopped(self) -> bool:
        """Whether the rank or its keeper is suspended."""
        return (self.pid is not None and is_stopped(self.pid)) or is_stopped(self.keeper.pid)

    def is_stopped_for_long(self) -> bool:
        """Whether the process has been suspended for some seconds; to be called regularly."""
        if not self.is_stopped():
            self.stopped_since = None
            return False
        now = time.monotonic()
        if self.stopped_since is None:
            self.stopped_since = now
        return now - self.stopped_since >= _STOPPED_SECONDS

    def log_tail(self) -> str:
        """The end of the log."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")

    def ask_position(self) -> int:
        """Let the rank write the stacks of its threads to its log; returns the offset at which they will begin."""
        before = self.log.stat().st_size
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)  # faulthandler writes all stacks
        return before

    def position(self, asked_at: int) -> str:
        """The position of the rank's main thread in the user's code; "" if the stacks are not (completely) written yet.

        Args:
            asked_at: result of `ask_position`.
        """
        with self.log.open("rb") as file:
            file.seek(asked_at)
            dump = file.read().decode(errors="replace")
        is_whole = dump.endswith((" in <module>\n", "  ...\n"))  # end of the main thread, which comes last
        return last_position(dump) if is_whole else ""

    def signal(self, number: int) -> None:
        """Send a signal to the rank and its process group."""
        if self.pid is not None and self.death() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill_keeper(self) -> None:
        """Kill the keeper, after all its descendants (`end_descendants`); a rank that is still left ends with it."""
        if self.keeper.returncode is None:  # the number of a reaped process may have been reused
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.keeper.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for the killed process, and close its pipes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.keeper.wait(_REAP_SECONDS)
        for fd in (self.to_rank, self.from_rank):
            with contextlib.suppress(OSError):
                os.close(fd)
