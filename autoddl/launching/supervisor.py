"""What runs on each host of a job: it starts the host's ranks, watches them, tells the launcher, and ends them.

It is started once per host (over ssh, or directly on the launching machine) and talks over its standard input and output
(:mod:`.lines`):

    launcher                                        supervisor
    look {directory, files}                         facts {...}
    reserve {}                                      reserved {port}
    start {ranks: environments, ...}                listening {} once rank 0 does, where that is here
    load {}                                         ready {rank}
    run {script, arguments}                         output {rank, text} ..., done {rank} or failed {rank, kind, text, refused}
    alive {} (now and then); signal {number}; where {}      positions {suspended, positions}
    exit {} (ranks are idle) or kill {}             ended {}

**Ending.** When the launcher goes away, or nothing has been heard of it for ``SILENCE_SECONDS`` (the network may be gone, of
which sshd knows nothing), or a remote supervisor is asked to end by a signal, it kills all ranks and what they started. Should
it be killed itself, the ranks notice (see `autoddl.pipelines.runtime.rank`). On the launching machine signals are the
launcher's to act on: Slurm sends them to every process of a step.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import queue
import select
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoddl.pipelines.runtime.failures import RankFailure
from autoddl.pipelines.runtime.localranks import LocalRanks
from autoddl.pipelines.runtime.processes import is_listening, rank_environment, reserve_port, share_of_cores
from autoddl.pipelines.runtime.rank import write_job
from autoddl.pipelines.runtime.workfolders import WorkFolder

from .facts import gather_facts
from .lines import LineReader, Message, write_line

__all__ = ["SILENCE_SECONDS", "main"]

SILENCE_SECONDS = 60.0
_TICK_SECONDS = 0.05
_EXIT_SECONDS = 3.0  # how long idle ranks may take to leave
_OUTPUT_BYTES = 1 << 18  # at a time


def main(*, is_remote: bool, silence_s: float = SILENCE_SECONDS) -> None:
    """Be a supervisor on standard input and output; does not return."""
    commands_fd, events_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # neither ranks nor libraries may touch the conversation
    os.dup2(2, 1)
    os.close(null)
    supervisor = _Supervisor(events_fd, is_remote)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _abandoning(supervisor) if is_remote else _passing)
    threading.Thread(target=_listen, args=(commands_fd, supervisor, silence_s), daemon=True).start()
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
    return lambda number, frame: supervisor.abandon()


def _passing(number: int, frame: Any) -> None:
    """Let a signal pass. (To ignore it would make the ranks ignore it too.)"""


def _listen(fd: int, supervisor: _Supervisor, silence_s: float) -> None:
    """Pass on what the launcher says; when it is gone or silent, end everything at once, whatever the main thread waits for."""
    reader = LineReader()
    while True:
        heard, _, _ = select.select([fd], [], [], silence_s)
        piece = os.read(fd, 1 << 16) if heard else b""
        if not piece:
            supervisor.abandon()
        for message in reader.feed(piece):
            supervisor.commands.put(message)


class _Supervisor:
    def __init__(self, events_fd: int, is_remote: bool) -> None:
        self.commands: queue.Queue[Message] = queue.Queue()
        self._is_remote = is_remote
        self._events_fd = events_fd
        self._work_folder = WorkFolder("host")
        self._directory = self._work_folder.path
        self._ranks = LocalRanks()
        self._logs: dict[int, _LogTail] = {}
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
        write_line(self._events_fd, {"kind": kind, **values})

    def _do_alive(self) -> None:
        """Having been said is all."""

    def _do_look(self, directory: str, files: list[str]) -> None:
        self._tell("facts", facts=gather_facts(directory, files).document())

    def _do_reserve(self) -> None:
        # Others need not even see it; remote ranks meet at an address that is not known here.
        self._holder = reserve_port("" if self._is_remote else "127.0.0.1")
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
            log = self._directory / f"rank{rank}.log"
            self._ranks.start(
                rank,
                num_ranks,
                log,
                rank_environment(
                    rank, num_ranks, port, stall_timeout_s, environment, address=address, local_rank=local_rank
                ),
                with_oneflow=with_oneflow,
                directory=Path(directory),
                cores=share_of_cores(number, len(ranks)),
            )
            self._logs[rank] = _LogTail(log)
        if 0 in ranks and with_oneflow and num_ranks > 1:
            self._awaited_port = port

    def _do_load(self) -> None:
        for process in self._ranks:
            if process.rank > 0:
                process.send("load")

    def _do_run(self, script: str, arguments: list[str], together: bool) -> None:
        target = "autoddl.pipelines.runtime.rank:" + ("run_script_together" if together else "run_script")
        for process in self._ranks:
            job = self._directory / f"job{process.rank}.pickle"
            write_job(job, target, (script, arguments))
            process.send("job", str(job))

    def _do_signal(self, number: int) -> None:
        for process in self._ranks:
            if process.death() is None:
                os.killpg(process.process.pid, number)

    def _do_where(self) -> None:
        suspended = self._ranks.suspended()
        positions = self._ranks.positions() if suspended is None else {}
        self._tell(
            "positions",
            suspended=None if suspended is None else suspended.rank,
            positions=[[rank, position] for rank, position in positions.items()],
        )

    def _do_exit(self) -> bool:
        self._ranks.leave(_EXIT_SECONDS)
        return self._do_kill()

    def _do_kill(self) -> bool:
        self._ranks.end()
        self._tell_output(final=True)
        self._tell("ended")
        return True

    # ---- Watching ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        messages, failures = self._ranks.look(0)
        if self._awaited_port is not None and is_listening(self._ranks.of(0).process.pid, self._awaited_port):
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
        )

    def _tell_output(self, final: bool = False) -> None:
        """Pass on what ranks wrote: a piece of each, for other things have to be seen to as well; at the end all of it."""
        for rank, log in self._logs.items():
            while text := log.read(final):
                self._tell("output", rank=rank, text=text)
                if not final:
                    break

    # ---- Ending -----------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """End the ranks and this process at once; from any thread, at any moment."""
        self._ranks.kill()
        self.clean()
        os._exit(1)

    def clean(self) -> None:
        """Leave nothing behind."""
        self._ranks.kill()
        self._work_folder.remove()


class _LogTail:
    """What a growing file has got since it was last looked at, as text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, final: bool) -> str:
        """The next piece; "" where there is none yet, or (``final``) none any more."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            piece = file.read(_OUTPUT_BYTES)
        self._offset += len(piece)
        return self._decoder.decode(piece, final and len(piece) < _OUTPUT_BYTES)
