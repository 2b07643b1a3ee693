"""`autoddl launch` over ssh under faults: hosts that freeze or are lost, and what ranks on them had started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest

from .launches import BRISK, PATIENCE_S, launch_command, one_line, started

pytestmark = [pytest.mark.ranks("launches"), pytest.mark.usefixtures("idle_hosts")]

LOST = (
    r"autoddl: rank 1 of 2 on host2 was lost with its host: host host2 has not responded for \d+ s \(its output: .*\)"
)


@pytest.mark.fault(
    "launch",
    "a supervisor on a remote host is suspended (SIGSTOP)",
    "the host is given up after --host-timeout seconds (here 1) and named; its ranks are ended there by their keepers",
    exit_code=1,
)
def test_a_suspended_remote_supervisor_is_noticed(lost_hosts, record_property):
    """It stays suspended until the job has ended: the ranks and their children end without it."""
    _, (_, suspended, _) = lost_hosts
    record_property("seconds", suspended.seconds)
    assert re.fullmatch(LOST + r"; starting again \(2 of 2\)\n", suspended.said)


@pytest.mark.fault(
    "launch",
    "a host freezes with all that runs on it",
    "it is given up after --host-timeout seconds (here 1) and named; other hosts' ranks are ended, its own end when it thaws",
    exit_code=1,
)
def test_a_frozen_host_is_noticed(hosts, mlp_plan, record_property):
    options = [*hosts.launch_options("host1", "host2"), "--without-oneflow", "--host-timeout", "1", "--", "escape"]
    with started(hosts.command("login", *launch_command(mlp_plan(2, 1), *options, start=BRISK))) as job:
        frozen = hosts.processes("host2")
        begun = time.monotonic()
        try:
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            code, _, err = job.end()
            record_property("seconds", time.monotonic() - begun)
            hosts.wait_until_idle(PATIENCE_S, besides=frozen)
        finally:
            for pid in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
    assert (code, bool(re.fullmatch(LOST + "\n", err))) == (1, True), err


@pytest.mark.fault(
    "launch",
    "a rank fails on one host; ranks on all have children that called setsid, double-forked, or both",
    "all of them are ended on all hosts",
    exit_code=1,
)
def test_children_that_escaped_are_ended_on_all_hosts(hosts, mlp_plan):
    words = [*hosts.launch_options("host1", "host2"), "--without-oneflow", "--", "escape", "1", "SIGKILL"]
    command = hosts.command("login", *launch_command(mlp_plan(2, 1), *words))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert one_line(done.stderr, "autoddl: rank 1 of 2 on host2 was killed by SIGKILL")


@pytest.mark.fault(
    "launch",
    "over ssh with --max-restarts: a supervisor is killed, then another is suspended",
    "the job is started again on all hosts until it succeeds",
    exit_code=0,
)
def test_lost_hosts_are_used_again(lost_hosts, record_property):
    code, (first, second, last) = lost_hosts
    record_property("seconds", first.seconds + second.seconds)
    assert first.said.endswith("; starting again (1 of 2)\n") and second.said.endswith("; starting again (2 of 2)\n")
    assert (code, last.said) == (0, "")
    assert len({first.supervisor, second.supervisor, last.supervisor}) == 3


@pytest.mark.fault(
    "launch",
    "with --max-restarts: a host's network breaks and stays broken",
    "the host is named, in each attempt",
    exit_code=1,
)
def test_a_host_that_stays_lost(broken_network, record_property):
    code, (first, second), seconds = broken_network
    record_property("seconds", seconds)
    assert code == 1
    assert first.startswith("autoddl: rank 1 of 2 on host2 was lost with its host: ")
    assert second.startswith("autoddl: host host2 cannot be used: ")
