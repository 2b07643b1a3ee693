"""Starting, watching and ending ranks. What needs no OneFlow is tested without: on every Python, and quickly."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.failures import FailureKind, RankError, RankFailure, RankUserError
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.pipelines.runtime.ranks.network import namespace_available
from autoddl.pipelines.runtime.ranks.processes import share_of_cores
from autoddl.pipelines.runtime.ranks.rank import resolve_target

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")]

JOBS = Path(__file__).with_name("launcher_jobs.py")
ONEFLOW = is_available()
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)


def is_alive(pid: int) -> bool:
    """Whether a process of that number, or in the process group of that number, runs; orphaned zombies are init's affair."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if pid in (int(path.parent.name), int(group)) and state != "Z":
                return True
    return False


def is_unreaped(pid: int) -> bool:
    """Whether a child of ours of that number runs or is a zombie."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def wait_until_gone(pids: list[int], patience_s: float = 30.0) -> None:
    """For processes that somebody else has to reap."""
    deadline = time.monotonic() + patience_s
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.05)


@contextlib.contextmanager
def plain_pool(num_ranks: int, tmp_path: Path, **options) -> Iterator[RankPool]:
    """Ranks without OneFlow, of which nothing may be left at the end, not even a zombie."""
    with RankPool(num_ranks, with_oneflow=False, log_dir=tmp_path, **options) as pool:
        pids = pool.pids
        assert len(set(pids)) == num_ranks and all(is_alive(pid) for pid in pids)
        yield pool
    assert not any(is_alive(pid) or is_unreaped(pid) for pid in pids)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """For all tests that leave the ranks as they are."""
    with plain_pool(3, tmp_path_factory.mktemp("pool")) as started:
        yield started


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RankPool]:
    """For a test that ends the ranks."""
    with plain_pool(2, tmp_path) as started:
        yield started


# ---- Jobs ---------------------------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_ranks(pool):
    assert pool.run(f"{JOBS}:square", 7) == [(0, 49), (1, 49), (2, 49)]
    assert pool.run_each(f"{JOBS}:square", [(1,), (2,), (3,)]) == [(0, 1), (1, 4), (2, 9)]
    assert pool.run("os.path:join", "a", "b") == ["a/b"] * 3
    assert pool.run(os.path.join, "a", "b") == ["a/b"] * 3
    assert pool.is_open


def test_results_and_arguments_may_be_large(pool):
    data = os.urandom(3_000_000)
    assert pool.run("builtins:bytes", data) == [data] * 3
    assert [len(result) for result in pool.run(f"{JOBS}:large", 5_000_000)] == [5_000_000] * 3


def test_reports_come_while_the_job_runs(pool):
    reports = []
    assert pool.run(f"{JOBS}:count", 3, on_report=lambda rank, value: reports.append((rank, value))) == [3, 3, 3]
    assert sorted(reports) == [(rank, (rank, i)) for rank in range(3) for i in range(3)]
    for rank in range(3):
        assert [value[1] for who, value in reports if who == rank] == [0, 1, 2]
    assert pool.run(f"{JOBS}:count", 2) == [2, 2, 2]  # nobody listens


def test_ranks_know_who_they_are(pool):
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "ONEFLOW_TIMEOUT_SECONDS",
    ]
    results = pool.run(f"{JOBS}:environment", names)
    assert [(r["RANK"], r["LOCAL_RANK"]) for r in results] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert {
        (r["WORLD_SIZE"], r["MASTER_ADDR"], r["OMP_NUM_THREADS"], r["ONEFLOW_TIMEOUT_SECONDS"]) for r in results
    } == {("3", "127.0.0.1", "1", "15")}
    assert len({r["MASTER_PORT"] for r in results}) == 1


def test_the_environment_can_be_added_to(tmp_path):
    with plain_pool(1, tmp_path, environment={"OMP_NUM_THREADS": "2", "NEW": "x"}, stall_timeout_s=7.4) as pool:
        (got,) = pool.run(f"{JOBS}:environment", ["OMP_NUM_THREADS", "NEW", "ONEFLOW_TIMEOUT_SECONDS"])
    assert got == {"OMP_NUM_THREADS": "2", "NEW": "x", "ONEFLOW_TIMEOUT_SECONDS": "7"}


def test_output_goes_to_a_log_per_rank(pool):
    pool.run(f"{JOBS}:talk", "hello")
    said = [(pool.log_dir / f"rank{rank}.log").read_text() for rank in range(3)]
    assert said == [f"hello from {rank}\n" for rank in range(3)]


def test_one_rank_may_be_shown(tmp_path, capfd):
    with plain_pool(2, tmp_path, show_ranks=[1]) as pool:
        pool.run(f"{JOBS}:talk", "hello")
    assert capfd.readouterr().out == "hello from 1\n"
    assert (tmp_path / "rank0.log").read_text() == "hello from 0\n"


def launch(target, num_ranks, *arguments, **options):
    """Run one job on new ranks."""
    with RankPool(num_ranks, **options) as pool:
        return pool.run(target, *arguments)


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert launch(f"{JOBS}:square", 2, 3, with_oneflow=False) == [(0, 9), (1, 9)]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RankError) as caught:
        launch(f"{JOBS}:do_on", 1, 0, "raise", with_oneflow=False)
    assert "17 is not even" in caught.value.log.read_text()  # but evidence is
    assert [path.name for path in caught.value.log.parent.iterdir() if path.suffix == ".pickle"] == []
    with pytest.raises(RankError) as caught:  # from the start, too
        launch("os:getpid", 1, with_oneflow=False, environment={"PYTHONHOME": "/nowhere"})
    assert caught.value.log.read_text()


# ---- Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("raise", "rank 1 of 2 raised ValueError: 17 is not even (its output:"),
        ("interrupt", "rank 1 of 2 raised KeyboardInterrupt ("),
        ("exit", "rank 1 of 2 raised SystemExit: 3"),
        ("unpicklable", "rank 1 of 2 raised OSError: cannot be pickled"),
        ("leave", "rank 1 of 2 exited with code 4 before it had finished"),
        ("SIGKILL", "rank 1 of 2 was killed by SIGKILL"),
        ("SIGTERM", "rank 1 of 2 was killed by SIGTERM"),
        ("abort", "rank 1 of 2 crashed with SIGABRT"),
        ("SIGSEGV", "rank 1 of 2 crashed with SIGSEGV"),
        ("SIGSTOP", "rank 1 of 2 is stopped, as by SIGSTOP"),
    ],
)
def test_one_rank_fails(pair, tmp_path, action, words):
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pair.run(f"{JOBS}:do_on", 1, action)
    assert time.monotonic() - started < 60
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.rank == 1
    assert caught.value.log == tmp_path / "rank1.log"
    assert not isinstance(caught.value, UserError)
    assert not pair.is_open
    assert not any(is_alive(pid) for pid in pair.pids)  # at once, not only when the pool is closed
    with pytest.raises(RuntimeError, match="have been ended"):
        pair.run(f"{JOBS}:square", 1)
    if action == "raise":
        assert "Traceback" in (tmp_path / "rank1.log").read_text()


@pytest.mark.parametrize(("kind", "named"), [(FailureKind.CRASHED, 1), (FailureKind.RAISED, 0)])
def test_a_crash_waits_for_the_death_that_caused_it(pool, monkeypatch, kind, named):
    """The others' connections break some time before a killed process has ended; what a rank raises is a cause by itself."""
    ends = time.monotonic() + 1.0
    killed = RankFailure(1, FailureKind.KILLED, "was killed by SIGKILL")

    def look(patience_s):
        return [], [killed] if time.monotonic() >= ends else []

    monkeypatch.setattr(pool._ranks, "poll", look)
    assert pool._causes([RankFailure(0, kind, "is gone")])[0].rank == named


