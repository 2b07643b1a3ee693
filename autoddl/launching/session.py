"""One attempt at a job: connects to the hosts, checks them, starts the ranks, watches them, and ends them in any case.

The order of the start is that of `autoddl.pipelines.runtime.ranks.launcher`: all ranks start, rank 0 loads OneFlow and listens,
then the others load it. Often several ranks fail at once, on several hosts, because of a single cause: the report of a failure
waits a moment, and the most informative failure is reported. A host without heartbeats counts as lost, like one that closes its
connection. When all ranks are done they leave together (`autoddl.pipelines.runtime.ranks.parting`).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.ranks.failures import FailureKind, RankError, RankFailure, RankUserError, positions_text
from autoddl.pipelines.runtime.ranks.interfaces import Interface

from .connection import Connection, supervisor_command
from .demands import differences
from .facts import HostFacts, gather_facts
from .gpuchecks import nccl_interface
from .heartbeat import HeartbeatThread
from .hosts import Placement
from .interfaces import IFNAME_VARIABLE
from .interrupts import InterruptCounter, Interrupted
from .job import Job, Rendezvous
from .lines import Message
from .output import RankOutput
from .unmet import UnmetDemand

__all__ = ["HostError", "run_session"]

_TICK_SECONDS = 0.1
_MAX_TICK_SECONDS = 1.0  # a longer pause was this process's own, and does not count as silence of the hosts
_SETTLE_SECONDS = 1.0  # how long the report of a failure waits for the failure that caused it
_CONNECT_SECONDS = 45.0
_WHERE_SECONDS = 5.0
_PART_SECONDS = 5.0  # how long ranks that are done may take to stop using their network
_END_SECONDS = 8.0  # how long supervisors may take to end their ranks before their connections are closed
_HANG_UP_SECONDS = 3.0  # how long supervisors may take to exit after that
_URGENT_END_SECONDS, _URGENT_HANG_UP_SECONDS = 2.0, 0.2

Say = Callable[[str], None]


class HostError(UserError):
    """A host cannot be reached."""


def run_session(job: Job, restart: int, output: RankOutput, interrupts: InterruptCounter, say: Say) -> None:
    """Run the job to its end. No process is left behind, however it ends.

    Raises:
        UserError: a host cannot be reached (`HostError`), or does not meet the job's requirements.
        RankError: a rank failed (`RankUserError` if it reported a user's error).
        Interrupted: the launcher was ended by a signal.
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
    def __init__(self, job: Job, restart: int, output: RankOutput, interrupts: InterruptCounter, say: Say) -> None:
        self._job, self._restart, self._output, self._interrupts, self._say = job, restart, output, interrupts, say
        self._hosts: list[tuple[Placement, Connection]] = []
        self._selector = selectors.DefaultSelector()
        self._facts: dict[str, HostFacts] = {}
        self._servers: dict[str, Message] = {}
        self._probed: dict[str, Message] = {}
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
        # The launcher may be blocked by its own output: a thread sends the heartbeats.
        self._heartbeat = HeartbeatThread(job.heartbeat, self._beat)
        self._ranks = {rank for placement in job.placements for rank in placement.ranks}

    # ---- Starting ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to all hosts and let them gather their facts."""
        job = self._job
        for placement in job.placements:
            host = placement.host
            connection = Connection(host, supervisor_command(host, job.python, sys.executable, job.ssh, job.heartbeat))
            self._hosts.append((placement, connection))
            self._selector.register(connection, selectors.EVENT_READ, (placement, connection))
            on_gpus = {"on_gpus": True} if job.demands.on_gpus else {}  # only then: other versions do not know it
            connection.send("look", directory=str(job.directory), files=job.files, **on_gpus)
        self._heartbeat.start()
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
        """Check that all hosts meet the job's requirements, and that NCCL can connect them."""
        job = self._job
        own = gather_facts(str(job.directory), job.files)
        facts = [self._facts[placement.host.name] for placement in job.placements]
        first = job.placements[0]
        found = differences(
            job.demands,
            job.placements,
            facts,
            own,
            with_oneflow=job.with_oneflow,
            environment=job.environment,
            joined_as=None if job.rendezvous is None else job.local_rank(first, first.ranks[0]),
        )
        self._refuse(list(found))
        if job.demands.on_gpus and job.with_oneflow and len(self._hosts) > 1:
            self._refuse(self._probe_network())

    def _refuse(self, found: Sequence[UnmetDemand]) -> None:
        """Refuse the job for the first difference that is neither a warning nor forced; say the others."""
        unmet = [difference for difference in found if not difference.is_warning]
        for difference in unmet:
            if not (self._job.forced and difference.can_be_forced):
                raise UserError(_refusal(difference, unmet))
        for difference in found:
            self._say(f"{difference.text}; continuing anyway")

    def _probe_network(self) -> list[UnmetDemand]:
        """Let all hosts connect to each other over the interfaces that NCCL uses."""
        interfaces: dict[str, Interface] = {}
        for placement, _ in self._hosts:
            gpu_facts = self._facts[placement.host.name].gpu_facts
            found = None if gpu_facts is None else nccl_interface(gpu_facts, self._job.environment)
            if found is not None:
                interfaces[placement.host.name] = found
        probed = [(p.host.name, connection) for p, connection in self._hosts if p.host.name in interfaces]
        for name, connection in probed:
            connection.send("listen", address=interfaces[name].address)
        self._await_answers(self._servers, len(probed))
        targets = [
            {"host": name, "address": interfaces[name].address, "port": server["port"], "token": server["token"]}
            for name, server in self._servers.items()
        ]
        for name, connection in probed:
            others = [target for target in targets if target["host"] != name]
            connection.send("probe", source=interfaces[name].address, targets=others)
        self._await_answers(self._probed, len(probed))
        return [
            UnmetDemand(
                f"host {name} does not reach host {target} from {interfaces[name].name} ({interfaces[name].address}) "
                f"at {interfaces[target].address}: {fault}; {IFNAME_VARIABLE} should name an interface on which all "
                "hosts reach each other",
                can_be_forced=True,
            )
            for name, answer in self._probed.items()
            for target, fault in answer["faults"].items()
        ]

    def _await_answers(self, answers: Mapping[str, Message], number: int) -> None:
        deadline = time.monotonic() + _CONNECT_SECONDS
        self._wait_until(lambda: len(answers) >= number, deadline, "hosts do not answer about their network")

    def start(self) -> None:
        """Start all ranks and wait until they have joined."""
        job = self._job
        rendezvous = job.rendezvous or self._make_rendezvous()
        for rank in self._ranks:
            self._output.write(rank, "")  # errors refer to these files, even if a rank prints nothing
        for placement, connection in self._hosts:
            connection.send(
                "start",
                ranks=list(placement.ranks),
                local_ranks=[job.local_rank(placement, rank) for rank in placement.ranks],
                num_ranks=job.num_ranks,
                address=rendezvous.address,
                port=rendezvous.port,
                directory=str(job.directory),
                environment={**_host_variables(job, placement), **job.rank_variables(self._restart)},
                stall_timeout_s=job.stall_timeout_s,
                with_oneflow=job.with_oneflow,
            )
        deadline, within = time.monotonic() + job.start_timeout_s, f"within {job.start_timeout_s:g} s"
        if job.with_oneflow and job.num_ranks > 1:
            self._wait_until(
                lambda: self._is_listening or self._can_reach(rendezvous),
                deadline,
                f"rank 0 does not listen {within}",
            )
        self._send_all("load")
        self._wait_until(lambda: self._ready >= self._ranks, deadline, f"not all ranks have joined {within}")

    def _make_rendezvous(self) -> Rendezvous:
        """Let rank 0's host reserve a port, at the address at which that host was reached."""
        job, (placement, connection) = self._job, self._hosts[0]
        connection.send("reserve", address="127.0.0.1" if job.is_local else "")
        self._wait_until(
            lambda: self._port is not None, time.monotonic() + _CONNECT_SECONDS, "no port could be reserved"
        )
        assert self._port is not None
        address = job.master_address
        if address is None:
            found = self._facts[placement.host.name].address
            usable = found and ":" not in found and not (found.startswith("127.") and len(self._hosts) > 1)
            address = "127.0.0.1" if job.is_local else found if usable else placement.host.address
            if len(self._hosts) > 1 and placement.host.is_local:
                raise UserError("the other hosts do not know where localhost is: give master_address=ADDRESS")
        return Rendezvous(address, self._port)

    def _can_reach(self, rendezvous: Rendezvous) -> bool:
        """For a launcher that joins a job: whether rank 0 listens."""
        if self._job.rendezvous is None:
            return False
        if 0 in self._ranks:
            return True  # the other ranks of this host look for it themselves
        address = (rendezvous.address, rendezvous.port)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.5):
            return True
        return False

    # ---- Watching ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Run the script until all ranks are done."""
        job = self._job
        self._send_all(
            "run", script=str(job.script), arguments=list(job.arguments), together=job.rendezvous is not None
        )
        self._wait_until(lambda: self._done >= self._ranks, None, "")

    def _wait_until(self, condition: Callable[[], bool], deadline: float | None, what: str) -> None:
        """Process messages until the condition holds; raises if a rank fails, the user interrupts, or the deadline passes."""
        while not condition():
            self._pump()
            if self._interrupts.number:
                self._interrupt()
            if self._failures:
                raise self._failure_error()
            if deadline is not None and time.monotonic() > deadline:
                missing = min(self._ranks - self._ready, default=0)
                late = RankFailure(missing, FailureKind.TIMEOUT, f"is late: {what}")
                self._failures.append(late)
                raise self._failure_error()

    def _pump(self) -> None:
        """Wait at most a tick for messages from the hosts, and process them."""
        for key, _ in self._selector.select(_TICK_SECONDS):
            placement, connection = key.data
            for message in connection.read():
                self._process(placement.host.name, message)
            if not connection.is_open:
                self._selector.unregister(connection)
                if placement.host.name not in self._ended:
                    self._record_loss(placement, connection.fault())
        self._check_silence()

    def _check_silence(self) -> None:
        """Give up the hosts that have been silent for too long, after all their messages have been read."""
        now = time.monotonic()
        passed = 0.0 if self._pumped is None else min(now - self._pumped, _MAX_TICK_SECONDS)
        self._pumped = now
        for placement, connection in self._hosts:
            if not connection.is_open:
                continue
            connection.add_silence(passed)
            # Until its first message, a host is limited by the time to connect.
            silence = connection.silence_fault(self._job.heartbeat) if placement.host.name in self._facts else ""
            if silence:
                self._selector.unregister(connection)
                connection.abandon()
                self._record_loss(placement, f"host {self._name(placement.host.name)} {silence}")

    def _record_loss(self, placement: Placement, fault: str) -> None:
        self._lost[placement.host.name] = fault
        if self._facts and not self._done >= set(placement.ranks):
            text = f"was lost with its host: {fault}"
            self._failures.append(RankFailure(placement.ranks[0], FailureKind.KILLED, text))

    def _beat(self) -> None:
        """Send a heartbeat to all supervisors."""
        for _, connection in self._hosts:
            connection.beat()

    def _process(self, host: str, message: Message) -> None:
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
        elif kind == "probing":
            self._servers[host] = message
        elif kind == "probed":
            self._probed[host] = message
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

    def _failure_error(self) -> RankError:
        """The most informative error, after related failures have arrived.

        Raises:
            Interrupted: the user interrupted meanwhile.
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
        where = "" if self._job.is_local else f" on {self._name(host.name)}"
        log = self._output.path(failure.rank)
        said = "" if failure.kind is FailureKind.STOPPED else notes
        kept = "" if log is None else f" (its output: {log})"
        text = f"rank {failure.rank} of {self._job.num_ranks}{where} {failure.text}{said}{kept}"
        return (RankUserError if failure.is_user_error else RankError)(text, failure.rank, log)

    def _name(self, host: str) -> str:
        return self._facts[host].name if self._job.rendezvous is not None else host

    def _interrupt(self) -> None:
        """Forward the signal, give the ranks some time to end, and raise."""
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
        """End all ranks and close the connections."""
        is_urgent = self._interrupts.is_urgent
        try:
            if self._facts:
                self._leave()
        finally:
            self._heartbeat.stop()
            for _, connection in self._hosts:
                connection.hang_up()  # all of them, before waiting for any
            is_urgent |= self._interrupts.is_urgent
            deadline = time.monotonic() + (_URGENT_HANG_UP_SECONDS if is_urgent else _HANG_UP_SECONDS)
            for _, connection in self._hosts:
                connection.close(deadline)
            self._selector.close()
            self._output.finish()

    def _leave(self) -> None:
        """Let ranks that are done leave together; end the others."""
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
    """The number of ranks of the host; unknown to a launcher that joins a job as one of them."""
    return {} if job.rendezvous is not None else {"LOCAL_WORLD_SIZE": str(len(placement.ranks))}


def _refusal(first: UnmetDemand, found: Sequence[UnmetDemand]) -> str:
    more = len(found) - 1
    return f"{first.text} (and {more} more difference{'s' if more > 1 else ''})" if more else first.text
