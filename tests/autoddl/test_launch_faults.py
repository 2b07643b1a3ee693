"""`autoddl launch` on this machine under faults: of supervisors, keepers and disks, and by signals; nothing may be left behind."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoddl.__main__ import main
from autoddl.launching import session as session_module
from autoddl.launching.beats import Beats
from autoddl.launching.connection import Connection
from autoddl.launching.hosts import LOCALHOST, Host, Placement
from autoddl.pipelines.runtime.load import is_available

from ..processes import is_running
from .test_launch import SCRIPT, START, launch, shown, wait_until_gone
from .test_launch_hosts import parent

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")]
ONEFLOW = is_available()
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)
CAN_MOUNT = (
    sys.platform == "linux"
    and subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode
    == 0
)
needs_mounts = pytest.mark.skipif(not CAN_MOUNT, reason="file systems of one's own need root")
PATIENCE_S = 90.0


@pytest.fixture(autouse=True)
def _here(outside_of_jobs: None) -> None:
    """All tests."""


def command(plan: Path, *words: str) -> list[str]:
    return [sys.executable, "-c", START, "launch", str(plan), str(SCRIPT), *words]


def wait_until_dead(pids: set[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := {pid for pid in pids if is_running(pid)}:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


class Started:
    """A launch in a process of its own, with two ranks of which each has said "waiting PID"."""

    def __init__(self, process: subprocess.Popen[str], ranks: dict[int, int], children: set[int]) -> None:
        self.process, self.ranks, self.children = process, ranks, children

    @property
    def keeper(self) -> int:
        """Of rank 1."""
        return parent(self.ranks[1])

    @property
    def supervisor(self) -> int:
        return parent(self.keeper)

    def end(self) -> tuple[int, str]:
        """Wait for it; its exit code and what it said on stderr."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err