def test_a_users_error_stays_a_users_error(pair):
    with pytest.raises(RankUserError, match="rank 1 of 2 refused: batch 17 is odd; take an even one") as caught:
        pair.run(f"{JOBS}:do_on", 1, "refuse")
    assert isinstance(caught.value, UserError)


def test_a_job_may_take_too_long(pair):
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pair.run(f"{JOBS}:do_on", -1, "", timeout_s=3.0)
    assert "rank 0 of 2 is late" in str(caught.value)
    assert "did not end within 3 s" in str(caught.value)
    for rank in range(2):
        assert f"rank {rank} is at {JOBS}:" in str(caught.value)
    assert "in do_on" in str(caught.value)
    assert time.monotonic() - started < 60


def test_reports_do_not_buy_time(pair):
    with pytest.raises(RankError, match=r"rank 0 of 2 is late: .*count_for_ever did not end within 0\.5 s"):
        pair.run(f"{JOBS}:count_for_ever", timeout_s=0.5)


def test_an_idle_rank_that_died_is_noticed_by_the_next_job(pair):
    os.kill(pair.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        pair.run(f"{JOBS}:square", 2)


def test_a_rank_that_fails_while_it_starts(tmp_path):
    broken = {"PYTHONHOME": "/nowhere"}
    with pytest.raises(RankError, match=r"rank [01] of 2 exited with code 1 before it had finished"):
        RankPool(2, with_oneflow=False, log_dir=tmp_path, environment=broken)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("square", "is not module:function or file.py:function"),
        ("os.path:no_such_function", "os.path has no function no_such_function"),
        ("/nowhere/jobs.py:f", "target file /nowhere/jobs.py does not exist"),
    ],
)
def test_what_names_no_function(target, words):
    with pytest.raises(UserError, match=re.escape(words)):
        resolve_target(target)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "os.path:no_such_function",
            "refused: target 'os.path:no_such_function': os.path has no function no_such_function",
        ),
        ("no_such_module:f", "raised ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{JOBS}:return_unpicklable", "raised TypeError: cannot pickle"),
    ],
)
def test_what_cannot_be_run(tmp_path, target, words):
    with plain_pool(1, tmp_path) as single, pytest.raises(RankError, match=re.escape(f"rank 0 of 1 {words}")):
        single.run(target)


