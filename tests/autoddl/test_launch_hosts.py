"""`autoddl launch` over ssh, on hosts that are network namespaces of this machine with an sshd each."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoddl.pipelines.runtime.load import is_available

from .several_hosts import SshHosts, hosts_available
from .test_launch import NASTY, SCRIPT, START, losses_by_hand, shown

HOSTS = hosts_available("sshd", "ssh", "ssh-keygen")
ONEFLOW = is_available()
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not HOSTS, reason=HOSTS.reason)]
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Two hosts that are as they should be, and one that does not accept the key."""
    folder = tmp_path_factory.mktemp("hosts")
    with contextlib.closing(
        SshHosts(folder, ["login", "host1", "host2", "refusing"], refusing=["refusing"])
    ) as started:
        yield started


@pytest.fixture(autouse=True)
def _idle(hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder; afterwards nothing may run on any host."""
    monkeypatch.chdir(tmp_path)
    yield
    hosts.wait_until_idle()


def command(hosts: SshHosts, plan: Path, *words: str) -> list[str]:
    start = [sys.executable, "-c", START, "launch", str(plan), str(SCRIPT), "--ssh", hosts.ssh, "--log-dir", "logs"]
    return hosts.command("login", *start, *words)


def launch(hosts: SshHosts, plan: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(hosts, plan, *words), capture_output=True, text=True, timeout=120)


@contextlib.contextmanager
def waiting(hosts: SshHosts, plan: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """Four ranks on two hosts that wait, and their processes."""
    options = ["--hosts", "host1,host2", "--without-oneflow", *words, "--", "wait"]
    with subprocess.Popen(
        command(hosts, plan, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pids = {}
            for _ in range(4):
                rank, (said,) = next(iter(shown(process.stdout.readline()).items()))
                pids[rank] = int(said.split()[1])
            yield process, pids
        finally:
            process.kill()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_are_placed_in_the_plans_order(hosts, mlp_plan, tmp_path):
    done = launch(hosts, mlp_plan(2, 2), "--hosts", "host2,host1", "--without-oneflow", "--", "say", *NASTY)
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
def test_a_plan_is_trained_on_two_hosts(hosts, mlp_plan):
    """Rank 0 is found at the address at which ssh reached its host; the losses are those of the same steps in numpy."""
    Path("hostfile").write_text("# mine\nhost1 slots=2\nroot@host2 slots=4\n")
    done = launch(hosts, mlp_plan(2, 1), "--hostfile", "hostfile", "--", "train")
    assert (done.returncode, done.stderr) == (0, "")
    for lines in shown(done.stdout).values():
        (line,) = [line for line in lines if line.startswith("losses")]
        assert [float(word) for word in line.split()[1:]] == pytest.approx(losses_by_hand(), rel=1e-5)


# ---- Failures and interrupts --------------------------------------------------------------------------------------------


def test_a_killed_rank_ends_the_job(hosts, mlp_plan):
    with waiting(hosts, mlp_plan(2, 2)) as (process, pids):
        os.kill(pids[3], signal.SIGKILL)
        begun = time.monotonic()
        _, err = process.communicate(timeout=90)
        assert time.monotonic() - begun < 60
    assert process.returncode == 1
    assert err.startswith("autoddl: rank 3 of 4 on host2 was killed by SIGKILL") and err.count("\n") == 1


@needs_oneflow
@pytest.mark.parametrize(
    ("how", "words"), [("raise", "raised ValueError: 17 is not even"), ("SIGKILL", "was killed by SIGKILL")]
)
def test_a_rank_fails_while_the_others_communicate(hosts, mlp_plan, how, words):
    """They wait for it in an all-reduce over both hosts, and it is the one that is named."""
    options = ["--hosts", "host1,host2", "--", "fail", "2", how, "sum_ranks"]
    with subprocess.Popen(
        command(hosts, mlp_plan(2, 2), *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            # A rank that crashes for it may have its last words on the screen first.
            assert "[rank 2 @host2] in trouble\n" in iter(process.stdout.readline, "")
            begun = time.monotonic()
            _, err = process.communicate(timeout=60)
            assert time.monotonic() - begun < 60
        finally:
            process.kill()
    assert process.returncode == 1
    assert err.startswith(f"autoddl: rank 2 of 4 on host2 {words}") and err.count("\n") == 1


@pytest.mark.fault(
    "launch", "the supervisor of a remote host is killed", "the host is named, and all ranks are ended", exit_code=1
)
def test_a_host_that_is_lost_is_named(hosts, mlp_plan):
    """Its supervisor is killed, and with it the connection."""
    with waiting(hosts, mlp_plan(2, 2)) as (process, pids):
        supervisor = parent(parent(pids[2]))  # between the two is the rank's keeper
        os.kill(supervisor, signal.SIGKILL)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert err.startswith("autoddl: rank 2 of 4 on host2 was lost with its host: ") and err.count("\n") == 1


@pytest.mark.fault(
    "launch",
    "the network to a host breaks",
    "ssh gives it up (here after 2 s, by default 15), the host is named; its own ranks end by silence",
    exit_code=1,
)
def test_a_network_that_breaks_is_noticed(hosts, mlp_plan):
    """By ssh, which asks the host from time to time; the host's own end is told by the network when that is back."""
    ssh = f"{hosts.ssh} -o ServerAliveInterval=1 -o ServerAliveCountMax=2"
    with waiting(hosts, mlp_plan(2, 2), "--ssh", ssh) as (process, _):
        hosts.run("host2", "ip", "link", "set", "eth0", "down")
        try:
            _, err = process.communicate(timeout=90)
        finally:
            hosts.run("host2", "ip", "link", "set", "eth0", "up")
    assert process.returncode == 1
    assert err.startswith("autoddl: rank 2 of 4 on host2 was lost with its host: Timeout, server host2 not responding.")
    hosts.wait_until_idle(60)


def test_a_job_is_started_again_on_all_hosts(hosts, mlp_plan):
    words = ["--max-restarts", "1", "--checkpoints", "saved", "--", "recover", "1"]
    done = launch(hosts, mlp_plan(2, 1), "--hosts", "host1,host2", "--without-oneflow", *words)
    assert done.returncode == 0
    assert done.stderr.startswith("autoddl: rank 1 of 2 on host2 raised RuntimeError: lost at step 3 ")
    assert shown(done.stdout)[1][-2:] == ["attempt 1 begins at 3", "done"]


def test_ctrl_c_reaches_remote_ranks(hosts, mlp_plan):
    with waiting(hosts, mlp_plan(2, 2)) as (process, _):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert out.count("KeyboardInterrupt") == 4
    assert err == "autoddl: interrupted by SIGINT; all ranks have been ended\n"


@pytest.mark.fault("launch", "the launcher is killed, with ranks on remote hosts", "nothing is left on any host")
def test_nothing_outlives_a_killed_launcher(hosts, mlp_plan):
    """Of ranks, their children, supervisors and ssh: looked at by the fixture."""
    with waiting(hosts, mlp_plan(2, 2)) as (process, _):
        assert len(hosts.processes("host2")) >= 5
        process.kill()


# ---- Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("launch", "a host cannot be reached at the start", "one line names it and says why", exit_code=2)
@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("refusing", "autoddl: host refusing cannot be used: root@refusing: Permission denied (publickey).\n"),
        ("10.77.0.99", "autoddl: host 10.77.0.99 cannot be used: ssh: connect to host 10.77.0.99 port 22: "),
        ("unheard-of.invalid", "autoddl: host unheard-of.invalid cannot be used: ssh: Could not resolve hostname "),
    ],
)
def test_hosts_that_cannot_be_reached(hosts, mlp_plan, second, message):
    done = launch(hosts, mlp_plan(2, 2), "--hosts", f"host1,{second}", "--", "say")
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_a_host_without_python(hosts, mlp_plan):
    done = launch(hosts, mlp_plan(2, 2), "--hosts", "host1,host2", "--python", "/nowhere/python", "--", "say")
    assert done.returncode == 2
    assert " cannot be used: " in done.stderr and "/nowhere/python: No such file or directory" in done.stderr


