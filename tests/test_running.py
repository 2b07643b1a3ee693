"""How this suite itself is run: by several workers, ended where a test hangs, and the page of faults written by one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .faults import ROOT
from .processes import wait_until_ended

#: Each test runs pytest.
pytestmark = pytest.mark.slow

PREAMBLE = "from __future__ import annotations\nimport os, signal, subprocess, sys, time\nimport pytest\n"
#: Runs until it is killed; on SIGUSR1 it writes its stack into its log, as ranks do.
CHILD = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
def waits_for_ever():
    print("ready", flush=True)
    time.sleep(1000)
waits_for_ever()
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A repository of its own, with this one's way to run tests and none of its tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs").mkdir()
    for path in (ROOT / "tests").glob("*.py"):
        if not path.name.startswith("test_"):
            shutil.copy(path, tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "docs" / "faults.md").write_text(
        "# Faults\n<!-- make faults: begin -->\n<!-- make faults: end -->\nThe end.\n"
    )
    return tmp_path


def run_suite(suite: Path, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The test command on these tests, by two workers."""
    (suite / "tests" / "test_these.py").write_text(PREAMBLE + tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [str(suite / ".ci" / "test"), sys.prefix, "-n", "2", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=suite)


def closing_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.rstrip().splitlines()[-1]


def test_tests_of_ranks_run_in_two_streams(suite):
    """Those on pools and those with processes of their own, each in one worker; the other ones are shared by all workers."""
    tests = """
@pytest.fixture
def ranks():
    pass

def note(what, worker_id):
    with open(__file__ + ".log", "a") as file:
        file.write(f"{what} {worker_id}\\n")

@pytest.mark.parametrize("number", range(3))
def test_with_the_fixture(ranks, worker_id, number):
    note("ranks", worker_id)

@pytest.mark.ranks
@pytest.mark.parametrize("number", range(4))
def test_with_the_mark(worker_id, number):
    note("ranks", worker_id)
    time.sleep(0.5)

@pytest.mark.ranks("launches")
@pytest.mark.parametrize("number", range(3))
def test_launches(worker_id, number):
    note("launches", worker_id)
    time.sleep(0.5)

@pytest.mark.parametrize("number", range(20))
def test_others(worker_id, number):
    note("others", worker_id)
    time.sleep(0.05)
"""
    done = run_suite(suite, tests, "-v")
    assert done.returncode == 0 and re.fullmatch(r"=+ 30 passed in [\d.]+s =+", closing_line(done)), done.stdout
    lines = (suite / "tests" / "test_these.py.log").read_text().split("\n")[:-1]
    for unit, count in (("ranks", 7), ("launches", 3)):
        workers = [line for line in lines if line.startswith(unit)]
        assert len(workers) == count and len(set(workers)) == 1
    assert sum(line.startswith("others") for line in lines) == 20
    fast = run_suite(suite, tests, "-m", "not ranks", "-n", "0", "--collect-only", "-q")
    assert "20/30 tests collected" in fast.stdout


#: The child is started by the test before, which takes its time.
HANGS = f"""
CHILD = {CHILD!r}
children = []

@pytest.mark.ranks
def test_before(tmp_path):
    log = (tmp_path / "rank.log").open("wb")
    environment = {{**os.environ, "RANK": "7"}}
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=log, stderr=log, start_new_session=True, env=environment)
    while b"ready" not in (tmp_path / "rank.log").read_bytes():
        time.sleep(0.01)
    children.append(child)

@pytest.mark.ranks
@pytest.mark.timeout(1)
def test_hangs():
    with open(__file__ + ".log", "a") as file:
        file.write(f"{{children[0].pid}}\\n")
    hangs_here()

def hangs_here():
    children[0].wait()

@pytest.mark.ranks
@pytest.mark.parametrize("number", range(4))
def test_after(number):
    pass

@pytest.mark.parametrize("number", range(4))
def test_others(number):
    pass
"""
#: Where no Python thread can run, faulthandler's own does.
KEEPS_THE_LOCK = """
import ctypes

@pytest.mark.timeout(2)
def test_hangs_with_the_lock():
    keeps_the_lock()

def keeps_the_lock():
    ctypes.PyDLL(None).sleep(1000)
"""


def test_a_test_that_hangs_fails_with_all_stacks_and_the_others_run(suite):
    done = run_suite(suite, HANGS + KEEPS_THE_LOCK)
    assert done.returncode == 1
    assert re.fullmatch(r"=+ 2 failed, 9 passed in [\d.]+s =+", closing_line(done)), done.stdout
    assert "Timeout (0:00:02" in done.stdout and "in keeps_the_lock" in done.stdout
    assert "FAILED tests/test_these.py::test_hangs" in done.stdout
    assert "tests/test_these.py::test_hangs took more than 1 s" in done.stdout
    for function in ("in hangs_here", "in test_hangs", "in waits_for_ever"):
        assert function in done.stdout
    assert "rank 7" in done.stdout and "rank.log:\nready\n" in done.stdout
    (pid,) = map(int, (suite / "tests" / "test_these.py.log").read_text().split())  # it ran once
    wait_until_ended([pid])


def test_a_test_that_hangs_in_one_process_ends_the_run_with_all_stacks(suite):
    done = run_suite(suite, HANGS, "-n", "0")
    assert done.returncode == 1
    for said in ("test_hangs took more than 1 s", "in hangs_here", "in waits_for_ever"):
        assert said in done.stderr
    (pid,) = map(int, (suite / "tests" / "test_these.py.log").read_text().split())
    wait_until_ended([pid])


def test_slow_tests_that_do_not_say_why_are_listed(suite):
    tests = """
def test_silent():
    time.sleep(0.3)

def test_quick():
    pass

def test_documented():
    \"\"\"It sleeps.\"\"\"
    time.sleep(0.3)
"""
    conftest = suite / "tests" / "conftest.py"
    conftest.write_text(conftest.read_text().replace("SLOW_SECONDS = 10.0", "SLOW_SECONDS = 0.25"))
    done = run_suite(suite, tests)
    assert done.returncode == 0
    listed = done.stdout.partition("without a docstring that says why")[2]
    assert "s tests/test_these.py::test_silent\n" in listed
    assert "documented" not in listed and "quick" not in listed.partition("slowest")[0]


FAULTS = """
@pytest.mark.fault("launch", "a rank is killed", "all are ended", exit_code=1)
@pytest.mark.parametrize("seconds", [4, 8])
def test_killed(record_property, seconds):
    record_property("seconds", seconds)

@pytest.mark.ranks
@pytest.mark.fault("output", "the disk is full", "one line says so", exit_code=2)
def test_full():
    time.sleep(0.5)

def test_of_no_fault():
    raise AssertionError("--faults runs faults only")
"""


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_the_page_of_faults_is_written_from_the_reports_of_all_workers(suite, num_workers):
    done = run_suite(suite, FAULTS, "--faults", "-n", num_workers)
    assert done.returncode == 0, done.stdout
    page = (suite / "docs" / "faults.md").read_text()
    assert "| a rank is killed | all are ended | 8.0 | 1 | `tests/test_these.py::test_killed` |" in page
    (seconds,) = re.findall(
        r"\| the disk is full \| one line says so \| ([\d.]+) \| 2 \| `tests/test_these.py::test_full` \|", page
    )
    assert float(seconds) >= 0.5
    assert page.endswith("The end.\n") and "2 faults written to" in done.stdout


def test_the_page_stays_where_a_test_of_a_fault_fails(suite):
    before = (suite / "docs" / "faults.md").read_text()
    done = run_suite(suite, FAULTS.replace("time.sleep(0.5)", "raise ValueError"), "--faults", "-n", "0")
    assert done.returncode == 1 and (suite / "docs" / "faults.md").read_text() == before
