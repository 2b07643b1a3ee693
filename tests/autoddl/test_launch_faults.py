"""`autoddl launch` on this machine under faults: of supervisors, keepers and disks, and by signals; nothing may be left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import selectors
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from autoddl.__main__ import main
from autoddl.launching import session as session_module
from autoddl.launching.connection import Connection
from autoddl.launching.heartbeat import HeartbeatTimes
from autoddl.launching.hosts import LOCALHOST, Host, Placement
from autoddl.pipelines.runtime.load import is_available

from . import launches
from .launches import (
    BRISK,
    PATIENCE_S,
    SCRIPT,
    Attempt,
    Started,
    forget_jobs,
    launch_command,
    losses_by_hand,
    run_attempts,
    shown,
    wait_until_ended,
    wait_until_gone,
)
from .test_launch import launch

pytestmark = [pytest.mark.ranks("launches"), pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")]
ONEFLOW = is_available()
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)
CAN_MOUNT = (
    sys.platform == "linux"
    and subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode
    == 0
)
needs_mounts = pytest.mark.skipif(not CAN_MOUNT, reason="file systems of one's own need root")


@pytest.fixture(autouse=True)
def _here(outside_of_jobs: None) -> None:
    """All tests."""


@contextlib.contextmanager
def started(plan: Path, *words: str, num_ranks: int = 2) -> Iterator[Started]:
    """A launch whose ranks wait; afterwards nothing may be left of it."""
    command = launch_command(plan, "--without-oneflow", "--log-dir", "logs", *words, start=BRISK)
    with launches.started(command, num_ranks) as job:
        yield job
    wait_until_gone(str(plan))


# ---- Supervisors, keepers and ranks -------------------------------------------------------------------------------------

#: What a rank meets with in each attempt, and what is said of it.
FAULTS = {
    "raise": "rank 1 of 2 raised ValueError: 17 is not even",
    "SIGKILL": "rank 1 of 2 was killed by SIGKILL",
    "SIGSEGV": "rank 1 of 2 crashed with SIGSEGV",
    "SIGSTOP": "rank 1 of 2 is stopped, as by SIGSTOP",
    "keeper-SIGKILL": "rank 1 of 2 was killed by SIGKILL",
    "keeper-SIGSTOP": "rank 1 of 2 is stopped, as by SIGSTOP",
    "supervisor-SIGKILL": "rank 0 of 2 was lost with its host: its supervisor ended with code -9",
    "supervisor-SIGSTOP": "rank 0 of 2 was lost with its host: host localhost has not responded for ",
}


@pytest.fixture(scope="module")
def attempts(mlp_plan, tmp_path_factory) -> dict[str, Attempt]:
    """A job that meets with another fault in each attempt, until all ranks are ``done``; nothing is left of any of them."""
    folder, plan = tmp_path_factory.mktemp("attempts"), mlp_plan(1, 2)
    options = ["--without-oneflow", "--max-restarts", str(len(FAULTS)), "--host-timeout", "1"]
    options += ["--checkpoints", str(folder), "--log-dir", str(folder / "logs")]
    with pytest.MonkeyPatch.context() as patch:
        forget_jobs(patch)
        command = launch_command(plan, *options, "--", "misfortunes", *FAULTS, start=BRISK)
        code, found = run_attempts(command, folder, num_ranks=2)
    assert code == 0, found[-1].said
    wait_until_ended({attempt.supervisor for attempt in found})
    wait_until_gone(str(plan))
    return dict(zip([*FAULTS, "done"], found))


@pytest.mark.fault(
    "launch",
    "with --max-restarts, other faults in each attempt: a rank or its supervisor is killed or suspended, or a rank raises",
    "each is named, and the job is started again until it succeeds",
    exit_code=0,
)
def test_a_job_survives_a_fault_in_each_attempt(attempts, record_property):
    """Nine attempts, three of which wait for a suspended process: over 10 s. The tests below look at one each."""
    record_property("seconds", sum(attempt.seconds for attempt in attempts.values()))
    assert list(attempts) == [*FAULTS, "done"] and attempts["done"].said == ""
    for number, (fault, words) in enumerate(FAULTS.items(), 1):
        said = attempts[fault].said
        assert said.startswith(f"autoddl: {words}")
        assert said.endswith(f"/rank{said[14]}.log); starting again ({number} of {len(FAULTS)})\n")
    assert len({attempt.supervisor for attempt in attempts.values()}) == len(attempts)


@pytest.mark.fault(
    "launch",
    "a supervisor is suspended (SIGSTOP)",
    "it is given up after --host-timeout seconds of silence (here 1); the message names the host, and its ranks are ended",
    exit_code=1,
)
def test_a_suspended_supervisor_is_noticed(attempts, record_property):
    attempt = attempts["supervisor-SIGSTOP"]
    record_property("seconds", attempt.seconds)
    assert re.match(
        r"autoddl: rank 0 of 2 was lost with its host: host localhost has not responded for \d+ s "
        rf"\(its supervisor, process {attempt.supervisor}, is stopped\) \(its output: ",
        attempt.said,
    )


@pytest.mark.fault(
    "launch",
    "a supervisor is killed",
    "all ranks and everything that they started are ended; the message names the host's first rank",
    exit_code=1,
)
def test_a_killed_supervisor_leaves_nothing(attempts, record_property):
    record_property("seconds", attempts["supervisor-SIGKILL"].seconds)
    assert len(attempts["supervisor-SIGKILL"].pids) == 2 * (1 + 1 + 6)  # ranks, keepers, and what ranks started


@pytest.mark.fault(
    "launch",
    "the keeper of a rank, which ends what the rank started, is killed",
    "the system kills the rank, and the supervisor everything that it had started",
    exit_code=1,
)
def test_a_killed_keeper_leaves_nothing(attempts, record_property):
    record_property("seconds", attempts["keeper-SIGKILL"].seconds)
    assert len(attempts["keeper-SIGKILL"].pids) == 2 * (1 + 1 + 6)


@pytest.mark.fault(
    "launch",
    "the launcher is killed while ranks have children in sessions of their own and orphans",
    "everything is ended by the supervisor and the keepers",
)
def test_a_killed_launcher_leaves_nothing(mlp_plan):
    with started(mlp_plan(1, 2), "--", "escape") as job:
        job.process.kill()


@pytest.mark.fault(
    "launch",
    "the launcher is suspended for longer than the supervisors wait",
    "they end the ranks; the launcher says so when it goes on",
    exit_code=1,
)
def test_a_suspended_launcher_is_noticed(mlp_plan):
    with started(mlp_plan(1, 2), "--host-timeout", "1", "--", "escape") as job:
        os.kill(job.process.pid, signal.SIGSTOP)
        wait_until_ended({*job.ranks.values(), *job.children})
        os.kill(job.process.pid, signal.SIGCONT)
        code, _, err = job.end()
    assert code == 1
    assert err.startswith(
        "autoddl: rank 0 of 2 was lost with its host: the launcher has not responded for 2 s (its output: "
    )


def test_a_launcher_that_slept_does_not_blame_the_hosts(monkeypatch):
    """Silence counts as long as somebody was there to hear what had come."""
    placement = Placement(Host("far"), range(2))
    connection = Connection(placement.host, ["sleep", "600"])
    job = SimpleNamespace(
        placements=[placement], heartbeat=HeartbeatTimes(30.0), rendezvous=None, is_local=False, num_ranks=2
    )
    session = session_module._Session(job, 0, None, None, pytest.fail)
    session._hosts, session._facts = [(placement, connection)], {"far": None}
    session._selector.register(connection, selectors.EVENT_READ)
    clock = [0.0]
    monkeypatch.setattr(session_module.time, "monotonic", lambda: clock[0])
    try:
        for seconds in (0.0, 0.1, 1000.0, 0.1, 1000.0):
            clock[0] += seconds
            session._check_silence()
        assert connection.silence_s < 3 and not session._lost
        for _ in range(400):
            clock[0] += 0.1
            session._check_silence()
        assert session._lost == {"far": "host far has not responded for 30 s"}
    finally:
        monkeypatch.undo()
        connection.close(time.monotonic())


def test_a_busy_supervisor_here_is_given_more_time_than_a_suspended_one():
    connection = Connection(Host(LOCALHOST), ["sleep", "600"])
    try:
        connection.add_silence(30.0)
        assert connection.silence_fault(HeartbeatTimes(30.0)) == ""
        connection.add_silence(90.0)
        assert connection.silence_fault(HeartbeatTimes(30.0)) == "has not responded for 120 s"
    finally:
        connection.close(time.monotonic())


# ---- Nothing is left behind ---------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "launch",
    "ranks have children that called setsid, double-forked, or both; then one rank fails, or all are done",
    "every one of them is ended with the job",
    exit_code="0 or 1",
)
@pytest.mark.parametrize("how", ["raise", "SIGKILL", "SIGSEGV", "done"])
def test_children_that_escaped_are_ended(attempts, record_property, how):
    """Before the next attempt begins to do anything: see `run_attempts`."""
    record_property("seconds", attempts[how].seconds)
    assert len(attempts[how].pids) == 2 * (1 + 1 + 6)


@pytest.mark.fault(
    "launch",
    "`launch` gets SIGINT, SIGTERM or SIGHUP",
    "ranks get the signal and --grace seconds; then all that is left is ended, also children in sessions of their own",
    exit_code="130, 143, 129",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_job(mlp_plan, number):
    """The ranks save something on SIGINT, as Python has it."""
    with started(mlp_plan(1, 2), "--", "escape") as job:
        job.process.send_signal(number)
        code, out, err = job.end()
    assert code == 128 + number
    saved = {0: ["saved"], 1: ["saved"]} if number == signal.SIGINT else {}
    assert shown(out) == saved and {int(path.name[5:]) for path in Path().glob("saved*")} == set(saved)
    assert err == f"autoddl: interrupted by {number.name}; all ranks have been ended\n"


@pytest.mark.fault(
    "launch",
    "a second signal, while ranks have a long time to end",
    "everything is ended at once",
    exit_code="130, 143, 129",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_the_job_at_once(mlp_plan, number, record_property):
    with started(mlp_plan(1, 1), "--grace", "600", "--", "stubborn", num_ranks=1) as job:
        job.process.send_signal(number)
        assert job.process.stdout is not None
        assert "not yet" in job.process.stdout.readline()
        begun = time.monotonic()
        job.process.send_signal(number)
        code, _, _ = job.end()
        record_property("seconds", time.monotonic() - begun)
    assert code == 128 + number


def test_ranks_that_ignore_a_signal_are_killed_after_a_while(mlp_plan):
    with started(mlp_plan(1, 1), "--grace", "0.5", "--", "stubborn", num_ranks=1) as job:
        job.process.send_signal(signal.SIGTERM)
        code, _, _ = job.end()
    assert code == 143


@pytest.mark.fault(
    "launch",
    "two signals while nobody reads the launcher's output",
    "the output is dropped and everything is ended",
    exit_code=143,
)
def test_output_that_nobody_reads_does_not_hinder_the_end(mlp_plan):
    with started(mlp_plan(1, 2), "--", "chatter") as job:
        wait_until_full(job.process.stdout)
        job.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(PATIENCE_S) == 143


def wait_until_full(pipe: IO[str]) -> None:
    """But for a rest that is too small for a line."""
    deadline, size = time.monotonic() + PATIENCE_S, fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0] < 0.9 * size:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- Again and at once --------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "launch",
    "with --max-restarts: more faults than restarts",
    "the last one is reported",
    exit_code=1,
)
def test_a_job_meets_with_one_fault_too_many(mlp_plan, capfd, monkeypatch):
    monkeypatch.setattr(session_module, "_SETTLE_SECONDS", 0.1)
    words = ["--max-restarts", "1", "--checkpoints", "saved", "--", "misfortunes", "SIGKILL", "supervisor-SIGKILL"]
    assert launch(mlp_plan(1, 2), *words) == 1
    first, last = capfd.readouterr().err.splitlines()
    assert "was killed by SIGKILL" in first and "was lost with its host: its supervisor ended with code -9" in last
    wait_until_gone(str(mlp_plan(1, 2)))


@needs_oneflow
@pytest.mark.fault(
    "launch",
    "two launches in one directory at the same time",
    "each has ports and a log directory of its own, and both succeed",
    exit_code=0,
)
def test_two_launches_in_one_directory(mlp_plan):
    """Each trains a plan on its ranks: the losses are those of the same steps in numpy."""
    command = launch_command(mlp_plan(1, 2), "--", "train")
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, "")
        lines = shown(out)
        assert sorted(lines) == [0, 1]
        for (line,) in lines.values():
            first, *losses = line.split()
            assert first == "losses" and list(map(float, losses)) == pytest.approx(losses_by_hand(), rel=1e-5)
    folders = list(Path("autoddl-logs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["rank0.log", "rank1.log"]


# ---- Places that cannot be written to -----------------------------------------------------------------------------------

GIVEN_UP = r"autoddl: (\S+) cannot be written \(([^)]*)\): the ranks' output is shown, but no longer kept in files"


@pytest.mark.fault(
    "launch",
    "the disk of the log directory is full",
    "one warning names the file; the ranks' output is shown but no longer kept, and the job goes on",
    exit_code=0,
)
def test_logs_on_a_full_device(mlp_plan, capsys, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").symlink_to("/dev/full")
    assert launch(mlp_plan(1, 2), "--", "say", "hello") == 0
    captured = capsys.readouterr()
    assert sorted(shown(captured.out)) == [0, 1]
    match = re.fullmatch(GIVEN_UP + r"\n", captured.err)
    assert match and (match[1], match[2]) == (str(tmp_path / "logs" / "rank1.log"), "No space left on device")


@pytest.mark.fault(
    "launch",
    "the log directory cannot be made, and a rank fails",
    "one warning names the path; the failure is reported without a file that is not there",
    exit_code=1,
)
def test_no_log_directory(mlp_plan, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "_SETTLE_SECONDS", 0.1)
    (tmp_path / "logs").write_text("a file")
    assert launch(mlp_plan(1, 2), "--", "fail", "1", "raise", "sleep") == 1
    warning, error = capsys.readouterr().err.splitlines()
    assert re.fullmatch(GIVEN_UP, warning)
    assert error == "autoddl: rank 1 of 2 raised ValueError: 17 is not even"


def in_mounts(setup: str, plan: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command where `setup` has mounted what it likes."""
    script = f'{setup} && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *launch_command(plan, "--without-oneflow", *words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
    )


