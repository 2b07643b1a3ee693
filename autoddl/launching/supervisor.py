"""The supervisor of a host: starts the host's ranks, watches them, reports to the launcher, and ends them.

It is started once per host (over ssh, or directly on the launching machine) and communicates over its standard input and output
(:mod:`.lines`):

    launcher                                        supervisor
    look {directory, files, on_gpus}                facts {...}
    listen {address}                                probing {port, token, fault}
    probe {source, targets}                         probed {faults}
    reserve {address}                               reserved {port}
    start {ranks: environments, ...}                listening {} once rank 0 does, if it is on this host
    load {}                                         ready {rank}
    run {script, arguments}                         output {rank, text} ..., done {rank} or failed {rank, kind, text, refused}
    alive {} (regularly)                            alive {} (regularly)
    signal {number}; where {}                       positions {suspended, positions}
    part {} (ranks are idle)                        parted {rank}
    exit {} or kill {}                              ended {}

**Ending.** The supervisor kills all ranks and their descendants if the launcher closes the connection, if the launcher has been
silent for `HeartbeatTimes.launcher_timeout_s` (the network may be down without sshd noticing), or if a remote supervisor receives
a signal. If the supervisor itself is killed or suspended, the ranks' keepers notice (`autoddl.pipelines.runtime.ranks.keeper`). On
the launching machine only the launcher acts on signals: Slurm sends them to every process of a step.

**Disks.** It writes no files. The ranks' output is kept in memory until the launcher has it.
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

from autoddl.pipelines.runtime.memory_files import MemoryFile
from autoddl.pipelines.runtime.ranks.descendants import become_subreaper, end_descendants
from autoddl.pipelines.runtime.ranks.failures import RankFailure
from autoddl.pipelines.runtime.ranks.localranks import LocalRanks
from autoddl.pipelines.runtime.ranks.processes import (
    LOG_TAIL_BYTES,
    is_listening,
    rank_environment,
    reserve_port,
    share_of_cores,
)
from autoddl.pipelines.runtime.ranks.rank import write_job

from .facts import gather_facts
from .heartbeat import DEFAULT_HOST_TIMEOUT_S, HeartbeatThread, HeartbeatTimes
from .interfaces import ProbeServer, Target, probe
from .lines import LineReader, LineSender, Message

__all__ = ["main"]

_TICK_SECONDS = 0.05
_EXIT_SECONDS = 3.0  # how long idle ranks may take to leave
_KILL_SECONDS = 5.0  # how long killed processes may take to exit
_OUTPUT_BYTES = 1 << 18  # at a time
_MAX_UNSENT_BYTES = 1 << 20  # no more output is sent while this much is queued
_MAX_UNREAD_BYTES = 1 << 28  # of a rank's output, which is in memory
_KEPT_BYTES = 1 << 20  # of the output already sent: the end of the log shows why a rank died, and where it is
assert _KEPT_BYTES > LOG_TAIL_BYTES


def main(*, is_remote: bool, host_timeout_s: float = DEFAULT_HOST_TIMEOUT_S) -> None:
    """Run a supervisor on standard input and output; does not return.

    Args:
        is_remote: whether it was started over ssh.
        host_timeout_s: silence after which the launcher gives this host up (`HeartbeatTimes`).
    """
    heartbeat = HeartbeatTimes(host_timeout_s)
    become_subreaper()  # adopts ranks whose keeper is killed
    commands_fd, events_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # neither ranks nor libraries may touch the messages
    os.dup2(2, 1)
    os.close(null)
    supervisor = _Supervisor(events_fd, heartbeat)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _abandoning(supervisor) if is_remote else _do_nothing)
    patience_s = heartbeat.launcher_timeout_s
    threading.Thread(target=_listen, args=(commands_fd, supervisor, patience_s), daemon=True).start()
    HeartbeatThread(heartbeat, supervisor.beat).start()
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


def _do_nothing(number: int, frame: Any) -> None:
    """A signal handler without effect. (SIG_IGN would be inherited by the ranks.)"""


def _listen(fd: int, supervisor: _Supervisor, silence_s: float) -> None:
    """Queue the launcher's commands. If it closes the connection or is silent, end everything, whatever the main thread does."""
    reader = LineReader()
    while True:
        heard, _, _ = select.select([fd], [], [], silence_s)
        if not heard:
            supervisor.abandon(f"the launcher has not responded for {silence_s:g} s")
        piece = os.read(fd, 1 << 16)
        if not piece:
            supervisor.abandon("the launcher has closed the connection")
        for message in reader.feed(piece):
            supervisor.commands.put(message)


