"""One attempt at a job: hosts reached, checked, ranks started, watched, and ended, however it goes.

The order of the start is that of `autoddl.pipelines.runtime.launcher`: all ranks start, rank 0 loads OneFlow and listens, then
the others load it. Several ranks often fail at once, on several hosts, one because of the other: a failure waits a moment for
its cause, and the most telling one is reported. A host that gives no signs of life is lost, as one that hangs up is. When all
ranks are done they leave together (`autoddl.pipelines.runtime.parting`).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections.abc import Callable

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.failures import FailureKind, RankError, RankFailure, RankUserError, positions_text

from .beats import Heart
from .connection import Connection, supervisor_command
from .demands import Difference, differences
from .facts import HostFacts, gather_facts
from .hosts import Placement
from .interrupts import Interrupted, Interrupts
from .job import Job, Rendezvous
from .lines import Message
from .output import RankOutput

__all__ = ["HostError", "run_session"]

_TICK_SECONDS = 0.1
_MOST_TICK_SECONDS = 1.0  # a longer pause was this process's own, and no silence of the others
_SETTLE_SECONDS = 1.0  # how long a failure waits for the one that caused it
_CONNECT_SECONDS = 45.0
_WHERE_SECONDS = 5.0
_PART_SECONDS = 5.0  # how long ranks that are done may take to stop using their network
_END_SECONDS = 8.0  # how long supervisors may take to end their ranks before they are hung up on
_HANG_UP_SECONDS = 3.0  # how long supervisors that were hung up on may take to end
_URGENT_END_SECONDS, _URGENT_HANG_UP_SECONDS = 2.0, 0.2

Say = Callable[[str], None]


class HostError(UserError):
    """A host cannot be reached."""


def run_session(job: Job, restart: int, output: RankOutput, interrupts: Interrupts, say: Say) -> None:
    """Run the job to its end; returns when all ranks have finished, and in any case leaves no process behind.

    Raises:
        UserError: a host cannot be reached (`HostError`), or has not what the job needs.
        RankError: a rank failed (`RankUserError` where it refused what the user gave).
        Interrupted: the launcher was asked to end.
    """
    session = _Session(job, restart, output, interrupts, say)
    try:
        session.connect()
        session.check()
        session.start()
        session.watch()
    finally:
        session.close()


class _Session:
    def __init__(self, job: Job, restart: int, output: RankOutput, interrupts: Interrupts, say: Say) -> None:
        self._job, self._restart, self._output, self._interrupts, self._say = job, restart, output, interrupts, say
        self._hosts: list[tuple[Placement, Connection]] = []
        self._selector = selectors.DefaultSelector()
        self._facts: dict[str, HostFacts] = {}
        self._port: int | None = None
        self._is_listening = False
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._parted: set[int] = set()
        self._failures: list[RankFailure] = []
        self._positions: dict[str, Message] = {}
        self._ended: set[str] = set()
        self._lost: dict[str, str] = {}
        self._pumped: float | None = None
        # Whoever reads our output may make us wait: the supervisors are told all the same that we live.
        self._heart = Heart(job.beats, self._beat)
        self._ranks = {rank for placement in job.placements for rank in placement.ranks}

    # ---- Starting ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Reach all hosts and let them look around."""
        job = self._job
        for placement in job.placements:
            host = placement.host
            connection = Connection(host, supervisor_command(host, job.python, sys.executable, job.ssh, job.beats))
            self._hosts.append((placement, connection))
            self._selector.register(connection, selectors.EVENT_READ, (placement, connection))
            connection.send("look", directory=str(job.directory), files=[str(job.plan), str(job.script)])
        self._heart.start()
        deadline = time.monotonic() + _CONNECT_SECONDS
        while len(self._facts) < len(self._hosts):
            self._pump()
            if self._lost:
                name, fault = next(iter(self._lost.items()))
                more = len(self._lost) - 1
                others = f" (and {more} more host{'s' if more > 1 else ''})" if more else ""
                raise HostError(f"host {name} cannot be used: {fault}{others}")
            if self._interrupts.number:
                raise Interrupted(self._interrupts.number)
            if time.monotonic() > deadline:
                silent = [p.host.name for p, _ in self._hosts if p.host.name not in self._facts]
                raise HostError(f"host {silent[0]} cannot be used: it has not answered within {_CONNECT_SECONDS:g} s")

    def check(self) -> None:
        """Refuse hosts that have not what the job needs."""
        job = self._job
        own = gather_facts(str(job.directory), [str(job.plan), str(job.script)])
        facts = [self._facts[placement.host.name] for placement in job.placements]
        found = list(differences(job.demands, job.placements, facts, own, with_oneflow=job.with_oneflow))
        for difference in found:
            if not (job.forced and difference.can_be_forced):
                raise UserError(_refusal(difference, found))
        for difference in found:
            self._say(f"{difference.text}; going on all the same")

    def start(self) -> None:
        """Start all ranks and wait until they have joined."""
        job = self._job
        meeting = job.rendezvous or self._rendezvous()
        for rank in self._ranks:
            self._output.write(rank, "")  # errors refer to these files, whether or not a rank says anything
        for placement, connection in self._hosts:
            connection.send(
                "start",
                ranks=list(placement.ranks),
                local_ranks=[job.local_rank(placement, rank) for rank in placement.ranks],
                num_ranks=job.num_ranks,
                address=meeting.address,
                port=meeting.port,
                directory=str(job.directory),
                environment={**_host_variables(job, placement), **job.rank_variables(self._restart)},
                stall_timeout_s=job.stall_timeout_s,
                with_oneflow=job.with_oneflow,
            )
        deadline, within = time.monotonic() + job.start_timeout_s, f"within {job.start_timeout_s:g} s"
        if job.with_oneflow and job.num_ranks > 1:
            self._until(
                lambda: self._is_listening or self._can_reach(meeting), deadline, f"rank 0 does not listen {within}"
            )
        self._send_all("load")
        self._until(lambda: self._ready >= self._ranks, deadline, f"not all ranks have joined {within}")

    def _rendezvous(self) -> Rendezvous:
        """Where rank 0 will listen: at a port that its host has reserved, at the address at which it was reached."""
        job, (placement, connection) = self._job, self._hosts[0]
        connection.send("reserve", address="127.0.0.1" if job.is_here_alone else "")
        self._until(lambda: self._port is not None, time.monotonic() + _CONNECT_SECONDS, "no port could be reserved")
        assert self._port is not None
        address = job.master_address
        if address is None:
            found = self._facts[placement.host.name].address
            usable = found and ":" not in found and not (found.startswith("127.") and len(self._hosts) > 1)
            address = "127.0.0.1" if job.is_here_alone else found if usable else placement.host.address
            if len(self._hosts) > 1 and placement.host.is_local:
                raise UserError("the other hosts do not know where localhost is: give --master-address")
        return Rendezvous(address, self._port)

    def _can_reach(self, meeting: Rendezvous) -> bool:
        """For ranks whose first one is somebody else's: whether it listens."""
        if self._job.rendezvous is None:
            return False
        if 0 in self._ranks:
            return True  # and the others of this host find it when they look
        with contextlib.suppress(OSError), socket.create_connection((meeting.address, meeting.port), timeout=0.5):
            return True
        return False

    # ---- Watching ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Let the script run until all ranks are done."""
        job = self._job
        self._send_all(
            "run", script=str(job.script), arguments=list(job.arguments), together=job.rendezvous is not None
        )
        self._until(lambda: self._done >= self._ranks, None, "")

    def _until(self, condition: Callable[[], bool], deadline: float | None, what: str) -> None:
        """Watch until the condition holds; raises when a rank fails, the user interrupts, or the time is up."""
        while not condition():
            self._pump()
            if self._interrupts.number:
                self._interrupt()
            if self._failures:
                raise self._verdict()
            if deadline is not None and time.monotonic() > deadline:
                missing = min(self._ranks - self._ready, default=0)
                late = RankFailure(missing, FailureKind.TIMEOUT, f"is late: {what}")
                self._failures.append(late)
                raise self._verdict()

    def _pump(self) -> None:
        """Wait a tick, or for something to come from the hosts, and note it."""
        for key, _ in self._selector.select(_TICK_SECONDS):
            placement, connection = key.data
            for message in connection.read():
                self._note(placement.host.name, message)
            if not connection.is_open:
                self._selector.unregister(connection)
                if placement.host.name not in self._ended:
                    self._note_loss(placement, connection.fault())
        self._listen_for_silence()

    def _listen_for_silence(self) -> None:
        """Give up the hosts that have not been heard of for too long, all that has come having been read."""
        now = time.monotonic()
        passed = 0.0 if self._pumped is None else min(now - self._pumped, _MOST_TICK_SECONDS)
        self._pumped = now
        for placement, connection in self._hosts:
            if not connection.is_open:
                continue
            connection.listened(passed)
            # Before it has said anything the time to connect is the limit.
            silence = connection.silence(self._job.beats) if placement.host.name in self._facts else ""
            if silence:
                self._selector.unregister(connection)
                connection.abandon()
                self._note_loss(placement, f"host {self._name(placement.host.name)} {silence}")

    def _note_loss(self, placement: Placement, fault: str) -> None:
        self._lost[placement.host.name] = fault
        if self._facts and not self._done >= set(placement.ranks):
            text = f"was lost with its host: {fault}"
            self._failures.append(RankFailure(placement.ranks[0], FailureKind.KILLED, text))

    def _beat(self) -> None:
        """Tell the supervisors that we live."""
        for _, connection in self._hosts:
            connection.beat()

    def _note(self, host: str, message: Message) -> None:
        kind = message["kind"]
        if kind == "output":
            self._output.write(message["rank"], message["text"])
        elif kind == "failed":
            kind_of_failure, text, refused = FailureKind(message["failure"]), message["text"], message["refused"]
            failure = RankFailure(message["rank"], kind_of_failure, text, refused, message["position"])
            self._failures.append(failure)
        elif kind == "ready":
            self._ready.add(message["rank"])
        elif kind == "done":
            self._done.add(message["rank"])
        elif kind == "parted":
            self._parted.add(message["rank"])
        elif kind == "facts":
            self._facts[host] = HostFacts.of_document(message["facts"])
        elif kind == "reserved":
            self._port = message["port"]
        elif kind == "listening":
            self._is_listening = True
        elif kind == "positions":
            self._positions[host] = message
        elif kind == "ended":
            self._ended.add(host)

    def _send_all(self, do: str, **values: object) -> None:
        for _, connection in self._hosts:
            connection.send(do, **values)

    # ---- Failures and the end ---------------------------------------------------------------------------------------

    def _verdict(self) -> RankError:
        """The error that tells most, once those that belong together have come.

        Raises:
            Interrupted: it was not the ranks' fault.
        """
        self._pump_for(_SETTLE_SECONDS, lambda: bool(self._interrupts.number))
        if self._interrupts.number:
            self._interrupt()
        failure = min(self._failures, key=lambda failure: failure.kind)
        notes = ""
        if failure.kind in (FailureKind.WAITED, FailureKind.TIMEOUT):
            self._send_all("where")
            self._pump_for(_WHERE_SECONDS, lambda: len(self._positions) == len(self._hosts))
            for answer in self._positions.values():
                if answer["suspended"] is not None:
                    failure = RankFailure(answer["suspended"], FailureKind.STOPPED, "is stopped, as by SIGSTOP")
            living = {rank: text for answer in self._positions.values() for rank, text in answer["positions"]}
            notes = positions_text(living, self._failures)
        if failure.kind is FailureKind.WAITED:
            notes = f" (more than {self._job.stall_timeout_s:g} s){notes}"
        host = next(placement.host for placement in self._job.placements if failure.rank in placement.ranks)
        where = "" if self._job.is_here_alone else f" on {self._name(host.name)}"
        log = self._output.path(failure.rank)
        said = "" if failure.kind is FailureKind.STOPPED else notes
        kept = "" if log is None else f" (its output: {log})"
        text = f"rank {failure.rank} of {self._job.num_ranks}{where} {failure.text}{said}{kept}"
        return (RankUserError if failure.is_user_error else RankError)(text, failure.rank, log)

    def _name(self, host: str) -> str:
        return self._facts[host].name if self._job.rendezvous is not None else host

    def _interrupt(self) -> None:
        """Pass the signal on, give the ranks some time to end, and raise."""
        number = self._interrupts.number
        self._send_all("signal", number=int(number))
        self._pump_for(self._job.grace_s, lambda: self._interrupts.is_urgent or self._settled() >= self._ranks)
        raise Interrupted(number)

    def _settled(self) -> set[int]:
        return self._done | {failure.rank for failure in self._failures}

    def _pump_for(self, patience_s: float, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not condition():
            self._pump()

    def close(self) -> None:
        """End all ranks and hang up."""
        is_urgent = self._interrupts.is_urgent
        try:
            if self._facts:
                self._leave()
        finally:
            self._heart.stop()
            for _, connection in self._hosts:
                connection.hang_up()  # all of them, before the end of any is waited for
            is_urgent |= self._interrupts.is_urgent
            deadline = time.monotonic() + (_URGENT_HANG_UP_SECONDS if is_urgent else _HANG_UP_SECONDS)
            for _, connection in self._hosts:
                connection.close(deadline)
            self._selector.close()
            self._output.finish()

    def _leave(self) -> None:
        """Let ranks that are done leave, together; end others."""
        every = {placement.host.name for placement in self._job.placements}
        is_done = self._done >= self._ranks and not self._lost
        if is_done:
            self._send_all("part")
            self._pump_for(
                _PART_SECONDS,
                lambda: self._parted >= self._ranks or bool(self._failures or self._lost or self._interrupts.is_urgent),
            )
        self._send_all("exit" if is_done else "kill")
        deadline = time.monotonic() + _END_SECONDS
        urgent_deadline = time.monotonic() + _URGENT_END_SECONDS

        def is_over() -> bool:
            is_late = self._interrupts.is_urgent and time.monotonic() > urgent_deadline
            return is_late or self._ended | set(self._lost) >= every

        self._pump_for(deadline - time.monotonic(), is_over)


def _host_variables(job: Job, placement: Placement) -> dict[str, str]:
    """How many ranks the host has; a launcher that joins with one of them does not know."""
    return {} if job.rendezvous is not None else {"LOCAL_WORLD_SIZE": str(len(placement.ranks))}


def _refusal(first: Difference, found: list[Difference]) -> str:
    more = len(found) - 1
    return f"{first.text} (and {more} more difference{'s' if more > 1 else ''})" if more else first.text