def test_results_that_the_launcher_cannot_read_end_the_ranks(pair):
    with pytest.raises(ModuleNotFoundError, match="autoddl_target_launcher_jobs"):
        pair.run(f"{JOBS}:return_from_afar")
    assert not any(is_alive(pid) for pid in pair.pids)


def test_mistakes_that_are_seen_before_anything_is_sent(pool):
    with pytest.raises(UserError, match="local to a function or a lambda"):
        pool.run(lambda: 1)
    with pytest.raises(UserError, match=r"arguments of .*square cannot be sent to ranks"):
        pool.run(f"{JOBS}:square", sys.stderr)
    with pytest.raises(UserError, match="2 sets of arguments for 3 ranks"):
        pool.run_each(f"{JOBS}:square", [(1,), (2,)])
    assert pool.run(f"{JOBS}:square", 1) == [(0, 1), (1, 1), (2, 1)]  # and so the ranks are still there
    with pytest.raises(UserError, match="0 ranks cannot be started"):
        RankPool(0)


# ---- No process is left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["close", "raise", "SIGKILL"])
def test_children_of_ranks_end_with_them(tmp_path, ending):
    with plain_pool(2, tmp_path) as pool:
        children = list(itertools.chain(*pool.run(f"{JOBS}:start_children")))
        assert len(children) == 4 and all(is_alive(pid) for pid in children)
        if ending != "close":
            with pytest.raises(RankError):
                pool.run(f"{JOBS}:do_on", 0, ending)
    wait_until_gone(children)


