"""The launcher's view of the processes of ranks: their environment, their port, their state, and their end.

The launcher's child is the rank's `keeper`, which ends like the rank, after all descendants of the rank. Keeper and rank lead
sessions of their own, so that Ctrl-C reaches only the launcher. A keeper that has ended remains a zombie until `RankProcess.reap`,
so that its process number is not reused before.
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
_SEND_SECONDS = 10.0  # longest time to wait until a rank reads a message; then the message is dropped
_REAP_SECONDS = 10.0  # longest time to wait until a killed process has ended
#: Bytes at the end of a log that are examined after a rank has ended.
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
    """Return the environment variables of a rank.

    In addition to the variables that identify the rank, they have these effects:

    - BLAS and OpenMP use one thread per rank, because ranks share the machine's cores, and so that sums keep their order.
    - Freed memory stays with the process. Otherwise every large message costs page faults (twice the time at 64 MB).
    - OneFlow gives up communication that another rank does not join after ``stall_timeout_s``.

    Args:
        rank: Rank of the process.
        num_ranks: Number of ranks of the job.
        port: Port on which rank 0 listens.
        stall_timeout_s: Timeout of communication [s], rounded to seconds, at least 1.
        overrides: Additional variables, which take precedence.
        address: Address on which rank 0 listens.
        local_rank: Index of the process among the ranks of its host. Default: ``rank``, for a job on one host.
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
    """Return the cores of a rank, for a machine that runs only these ranks: equal shares, with as few ranks per core as possible.

    Threads of OneFlow that wait for other ranks spin. If they migrate between cores, they take time from other ranks at random. On
    2 cores, steps of 2 ranks took 0.16 to 0.57 s without fixed cores, and 0.17 to 0.33 s with one core for each rank. (For several
    ranks on one core, see `turns`.)
    """
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // num_ranks)
    first = rank * size % len(cores)
    return tuple(cores[first : first + size])


def reserve_port(address: str = "127.0.0.1") -> socket.socket:
    """Return a socket that is bound to a free port of ``address``, and does not listen. ``""`` means all addresses of this host.

    While the socket is open, the kernel gives the port to no other process. OneFlow's server can still bind the port, since both
    sockets allow it to be reused.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((address, 0))
    return holder


def is_listening(pid: int | None, port: int) -> bool:
    """Return whether any process in the network namespace of process ``pid`` listens on ``port``. Nothing is sent."""
    if pid is None:  # the process has not reported its number yet
        return False
    return any(entry.is_listening and port_of(entry.here) == port for entry in connections(pid))


@dataclass
class RankProcess:
    """The process of one rank.

    Attributes:
        rank: Rank in the job.
        log: File with the output of the rank.
        keeper: The keeper of the rank, a child of this process.
        to_rank: Pipe to the rank.
        from_rank: Pipe from the rank.
        pid: Process number of the rank; None until the rank reports it.
        inbox: Reader of the messages from the rank.
        stopped_since: Time at which the rank was first seen suspended; None if it is not suspended.
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
            rank: Rank of the process.
            num_ranks: Number of ranks of the job.
            log: File for its output.
            environment: All its environment variables.
            private_network: See `RankOptions`.
            with_oneflow: Whether it loads OneFlow.
            shows_output: Whether its standard output goes to the standard output of this process instead of ``log``.
            directory: Its working directory; None: the working directory of this process.
            cores: Cores that it may use; empty: all.
            launcher_timeout_s: Longest time [s] that this process may be suspended before the rank is ended; 0: no limit.
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
        """Send a short message. The message is dropped if the rank has ended or does not read; `death` and polling detect this."""
        with contextlib.suppress(BrokenPipeError, TimeoutError):
            write_message(self.to_rank, (kind, value), patience_s=_SEND_SECONDS)

    def death(self) -> RankFailure | None:
        """Return the failure of a rank that has ended, or None while it runs. Does not reap its keeper."""
        ended = os.waitid(os.P_PID, self.keeper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        by_signal = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        number, code = (ended.si_status, 0) if by_signal else (0, ended.si_status)
        return RankFailure.of_death(self.rank, number, code, self.log_tail())

    def is_stopped(self) -> bool:
        """Return whether the rank or its keeper is suspended."""
        return (self.pid is not None and is_stopped(self.pid)) or is_stopped(self.keeper.pid)

    def is_stopped_for_long(self) -> bool:
        """Return whether the rank has been suspended for at least ``_STOPPED_SECONDS``. Must be called regularly."""
        if not self.is_stopped():
            self.stopped_since = None
            return False
        now = time.monotonic()
        if self.stopped_since is None:
            self.stopped_since = now
        return now - self.stopped_since >= _STOPPED_SECONDS

    def log_tail(self) -> str:
        """Return the last `LOG_TAIL_BYTES` of the log."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")

    def ask_position(self) -> int:
        """Make the rank write the stacks of its threads to its log. Return the offset in the log at which they begin."""
        before = self.log.stat().st_size
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)  # faulthandler writes all stacks
        return before

    def position(self, asked_at: int) -> str:
        """Return the position of the rank's main thread in the user's code, or "" if the stacks are not completely written yet.

        Args:
            asked_at: Result of `ask_position`.
        """
        with self.log.open("rb") as file:
            file.seek(asked_at)
            dump = file.read().decode(errors="replace")
        is_complete = dump.endswith((" in <module>\n", "  ...\n"))  # the end of the main thread, which comes last
        return last_position(dump) if is_complete else ""

    def signal(self, number: int) -> None:
        """Send a signal to the rank and its process group."""
        if self.pid is not None and self.death() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill_keeper(self) -> None:
        """Kill the keeper. Call it after `end_descendants`; a rank that still runs ends with its keeper."""
        if self.keeper.returncode is None:  # the number of a reaped process may have been reused
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.keeper.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for the killed keeper, and close the pipes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.keeper.wait(_REAP_SECONDS)
        for fd in (self.to_rank, self.from_rank):
            with contextlib.suppress(OSError):
                os.close(fd)