def test_a_python_without_autoddl(hosts, mlp_plan, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = launch(hosts, mlp_plan(2, 2), "--hosts", "host1,host2", "--python", str(bare), "--", "say")
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
    plan.write_bytes(mlp_plan(2, 2).read_bytes())
    hide(folder)
    done = launch(hosts, plan, "--hosts", "host1,host2", "--without-oneflow", "--", "say")
    assert done.returncode == 2
    assert done.stderr.startswith(f"autoddl: host host2 has no file {plan}; ") and done.stderr.count("\n") == 1
    hosts.run("host2", "sh", "-c", f"echo other > {plan}")
    done = launch(hosts, plan, "--hosts", "host1,host2", "--without-oneflow", "--", "say")
    assert done.returncode == 2
    assert done.stderr.startswith(f"autoddl: host host2 has another {plan} (SHA-256 ")


@needs_oneflow
def test_a_host_without_oneflow_or_with_another(hosts, mlp_plan, hide):
    (info,) = Path(importlib.util.find_spec("oneflow").origin).parents[1].glob("oneflow-0.9.0.dist-info")
    hide(info)
    done = launch(hosts, mlp_plan(2, 2), "--hosts", "host1,host2", "--", "say")
    assert (done.returncode, done.stderr) == (2, "autoddl: host host2: OneFlow is not installed\n")
    hosts.run(
        "host2", "sh", "-c", f"printf 'Metadata-Version: 2.1\\nName: oneflow\\nVersion: 0.8.0\\n' > {info}/METADATA"
    )
    done = launch(hosts, mlp_plan(2, 2), "--hosts", "host1,host2", "--", "say")
    assert (done.returncode, done.stderr) == (2, "autoddl: host host2 has OneFlow 0.8.0, should have 0.9.0\n")