class _Supervisor:
    def __init__(self, events_fd: int, heartbeat: HeartbeatTimes) -> None:
        self.commands: queue.Queue[Message] = queue.Queue()
        self._events_fd = events_fd
        self._sender = LineSender(events_fd)
        self._ranks = LocalRanks(heartbeat.launcher_timeout_s)
        self._logs: dict[int, _LogTail] = {}
        self._jobs: list[MemoryFile] = []
        self._is_abandoned = False
        self._failed: set[int] = set()
        self._holder: socket.socket | None = None
        self._awaited_port: int | None = None
        self._probe_server: ProbeServer | None = None

    # ---- Messages ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Execute the launcher's commands until the last one."""
        while True:
            with contextlib.suppress(queue.Empty):
                while message := self.commands.get(timeout=_TICK_SECONDS):
                    if getattr(self, f"_do_{message.pop('do')}")(**message):
                        return
            self._watch()

    def _send(self, kind: str, **values: Any) -> None:
        if not self._is_abandoned:  # ranks then end because this process ends them
            self._sender.send({"kind": kind, **values})

    def beat(self) -> None:
        """Send a heartbeat to the launcher; called by a thread of its own."""
        self._sender.beat()

    def _do_alive(self, **_: Any) -> None:
        """A heartbeat needs no answer."""

    def _do_look(self, directory: str, files: list[str], on_gpus: bool = False) -> None:
        self._send("facts", facts=gather_facts(directory, files, on_gpus=on_gpus).document())

    def _do_listen(self, address: str) -> None:
        port, token, fault = 0, "", ""
        try:
            self._probe_server = ProbeServer(address)
            port, token = self._probe_server.port, self._probe_server.token
        except OSError as error:
            fault = error.strerror or str(error)
        self._send("probing", port=port, token=token, fault=fault)

    def _do_probe(self, source: str, targets: list[dict[str, Any]]) -> None:
        self._send("probed", faults=probe(source, [Target(**target) for target in targets]))

    def _do_reserve(self, address: str) -> None:
        self._holder = reserve_port(address)
        self._send("reserved", port=self._holder.getsockname()[1])

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
        if self._probe_server is not None:
            self._probe_server.close()
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
        target = "autoddl.pipelines.runtime.ranks.rank:" + ("run_script_together" if together else "run_script")
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
        self._send(
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
        self._send_output(final=True)
        self._send("ended")
        while not self._sender.flush():  # `_listen` ends this if the launcher does not read for too long
            select.select([], [self._events_fd], [], _TICK_SECONDS)
        return True

    # ---- Watching ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._sender.flush()
        messages, failures = self._ranks.poll(0)
        if self._awaited_port is not None and is_listening(self._ranks.of(0).pid, self._awaited_port):
            self._awaited_port = None
            self._send("listening")
            if self._holder is not None:
                self._holder.close()
        self._send_output()
        for rank, kind, _ in messages:
            self._send(kind, rank=rank)
        for failure in failures:
            if failure.rank not in self._failed:
                self._failed.add(failure.rank)
                self._send_failure(failure)

    def _send_failure(self, failure: RankFailure) -> None:
        self._send(
            "failed",
            rank=failure.rank,
            failure=int(failure.kind),
            text=failure.text,
            refused=failure.is_user_error,
            position=failure.position,
        )

    def _send_output(self, final: bool = False) -> None:
        """Send the ranks' output: one piece of each, so that other work is not delayed; at the end all of it."""
        if not final and self._sender.num_waiting > _MAX_UNSENT_BYTES:
            return
        for rank, log in self._logs.items():
            while text := log.read(final):
                self._send("output", rank=rank, text=text)
                if not final:
                    break

    # ---- Ending -----------------------------------------------------------------------------------------------------

    def abandon(self, why: str) -> None:
        """End the ranks and this process at once; may be called from any thread."""
        self._is_abandoned = True
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{why}\n")
            sys.stderr.flush()
        self.clean()
        os._exit(1)

    def clean(self) -> None:
        """End all ranks and all other descendants."""
        self._ranks.kill()
        end_descendants([os.getpid()], _KILL_SECONDS)


class _LogTail:
    """A rank's output, in memory: what has not been read, and the end of what has."""

    def __init__(self) -> None:
        self._file = MemoryFile()
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def path(self) -> Path:
        """The file that the rank writes to."""
        return self._file.path

    def read(self, final: bool) -> str:
        """The next piece; "" if there is none yet or, with ``final``, no more."""
        too_many = os.fstat(self._file.fd).st_size - self._offset - _MAX_UNREAD_BYTES
        notice = ""
        if too_many > 0:
            self._offset += too_many
            notice = f"\n[autoddl: {too_many} bytes of output are omitted: they were not read in time]\n"
        piece = os.pread(self._file.fd, _OUTPUT_BYTES, self._offset)
        self._offset += len(piece)
        self._file.forget(self._offset - _KEPT_BYTES)
        return notice + self._decoder.decode(piece, final and len(piece) < _OUTPUT_BYTES)