@needs_mounts
@pytest.mark.fault(
    "launch",
    "logs and temporary files are on a disk that gets full while the job runs",
    "one warning; all output is shown, and the job goes on",
    exit_code=0,
)
def test_a_disk_that_gets_full(mlp_plan, tmp_path):
    (tmp_path / "small").mkdir()
    setup = "mount -t tmpfs -o size=64k none small"
    words = ["--log-dir", "small/logs", "--", "write", "300000"]
    done = in_mounts(setup, mlp_plan(1, 2), *words, TMPDIR=str(tmp_path / "small"))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(GIVEN_UP + r"\n", done.stderr), done.stderr
    for lines in shown(done.stdout).values():
        assert lines == [f"{number:099}" for number in range(3000)]


@needs_mounts
@pytest.mark.fault(
    "launch",
    "the current directory is read-only",
    "one warning names the log file; the job goes on",
    exit_code=0,
)
def test_a_read_only_directory(mlp_plan):
    setup = "mount --bind . . && mount -o remount,bind,ro . && cd ."
    done = in_mounts(setup, mlp_plan(1, 1), "--", "say", "hello")
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(GIVEN_UP + r"\n", done.stderr)
    assert match and match[2] == "Read-only file system", done.stderr
    assert sorted(shown(done.stdout)) == [0]


@pytest.mark.fault(
    "launch",
    "the current directory has been deleted",
    "one line",
    exit_code=2,
)
def test_a_deleted_directory(mlp_plan, capsys, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert launch(mlp_plan(1, 2), "--", "say") == 2
    assert capsys.readouterr().err == "autoddl: the current folder has been removed; change to one that exists\n"


def test_a_batch_script_that_cannot_be_written(mlp_plan, capsys):
    Path("logs").write_text("a file")
    assert main(["launch", str(mlp_plan(1, 2)), str(SCRIPT), "--slurm", "--log-dir", "logs/mine"]) == 2
    err = capsys.readouterr().err
    assert "launch.sbatch: cannot be written (Not a directory); give another --log-dir FOLDER" in err


def test_a_terminal_without_a_ranks_letters(mlp_plan):
    done = subprocess.run(
        launch_command(mlp_plan(1, 1), "--without-oneflow", "--log-dir", "logs", "--", "say", "\u00fc"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