@contextlib.contextmanager
def started(plan: Path, *words: str) -> Iterator[Started]:
    """Afterwards nothing may be left of it."""
    options = ["--without-oneflow", "--log-dir", "logs", *words]
    with subprocess.Popen(
        command(plan, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        children: set[int] = set()
        try:
            assert process.stdout is not None
            ranks: dict[int, int] = {}
            while len(ranks) < 2:
                line = process.stdout.readline()
                assert line, process.communicate(timeout=PATIENCE_S)
                if match := re.match(r"\[rank (\d)\] (waiting|child) (\d+)$", line):
                    if match[2] == "child":
                        children.add(int(match[3]))
                    else:
                        ranks[int(match[1])] = int(match[3])
            yield Started(process, ranks, children)
            process.wait(PATIENCE_S)
            wait_until_dead({*ranks.values(), *children})
            wait_until_gone(str(plan))
        finally:
            process.kill()
            for pid in children:  # of a test that failed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


# ---- Supervisors and keepers --------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "launch",
    "a supervisor is suspended (SIGSTOP)",
    "it is given up after --host-timeout seconds of silence (here 1); the message names the host, and its ranks are ended",
    exit_code=1,
)
def test_a_suspended_supervisor_is_noticed(mlp_plan, record_property):
    with started(mlp_plan(1, 2), "--host-timeout", "1", "--", "escape") as job:
        supervisor = job.supervisor
        begun = time.monotonic()
        os.kill(supervisor, signal.SIGSTOP)
        code, err = job.end()
        record_property("seconds", time.monotonic() - begun)
        wait_until_dead({supervisor})
    assert code == 1
    assert re.fullmatch(
        r"autoddl: rank 0 of 2 was lost with its host: host localhost has not been heard of for \d+ s "
        rf"\(its supervisor, process {supervisor}, is stopped\) \(its output: .*/rank0.log\)\n",
        err,
    )


@pytest.mark.fault(
    "launch",
    "a supervisor is killed",
    "all ranks and everything that they started are ended; the message names the host's first rank",
    exit_code=1,
)
def test_a_killed_supervisor_leaves_nothing(mlp_plan):
    with started(mlp_plan(1, 2), "--", "escape") as job:
        os.kill(job.supervisor, signal.SIGKILL)
        code, err = job.end()
    assert code == 1
    assert err.startswith("autoddl: rank 0 of 2 was lost with its host: its supervisor ended with code -9 ")


@pytest.mark.fault(
    "launch",
    "the keeper of a rank, which ends what the rank started, is killed",
    "the system kills the rank, and the supervisor everything that it had started",
    exit_code=1,
)
def test_a_killed_keeper_leaves_nothing(mlp_plan):
    with started(mlp_plan(1, 2), "--", "escape") as job:
        os.kill(job.keeper, signal.SIGKILL)
        code, err = job.end()
    assert code == 1
    assert err.startswith("autoddl: rank 1 of 2 was killed by SIGKILL")


def test_a_suspended_keeper_is_a_suspended_rank(mlp_plan):
    with started(mlp_plan(1, 2), "--", "escape") as job:
        os.kill(job.keeper, signal.SIGSTOP)
        code, err = job.end()
    assert code == 1
    assert err.startswith("autoddl: rank 1 of 2 is stopped, as by SIGSTOP")


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
        wait_until_dead({*job.ranks.values(), *job.children})
        os.kill(job.process.pid, signal.SIGCONT)
        code, err = job.end()
    assert code == 1
    assert err.startswith(
        "autoddl: rank 0 of 2 was lost with its host: the launcher has not been heard of for 2 s (its output: "
    )


def test_a_launcher_that_slept_does_not_blame_the_hosts(monkeypatch):
    """Silence counts as long as somebody was there to hear what had come."""
    placement = Placement(Host("far"), range(2))
    connection = Connection(placement.host, ["sleep", "600"])
    job = SimpleNamespace(placements=[placement], beats=Beats(30.0), rendezvous=None, is_here_alone=False, num_ranks=2)
    session = session_module._Session(job, 0, None, None, pytest.fail)
    session._hosts, session._facts = [(placement, connection)], {"far": None}
    session._selector.register(connection, selectors.EVENT_READ)
    clock = [0.0]
    monkeypatch.setattr(session_module.time, "monotonic", lambda: clock[0])
    try:
        for seconds in (0.0, 0.1, 1000.0, 0.1, 1000.0):
            clock[0] += seconds
            session._listen_for_silence()
        assert connection.silence_s < 3 and not session._lost
        for _ in range(400):
            clock[0] += 0.1
            session._listen_for_silence()
        assert session._lost == {"far": "host far has not been heard of for 30 s"}
    finally:
        monkeypatch.undo()
        connection.close(time.monotonic())


def test_a_busy_supervisor_here_is_given_more_time_than_a_suspended_one():
    connection = Connection(Host(LOCALHOST), ["sleep", "600"])
    try:
        connection.listened(30.0)
        assert connection.silence(Beats(30.0)) == ""
        connection.listened(90.0)
        assert connection.silence(Beats(30.0)) == "has not been heard of for 120 s"
    finally:
        connection.close(time.monotonic())


# ---- Nothing is left behind ---------------------------------------------------------------------------------------------

ENDINGS = {
    "raise": (1, "rank 1 of 2 raised ValueError"),
    "SIGKILL": (1, "rank 1 of 2 was killed by SIGKILL"),
    "SIGSEGV": (1, "rank 1 of 2 crashed with SIGSEGV"),
    "success": (0, ""),
}


@pytest.mark.fault(
    "launch",
    "ranks have children that called setsid, double-forked, or both; then one rank fails, or all are done",
    "every one of them is ended with the job",
    exit_code="0 or 1",
)
@pytest.mark.parametrize("how", ENDINGS)
def test_children_that_escaped_are_ended(mlp_plan, how):
    expected, words = ENDINGS[how]
    with started(mlp_plan(1, 2), "--", "escape", "1", how) as job:
        assert len(job.children) == 12
        code, err = job.end()
    assert code == expected
    assert words in err and err.count("\n") == (how != "success")


@pytest.mark.fault(
    "launch",
    "`launch` gets SIGINT, SIGTERM or SIGHUP",
    "ranks get the signal and --grace seconds; then all that is left is ended, also children in sessions of their own",
    exit_code="130, 143, 129",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_job(mlp_plan, number):
    with started(mlp_plan(1, 2), "--", "escape") as job:
        job.process.send_signal(number)
        code, err = job.end()
    assert code == 128 + number
    assert err == f"autoddl: interrupted by {number.name}; all ranks have been ended\n"


@pytest.mark.fault(
    "launch",
    "a second signal, while ranks have a long time to end",
    "everything is ended at once",
    exit_code="130, 143, 129",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_the_job_at_once(mlp_plan, number, record_property):
    with started(mlp_plan(1, 2), "--grace", "600", "--", "stubborn") as job:
        job.process.send_signal(number)
        assert job.process.stdout is not None
        for _ in range(2):
            assert "not yet" in job.process.stdout.readline()
        begun = time.monotonic()
        job.process.send_signal(number)
        code, _ = job.end()
        record_property("seconds", time.monotonic() - begun)
    assert code == 128 + number


@pytest.mark.fault(
    "launch",
    "two signals while nobody reads the launcher's output",
    "the output is dropped and everything is ended",
    exit_code=143,
)
def test_output_that_nobody_reads_does_not_hinder_the_end(mlp_plan):
    with started(mlp_plan(1, 2), "--", "chatter") as job:
        time.sleep(1.0)  # for the pipe to be full
        job.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(PATIENCE_S) == 143


# ---- Again and at once --------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "launch",
    "with --max-restarts, other faults in each attempt: a rank or its supervisor is killed or suspended, or a rank raises",
    "each is named, and the job is started again until it succeeds",
    exit_code=0,
)
def test_a_job_survives_a_fault_in_each_attempt(mlp_plan, capfd):
    """Six attempts, two of which wait for a suspended process: over 10 s."""
    faults = ["raise", "SIGKILL", "SIGSTOP", "supervisor-SIGKILL", "supervisor-SIGSTOP"]
    options = ["--max-restarts", "5", "--host-timeout", "1.5"]
    assert launch(mlp_plan(1, 2), *options, "--", "misfortunes", *faults) == 0
    captured = capfd.readouterr()
    assert Path("attempts").read_text() == "012345"
    words = [
        "raised ValueError",
        "killed by SIGKILL",
        "is stopped",
        "supervisor ended with code -9",
        "not been heard of",
    ]
    lines = captured.err.splitlines()
    assert len(lines) == len(words)
    for number, (line, word) in enumerate(zip(lines, words), 1):
        assert word in line and line.endswith(f"; starting again ({number} of 5)")
    wait_until_gone(str(mlp_plan(1, 2)))


@pytest.mark.fault(
    "launch",
    "with --max-restarts: more faults than restarts",
    "the last one is reported",
    exit_code=1,
)
def test_a_job_meets_with_one_fault_too_many(mlp_plan, capfd):
    assert launch(mlp_plan(1, 2), "--max-restarts", "1", "--", "misfortunes", "SIGKILL", "supervisor-SIGKILL") == 1
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
    processes = [
        subprocess.Popen(
            command(mlp_plan(1, 2), "--", "sum_ranks"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, "")
        assert {rank: said[0].split()[:2] for rank, said in shown(out).items()} == {r: ["sum", "1.0"] for r in range(2)}
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
def test_no_log_directory(mlp_plan, capsys, tmp_path):
    (tmp_path / "logs").write_text("a file")
    assert launch(mlp_plan(1, 2), "--", "fail", "1", "raise", "sleep") == 1
    warning, error = capsys.readouterr().err.splitlines()
    assert re.fullmatch(GIVEN_UP, warning)
    assert error == "autoddl: rank 1 of 2 raised ValueError: 17 is not even"


def in_mounts(setup: str, plan: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command where `setup` has mounted what it likes."""
    script = f'{setup} && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command(plan, "--without-oneflow", *words)],
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
    done = in_mounts(setup, mlp_plan(1, 2), "--", "say", "hello")
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(GIVEN_UP + r"\n", done.stderr)
    assert match and match[2] == "Read-only file system", done.stderr
    assert sorted(shown(done.stdout)) == [0, 1]


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
    assert "launch.sbatch: cannot be written (Not a directory); give another folder with --log-dir" in err


def test_a_terminal_without_a_ranks_letters(mlp_plan):
    done = subprocess.run(
        command(mlp_plan(1, 1), "--without-oneflow", "--log-dir", "logs", "--", "say", "\u00fc"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
