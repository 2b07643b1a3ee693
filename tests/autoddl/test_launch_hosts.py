"""`autoddl launch` over ssh, on hosts that are network namespaces of this machine with an sshd each."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoddl.pipelines.runtime.load import is_available

from ..cluster.ssh import SshHosts
from .launches import NASTY, PATIENCE_S, Started, launch_command, losses_by_hand, one_line, shown, started

ONEFLOW = is_available()
pytestmark = [pytest.mark.ranks("launches"), pytest.mark.usefixtures("idle_hosts")]
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)


def launch(hosts: SshHosts, names: str, plan: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command on login, for these hosts."""
    command = launch_command(plan, *hosts.launch_options(*names.split()), *words)
    return subprocess.run(hosts.command("login", *command), capture_output=True, text=True, timeout=PATIENCE_S)


def waiting(hosts: SshHosts, plan: Path) -> contextlib.AbstractContextManager[Started]:
    """A rank on each of two hosts that waits, with children."""
    options = [*hosts.launch_options("host1", "host2"), "--without-oneflow", "--", "escape"]
    return started(hosts.command("login", *launch_command(plan, *options)))


def test_ranks_are_placed_in_the_plans_order(hosts, mlp_plan, tmp_path):
    done = launch(hosts, "host2 host1", mlp_plan(2, 2), "--without-oneflow", "--", "say", *NASTY)
    assert (done.returncode, done.stderr) == (0, "")
    placed = {line.split("]")[0] for line in done.stdout.splitlines()}
    assert placed == {"[rank 0 @host2", "[rank 1 @host2", "[rank 2 @host1", "[rank 3 @host1"}
    for rank, (line,) in shown(done.stdout).items():
        said = json.loads(line)
        assert said["words"] == NASTY
        assert (said["RANK"], said["LOCAL_RANK"], said["cwd"]) == (str(rank), str(rank % 2), str(tmp_path))
        assert (tmp_path / "logs" / f"rank{rank}.log").read_text() == line + "\n"
    assert not any((Path(folder) / "x").exists() for folder in (".", "/root"))


@needs_oneflow
def test_a_plan_is_trained_on_four_hosts(hosts, mlp_plan):
    """Rank 0 is found at the address at which ssh reached its host; the losses are those of the same steps in numpy.

    The ranks leave together: none of them says anything when the others go.
    """
    Path("hostfile").write_text("# mine\nhost1 slots=2\nroot@host2 slots=4\nhost3\nhost4\n")
    words = ["--ssh", hosts.ssh, "--hostfile", "hostfile", "--log-dir", "logs", "--", "train"]
    command = hosts.command("login", *launch_command(mlp_plan(4, 1), *words))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    lines = shown(done.stdout)
    assert sorted(lines) == [0, 1, 2, 3]
    for (line,) in lines.values():
        first, *losses = line.split()
        assert first == "losses" and list(map(float, losses)) == pytest.approx(losses_by_hand(), rel=1e-5)


# ---- Failures and interrupts --------------------------------------------------------------------------------------------


@needs_oneflow
def test_a_rank_fails_while_the_others_communicate(hosts, mlp_plan):
    """It raises, and in the next attempt it is killed. The other waits for it in an all-reduce, and may crash: it is not named."""
    words = ["--max-restarts", "1", "--", "fail", "1", "raise,SIGKILL", "sum_ranks"]
    done = launch(hosts, "host1 host2", mlp_plan(2, 1), *words)
    assert done.returncode == 1
    # A rank that crashes for it may have its last words on the screen first.
    assert done.stdout.splitlines().count("[rank 1 @host2] in trouble") == 2
    first, last = done.stderr.splitlines()
    assert first.startswith("autoddl: rank 1 of 2 on host2 raised ValueError: 17 is not even (its output: ")
    assert first.endswith("; starting again (1 of 1)")
    assert last.startswith("autoddl: rank 1 of 2 on host2 was killed by SIGKILL")


@pytest.mark.fault(
    "launch", "the supervisor of a remote host is killed", "the host is named, and all ranks are ended", exit_code=1
)
def test_a_host_that_is_lost_is_named(lost_hosts, record_property):
    """Its supervisor is killed, and with it the connection."""
    _, (killed, *_) = lost_hosts
    record_property("seconds", killed.seconds)
    assert one_line(killed.said, "autoddl: rank 1 of 2 on host2 was lost with its host: ")


