"""`autoddl launch` over ssh under faults: hosts that freeze or are lost, and ranks that leave together on four of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoddl.pipelines.runtime.load import is_available

from .several_hosts import SshHosts, hosts_available
from .test_launch import shown
from .test_launch_hosts import command, parent

HOSTS = hosts_available("sshd", "ssh", "ssh-keygen")
ONEFLOW = is_available()
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not HOSTS, reason=HOSTS.reason)]
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with contextlib.closing(SshHosts(folder, ["login", "host1", "host2", "host3", "host4"])) as started:
        yield started


@pytest.fixture(autouse=True)
def _idle(hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder; afterwards nothing may run on any host."""
    monkeypatch.chdir(tmp_path)
    yield
    hosts.wait_until_idle(PATIENCE_S)


@contextlib.contextmanager
def waiting(hosts: SshHosts, plan: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A rank on each of two hosts that waits, with children that escaped; and the supervisor of the second host."""
    options = ["--hosts", "host1,host2", "--without-oneflow", *words, "--", "escape"]
    with subprocess.Popen(
        command(hosts, plan, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pids: dict[int, int] = {}
            while len(pids) < 2:
                line = process.stdout.readline()
                assert line, process.communicate(timeout=PATIENCE_S)
                rank, (said,) = next(iter(shown(line).items()))
                if said.startswith("waiting"):
                    pids[rank] = int(said.split()[1])
            yield process, parent(parent(pids[1]))
        finally:
            process.kill()


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, err


LOST = r"autoddl: rank 1 of 2 on host2 was lost with its host: host host2 has not been heard of for \d+ s \(its output: .*\)\n"


@pytest.mark.fault(
    "launch",
    "a supervisor on a remote host is suspended (SIGSTOP)",
    "the host is given up after --host-timeout seconds (here 1) and named; its ranks are ended there by their keepers",
    exit_code=1,
)
def test_a_suspended_remote_supervisor_is_noticed(hosts, mlp_plan, record_property):
    with waiting(hosts, mlp_plan(2, 1), "--host-timeout", "1") as (process, supervisor):
        begun = time.monotonic()
        os.kill(supervisor, signal.SIGSTOP)
        try:
            code, err = wait_for_end(process)
            record_property("seconds", time.monotonic() - begun)
            assert (code, bool(re.fullmatch(LOST, err))) == (1, True), err
            hosts.wait_until_idle(PATIENCE_S, besides=still_there(hosts, supervisor))
        finally:
            os.kill(supervisor, signal.SIGCONT)


def still_there(hosts: SshHosts, supervisor: int) -> list[int]:
    """What belongs to a suspended supervisor but is no rank, keeper or child of these: itself, and what sshd holds for it."""
    above = [supervisor]
    while (pid := parent(above[-1])) > 1 and pid in hosts.processes("host2"):
        above.append(pid)
    return above


@pytest.mark.fault(
    "launch",
    "a host freezes with all that runs on it",
    "it is given up after --host-timeout seconds (here 1) and named; other hosts' ranks are ended, its own end when it thaws",
    exit_code=1,
)
def test_a_frozen_host_is_noticed(hosts, mlp_plan, record_property):
    with waiting(hosts, mlp_plan(2, 1), "--host-timeout", "1") as (process, _):
        frozen = hosts.processes("host2")
        begun = time.monotonic()
        try:
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            code, err = wait_for_end(process)
            record_property("seconds", time.monotonic() - begun)
            hosts.wait_until_idle(PATIENCE_S, besides=frozen)
        finally:
            for pid in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
    assert (code, bool(re.fullmatch(LOST, err))) == (1, True), err


@pytest.mark.fault(
    "launch",
    "a rank fails on one host; ranks on all have children that called setsid, double-forked, or both",
    "all of them are ended on all hosts",
    exit_code=1,
)
def test_children_that_escaped_are_ended_on_all_hosts(hosts, mlp_plan):
    words = ["--hosts", "host1,host2", "--without-oneflow", "--", "escape", "1", "SIGKILL"]
    process = subprocess.run(command(hosts, mlp_plan(2, 1), *words), capture_output=True, text=True, timeout=PATIENCE_S)
    assert process.returncode == 1
    assert process.stderr.startswith("autoddl: rank 1 of 2 on host2 was killed by SIGKILL")


@pytest.mark.fault(
    "launch",
    "over ssh with --max-restarts: a supervisor is killed, then another is suspended",
    "the job is started again on all hosts until it succeeds",
    exit_code=0,
)
def test_lost_hosts_are_used_again(hosts, mlp_plan):
    """Three attempts over ssh: over 10 s on a busy machine."""
    words = ["--max-restarts", "2", "--host-timeout", "1", "--without-oneflow", "--hosts", "host1,host2"]
    faults = ["supervisor-SIGKILL", "supervisor-SIGSTOP"]
    process = subprocess.run(
        command(hosts, mlp_plan(2, 1), *words, "--", "misfortunes", *faults),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    for pid in hosts.processes("host2"):  # the suspended supervisor may go on, and so ends
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert process.returncode == 0, process.stderr
    first, second = process.stderr.splitlines()
    assert "rank 1 of 2 on host2 was lost with its host: " in first and first.endswith("; starting again (1 of 2)")
    assert "host host2 has not been heard of for " in second and second.endswith("; starting again (2 of 2)")
    assert Path("attempts").read_text() == "012"


@pytest.mark.fault(
    "launch",
    "with --max-restarts: a host's network breaks and stays broken",
    "the host is named, in each attempt",
    exit_code=1,
)
def test_a_host_that_stays_lost(hosts, mlp_plan):
    ssh = f"{hosts.ssh} -o ServerAliveInterval=1 -o ServerAliveCountMax=2 -o ConnectTimeout=2"
    with waiting(hosts, mlp_plan(2, 1), "--max-restarts", "1", "--host-timeout", "10", "--ssh", ssh) as (process, _):
        hosts.run("host2", "ip", "link", "set", "eth0", "down")
        try:
            code, err = wait_for_end(process)
        finally:
            hosts.run("host2", "ip", "link", "set", "eth0", "up")
    first, second = err.splitlines()
    assert code == 1
    assert first.startswith("autoddl: rank 1 of 2 on host2 was lost with its host: ")
    assert second.startswith("autoddl: host host2 cannot be used: ")


@needs_oneflow
def test_ranks_on_four_hosts_leave_together(hosts, mlp_plan):
    """None of them says anything when the others go. Two jobs of four OneFlow ranks take over 10 s."""
    words = ["--hosts", "host1,host2,host3,host4", "--", "sum_ranks"]
    for _ in range(2):
        done = subprocess.run(
            command(hosts, mlp_plan(4, 1), *words), capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert shown(done.stdout) == {rank: ["sum 6.0 0.9.0"] for rank in range(4)}
