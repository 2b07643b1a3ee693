"""What runs on each host of a job: it starts the host's ranks, watches them, tells the launcher, and ends them.

It is started once per host (over ssh, or directly on the launching machine) and talks over its standard input and output
(:mod:`.lines`):

    launcher                                        supervisor
    look {directory, files}                         facts {...}
    reserve {address}                               reserved {port}
    start {ranks: environments, ...}                listening {} once rank 0 does, where that is here
    load {}                                         ready {rank}
    run {script, arguments}                         output {rank, text} ..., done {rank} or failed {rank, kind, text, refused}
    alive {} (regularly)                            alive {} (regularly)
    signal {number}; where {}                       positions {suspended, positions}
    part {} (ranks are idle)                        parted {rank}
    exit {} or kill {}                              ended {}

**Ending.** When the launcher goes away, or nothing has been heard of it for some time (`Beats.launcher_timeout_s`: the network may
be gone, of which sshd knows nothing), or a remote supervisor is asked to end by a signal, it kills all ranks and what they started.
Should it be killed or suspended itself, the ranks' keepers notice (`autoddl.pipelines.runtime.keeper`). On the launching machine
signals are the launcher's to act on: Slurm sends them to every process of a step.

**Disks.** It writes no files. What ranks say waits in memory until the launcher has it.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoddl.pipelines.runtime.descendants import become_subreaper, end_descendants
from autoddl.pipelines.runtime.failures import RankFailure
from autoddl.pipelines.runtime.localranks import LocalRanks
from autoddl.pipelines.runtime.memory_files import MemoryFile
from autoddl.pipelines.runtime.processes import (
    LOG_TAIL_BYTES,
    is_listening,
    rank_environment,
    reserve_port,
    share_of_cores,
)
from autoddl.pipelines.runtime.rank import write_job

from .beats import DEFAULT_HOST_TIMEOUT_S, Beats, Heart
from .facts import gather_facts
from .lines import LineReader, LineSender, Message

__all__ = ["main"]

_TICK_SECONDS = 0.05
_EXIT_SECONDS = 3.0  # how long idle ranks may take to leave
_KILL_SECONDS = 5.0  # how long killed processes may take to end
_OUTPUT_BYTES = 1 << 18  # at a time
_MOST_UNSENT_BYTES = 1 << 20  # output waits for a launcher that has not taken so much yet
_MOST_UNREAD_BYTES = 1 << 28  # of a rank's output, which is in memory
_KEPT_BYTES = 1 << 20  # of what has been sent: the end of the log tells why a rank died, and where it stands
assert _KEPT_BYTES > LOG_TAIL_BYTES


def main(*, is_remote: bool, host_timeout_s: float = DEFAULT_HOST_TIMEOUT_S) -> None:
    """Be a supervisor on standard input and output; does not return.

    Args:
        host_timeout_s: after which silence the launcher gives us up (`Beats`).
    """
    beats = Beats(host_timeout_s)
    become_subreaper()  # should a keeper be killed
    commands_fd, events_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # neither ranks nor libraries may touch the conversation
    os.dup2(2, 1)
    os.close(null)
    supervisor = _Supervisor(events_fd, beats)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _abandoning(supervisor) if is_remote else _passing)
    patience_s = beats.launcher_timeout_s
    threading.Thread(target=_listen, args=(commands_fd, supervisor, patience_s), daemon=True).start()
    Heart(beats, supervisor.beat).start()
    status = 1
    try:
        supervisor.serve()
        status = 0
    except BrokenPipeError:  # the launcher is gone
        pass
    finally:
        supervisor.clean()
        os._exit(status)


def _abandoning(supervisor: _Supervisor) -> Callable[[int, Any], None]:
    return lambda number, frame: supervisor.abandon(f"ended by {signal.Signals(number).name}")


def _passing(number: int, frame: Any) -> None:
    """Let a signal pass. (To ignore it would make the ranks ignore it too.)"""


def _listen(fd: int, supervisor: _Supervisor, silence_s: float) -> None:
    """Pass on what the launcher says; when it is gone or silent, end everything at once, whatever the main thread waits for."""
    reader = LineReader()
    while True:
        heard, _, _ = select.select([fd], [], [], silence_s)
        if not heard:
            supervisor.abandon(f"the launcher has not been heard of for {silence_s:g} s")
        piece = os.read(fd, 1 << 16)
        if not piece:
            supervisor.abandon("the launcher has hung up")
        for message in reader.feed(piece):
            supervisor.commands.put(message)


class _Supervisor:
    def __init__(self, events_fd: int, beats: Beats) -> None:
        self.commands: queue.Queue[Message] = queue.Queue()
        self._events_fd = events_fd
        self._sender = LineSender(events_fd)
        self._ranks = LocalRanks(beats.launcher_timeout_s)
        self._logs: dict[int, _LogTail] = {}
        self._jobs: list[MemoryFile] = []
        self._is_abandoned = False
        self._failed: set[int] = set()
        self._holder: socket.socket | None = None
        self._awaited_port: int | None = None

    # ---- The conversation -------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Do what the launcher asks for until it says that this is all."""
        while True:
            with contextlib.suppress(queue.Empty):
                while message := self.commands.get(timeout=_TICK_SECONDS):
                    if getattr(self, f"_do_{message.pop('do')}")(**message):
                        return
            self._look()

    def _tell(self, kind: str, **values: Any) -> None:
        if not self._is_abandoned:  # the ends of ranks are our own doing then
            self._sender.send({"kind": kind, **values})

    def beat(self) -> None:
        """Tell the launcher that this process runs; from a thread of its own."""
        self._sender.beat()

    def _do_alive(self, **_: Any) -> None:
        """Having been said is all."""

    def _do_look(self, directory: str, files: list[str]) -> None:
        self._tell("facts", facts=gather_facts(directory, files).document())

    def _do_reserve(self, address: str) -> None:
        self._holder = reserve_port(address)
        self._tell("reserved", port=self._holder.getsockname()[1])

    def _do_start(
        self,
        ranks: list[int],
        num_ranks: int,
        address: str,
        port: int,
        directory: str,
        environment: dict[str, str],
        stall_timeout_s: float,
        with_oneflow: bool,
        local_ranks: list[int],
    ) -> None:
        for number, (rank, local_rank) in enumerate(zip(ranks, local_ranks)):
            log = _LogTail()
            self._ranks.start(
                rank,
                num_ranks,
                log.path,
                rank_environment(
                    rank, num_ranks, port, stall_timeout_s, environment, address=address, local_rank=local_rank
                ),
                with_oneflow=with_oneflow,
                directory=Path(directory),
                cores=share_of_cores(number, len(ranks)),
            )
            self._logs[rank] = log
        if 0 in ranks and with_oneflow and num_ranks > 1:
            self._awaited_port = port

    def _do_load(self) -> None:
        for process in self._ranks:
            if process.rank > 0:
                process.send("load")

    def _do_run(self, script: str, arguments: list[str], together: bool) -> None:
        target = "autoddl.pipelines.runtime.rank:" + ("run_script_together" if together else "run_script")
        for process in self._ranks:
            job = MemoryFile()
            self._jobs.append(job)
            write_job(job.path, target, (script, arguments))
            process.send("job", str(job.path))

    def _do_signal(self, number: int) -> None:
        for process in self._ranks:
            process.signal(number)

    def _do_where(self) -> None:
        suspended = self._ranks.suspended()
        positions = self._ranks.positions() if suspended is None else {}
        self._tell(
            "positions",
            suspended=None if suspended is None else suspended.rank,
            positions=[[rank, position] for rank, position in positions.items()],
        )

    def _do_part(self) -> None:
        self._ranks.part()

    def _do_exit(self) -> bool:
        self._ranks.leave(_EXIT_SECONDS)
        return self._do_kill()

    def _do_kill(self) -> bool:
        self._ranks.end()
        self._tell_output(final=True)
        self._tell("ended")
        while not self._sender.flush():  # a launcher that does not read for too long is noticed by `_listen`
            select.select([], [self._events_fd], [], _TICK_SECONDS)
        return True

    # ---- Watching ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._sender.flush()
        messages, failures = self._ranks.look(0)
        if self._awaited_port is not None and is_listening(self._ranks.of(0).pid, self._awaited_port):
            self._awaited_port = None
            self._tell("listening")
            if self._holder is not None:
                self._holder.close()
        self._tell_output()
        for rank, kind, _ in messages:
            self._tell(kind, rank=rank)
        for failure in failures:
            if failure.rank not in self._failed:
                self._failed.add(failure.rank)
                self._tell_failure(failure)

    def _tell_failure(self, failure: RankFailure) -> None:
        self._tell(
            "failed",
            rank=failure.rank,
            failure=int(failure.kind),
            text=failure.text,
            refused=failure.is_user_error,
            position=failure.position,
        )

    def _tell_output(self, final: bool = False) -> None:
        """Pass on what ranks wrote: a piece of each, for other things have to be seen to as well; at the end all of it."""
        if not final and self._sender.num_waiting > _MOST_UNSENT_BYTES:
            return
        for rank, log in self._logs.items():
            while text := log.read(final):
                self._tell("output", rank=rank, text=text)
                if not final:
                    break

    # ---- Ending -----------------------------------------------------------------------------------------------------

    def abandon(self, why: str) -> None:
        """End the ranks and this process at once; from any thread, at any moment."""
        self._is_abandoned = True
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{why}\n")
            sys.stderr.flush()
        self.clean()
        os._exit(1)

    def clean(self) -> None:
        """Leave nothing behind."""
        self._ranks.kill()
        end_descendants([os.getpid()], _KILL_SECONDS)


class _LogTail:
    """What a rank has said since it was last looked at, as text; it is kept in memory until then, and the end of it afterwards."""

    def __init__(self) -> None:
        self._file = MemoryFile()
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def path(self) -> Path:
        """Where the rank writes."""
        return self._file.path

    def read(self, final: bool) -> str:
        """The next piece; "" where there is none yet, or (``final``) none any more."""
        too_many = os.fstat(self._file.fd).st_size - self._offset - _MOST_UNREAD_BYTES
        notice = ""
        if too_many > 0:
            self._offset += too_many
            notice = f"\n[autoddl: {too_many} bytes are left out, which nobody read in time]\n"
        piece = os.pread(self._file.fd, _OUTPUT_BYTES, self._offset)
        self._offset += len(piece)
        self._file.forget(self._offset - _KEPT_BYTES)
        return notice + self._decoder.decode(piece, final and len(piece) < _OUTPUT_BYTES)