@pytest.mark.fault(
    "launch",
    "the network to a host breaks",
    "ssh gives it up (here after 2 s, by default 15), the host is named; its own ranks end by silence",
    exit_code=1,
)
def test_a_network_that_breaks_is_noticed(broken_network, record_property):
    """By ssh, which asks the host from time to time; the host's own end is told by the network when that is back."""
    _, (first, *_), seconds = broken_network
    record_property("seconds", seconds)
    reason = "Timeout, server host2 not responding."
    assert first.startswith(f"autoddl: rank 1 of 2 on host2 was lost with its host: {reason}")


def test_ctrl_c_reaches_remote_ranks(hosts, mlp_plan):
    with waiting(hosts, mlp_plan(2, 1)) as job:
        job.process.send_signal(signal.SIGINT)
        code, out, err = job.end()
    assert code == 130
    assert shown(out) == {0: ["saved"], 1: ["saved"]}
    assert err == "autoddl: interrupted by SIGINT; all ranks have been ended\n"


@pytest.mark.fault("launch", "the launcher is killed, with ranks on remote hosts", "nothing is left on any host")
def test_nothing_outlives_a_killed_launcher(hosts, mlp_plan):
    """Of ranks, their children, supervisors and ssh: looked at by the fixture."""
    with waiting(hosts, mlp_plan(2, 1)) as job:
        assert len(hosts.processes("host2")) >= 5
        job.process.kill()


# ---- Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("launch", "a host cannot be reached at the start", "one line names it and says why", exit_code=2)
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("host1 refusing", "autoddl: host refusing cannot be used: root@refusing: Permission denied (publickey).\n"),
        ("10.77.0.99", "autoddl: host 10.77.0.99 cannot be used: ssh: connect to host 10.77.0.99 port 22: "),
        ("unheard-of.invalid", "autoddl: host unheard-of.invalid cannot be used: ssh: Could not resolve hostname "),
    ],
)
def test_hosts_that_cannot_be_reached(hosts, mlp_plan, names, message):
    ssh = f"{hosts.ssh} -o ConnectTimeout=1" if names[0].isdigit() else hosts.ssh
    done = launch(hosts, names, mlp_plan(len(names.split()), 1), "--ssh", ssh, "--", "say")
    assert done.returncode == 2
    assert one_line(done.stderr, message)


def test_a_host_without_python(hosts, mlp_plan):
    done = launch(hosts, "host1", mlp_plan(1, 1), "--python", "/nowhere/python", "--", "say")
    assert done.returncode == 2
    assert " cannot be used: " in done.stderr and "/nowhere/python: No such file or directory" in done.stderr


def test_a_python_without_autoddl(hosts, mlp_plan, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = launch(hosts, "host1", mlp_plan(1, 1), "--python", str(bare), "--", "say")
    assert done.returncode == 2
    assert "its Python has no AutoDDL; install it there" in done.stderr


@pytest.fixture
def hide(hosts: SshHosts) -> Iterator[Callable[[Path], None]]:
    """``hide(folder)``: until the end of the test, host2 has an empty folder there."""
    hidden = []

    def mount(folder: Path) -> None:
        hosts.run("host2", "mount", "-t", "tmpfs", "none", str(folder))
        hidden.append(str(folder))

    yield mount
    for folder in reversed(hidden):
        hosts.run("host2", "umount", folder)


def test_a_host_without_the_plan(hosts, mlp_plan, hide, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    plan = folder / "plan.json"
    plan.write_bytes(mlp_plan(1, 1).read_bytes())
    hide(folder)
    done = launch(hosts, "host2", plan, "--without-oneflow", "--", "say")
    assert done.returncode == 2
    assert one_line(done.stderr, f"autoddl: host host2 has no file {plan}; ")
    hosts.run("host2", "sh", "-c", f"echo other > {plan}")
    done = launch(hosts, "host2", plan, "--without-oneflow", "--", "say")
    assert done.returncode == 2
    assert done.stderr.startswith(f"autoddl: host host2 has another {plan} (SHA-256 ")


@needs_oneflow
def test_a_host_without_oneflow_or_with_another(hosts, mlp_plan, hide):
    (info,) = Path(importlib.util.find_spec("oneflow").origin).parents[1].glob("oneflow-0.9.0.dist-info")
    hide(info)
    done = launch(hosts, "host2", mlp_plan(1, 1), "--", "say")
    assert (done.returncode, done.stderr) == (2, "autoddl: host host2: OneFlow is not installed\n")
    hosts.run(
        "host2", "sh", "-c", f"printf 'Metadata-Version: 2.1\\nName: oneflow\\nVersion: 0.8.0\\n' > {info}/METADATA"
    )
    done = launch(hosts, "host2", mlp_plan(1, 1), "--", "say")
    assert (done.returncode, done.stderr) == (2, "autoddl: host host2 has OneFlow 0.8.0, should have 0.9.0\n")