def test_the_launchers_own_orphans_are_none_of_our_business(tmp_path):
    """Only what ranks started is ended."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid)"  # -3: DEVNULL
    with plain_pool(1, tmp_path) as pool:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        orphan = int(done.stdout)
        assert pool.run(f"{JOBS}:square", 3) == [(0, 9)]
    try:
        assert is_alive(orphan)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_places_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"folder .*/file/logs for the output of ranks cannot be created \(Not a directory\)"
    ):
        RankPool(1, with_oneflow=False, log_dir=tmp_path / "file" / "logs")
    (tmp_path / "rank0.log").mkdir()
    with pytest.raises(UserError, match=r"ranks cannot be started: .*rank0\.log"):
        RankPool(1, with_oneflow=False, log_dir=tmp_path)


LAUNCHER = """
import sys, time
from autoddl.pipelines.runtime.ranks.launcher import RankPool
with RankPool(2, with_oneflow=False, log_dir=sys.argv[1]) as pool:
    print(*pool.pids, flush=True)
    pool.run(sys.argv[2] + ":do_on", -1, "")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_launcher(tmp_path, number):
    code = LAUNCHER.replace("log_dir=sys.argv[1]", "log_dir=__import__('pathlib').Path(sys.argv[1])")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(JOBS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
        time.sleep(0.3)  # the job is under way
        os.killpg(process.pid, number)  # as the terminal does it: to the launcher's group, in which the ranks are not
        process.wait(timeout=30)
        wait_until_gone(pids)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_error_of_the_launchers_own_ends_the_ranks(tmp_path):
    with pytest.raises(ZeroDivisionError), plain_pool(2, tmp_path) as pool:
        pids = pool.pids
        pool.run(f"{JOBS}:count", 1, on_report=lambda rank, value: 1 // 0)
    assert not any(is_alive(pid) for pid in pids)


# ---- Scripts ----------------------------------------------------------------------------------------------------------------


def test_scripts(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # logs of failures stay
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, pathlib, helper\n"
        "assert __name__ == '__main__'\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(' '.join(sys.argv[1:]) + helper.WORD)\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    (tmp_path / "helper.py").write_text("WORD = '!'\n")  # next to the script, as `python script.py` would find it
    run_script = "autoddl.pipelines.runtime.ranks.rank:run_script"
    launch(run_script, 2, str(script), [str(tmp_path), "0"], with_oneflow=False)
    assert [(tmp_path / rank).read_text() for rank in "01"] == [f"{tmp_path} 0!"] * 2
    with pytest.raises(RankError, match=r"raised RuntimeError: .*script\.py exited with 5"):
        launch(run_script, 1, str(script), [str(tmp_path), "5"], with_oneflow=False)


def test_a_launching_script_needs_no_installation_of_its_own(tmp_path):
    """Ranks find the functions of the very script that starts them."""
    script = tmp_path / "example.py"
    script.write_text(
        "from autoddl.pipelines.runtime.ranks.launcher import RankPool\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with RankPool(2, with_oneflow=False) as pool:\n        print(pool.run(double, 21))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[42, 42]\n", "")


# ---- With OneFlow -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(ONEFLOW), reason="OneFlow is here")
def test_without_oneflow_the_reason_is_given():
    with pytest.raises(UserError, match="cannot start OneFlow ranks: OneFlow"):
        RankPool(2)


def check_quiet(pool):
    """They join, and say nothing."""
    num_ranks = pool.num_ranks
    assert pool.run(f"{JOBS}:oneflow_world") == [(rank, num_ranks) for rank in range(num_ranks)]
    assert [(pool.log_dir / f"rank{rank}.log").read_text() for rank in range(num_ranks)] == [""] * num_ranks


@needs_oneflow
def test_a_single_rank(tmp_path, capfd):
    loaded_before = "oneflow" in sys.modules
    with RankPool(1, log_dir=tmp_path) as pool:
        check_quiet(pool)
        pids = pool.pids
    assert not any(is_alive(pid) for pid in pids)
    assert (tmp_path / "rank0.log").read_text() == ""  # of its end, too
    assert capfd.readouterr() == ("", "")
    assert ("oneflow" in sys.modules) == loaded_before


@needs_oneflow
def test_two_jobs_at_once_do_not_meet(tmp_path, capfd):
    """Each has a port of its own: nobody joins the other's ranks."""
    logs = [tmp_path / "a", tmp_path / "b"]
    with RankPool(2, log_dir=logs[0]) as one, RankPool(2, log_dir=logs[1]) as other:
        for pool in (one, other):
            check_quiet(pool)
        ports = [pool.run(f"{JOBS}:environment", ["MASTER_PORT"])[0]["MASTER_PORT"] for pool in (one, other)]
        pids = one.pids + other.pids
    assert ports[0] != ports[1]
    assert not any(is_alive(pid) for pid in pids)
    assert [(folder / f"rank{rank}.log").read_text() for folder in logs for rank in range(2)] == [""] * 4
    assert capfd.readouterr() == ("", "")


def check_failure(pool, words, job, *arguments):
    """The job fails in time, in one line with these words, and the ranks end; returns what was raised."""
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(f"{JOBS}:{job}", *arguments, timeout_s=60)
    assert time.monotonic() - started < 60
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(is_alive(pid) for pid in pool.pids)
    return caught.value


@needs_oneflow
@pytest.mark.parametrize(
    ("job", "words"),
    [
        (("do_while_others_communicate", 1, "raise"), "rank 1 of 2 raised ValueError: 17 is not even"),
        (("do_while_others_communicate", 1, "SIGKILL"), "rank 1 of 2 was killed by SIGKILL"),
        (("do_while_others_communicate", 0, "leave"), "rank 0 of 2 exited with code 4"),
        (("do_while_others_wait", 1, "SIGSTOP", "barrier"), "rank 1 of 2 is stopped, as by SIGSTOP"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_rank_fails_while_others_communicate(tmp_path, job, words):
    with RankPool(2, log_dir=tmp_path) as pool:
        check_failure(pool, words, *job)


@needs_oneflow
@pytest.mark.parametrize(
    "job", [("do_while_others_wait", 1, "sleep", "all-reduce"), ("wait_for_the_wrong_rank",)], ids=lambda job: job[0]
)
def test_waiting_in_vain_is_given_up(tmp_path, job):
    """However busy the machine is: the one that is waited for never comes."""
    with RankPool(2, log_dir=tmp_path, stall_timeout_s=1.0) as pool:
        check_failure(pool, "waited too long for another rank in communication (more than 1 s)", *job)


@needs_oneflow
def test_who_is_waited_for_is_told_by_where_it_stands(tmp_path):
    with RankPool(2, log_dir=tmp_path, stall_timeout_s=4.0) as pool:
        words = "waited too long for another rank in communication (more than 4 s)"
        error = check_failure(pool, words, "do_while_others_wait", 1, "sleep", "barrier")
    assert f"rank 1 is at {JOBS}:" in str(error)
    assert "in trouble" in str(error)
    assert error.rank == 0


def test_the_stall_timeout_is_short_enough_by_default():
    assert RankPool.__init__.__kwdefaults__["stall_timeout_s"] + 3 < 20


@pytest.mark.skipif(not namespace_available(), reason=namespace_available().reason)
def test_ranks_on_a_network_of_their_own(tmp_path):
    here = os.readlink("/proc/self/ns/net")
    with plain_pool(2, tmp_path, private_network=True) as pool:
        networks = pool.run("os:readlink", "/proc/self/ns/net")
    assert len(set(networks)) == 1 and networks[0] != here


@pytest.mark.parametrize(
    ("available", "num_ranks", "shares"),
    [
        ({3, 5}, 2, [(3,), (5,)]),
        ({0, 1}, 4, [(0,), (1,), (0,), (1,)]),
        ({0, 1, 2, 3, 4}, 2, [(0, 1), (2, 3)]),
        ({0, 1, 2}, 1, [(0, 1, 2)]),
    ],
)
def test_ranks_share_the_cores_evenly(monkeypatch, available, num_ranks, shares):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: available)
    assert [share_of_cores(rank, num_ranks) for rank in range(num_ranks)] == shares
