"""Ctrl-C at every moment of a command's start and end is one line and exit code 130.

The moments are the imports: a finder that knows no module is asked before each, forks, and the child interrupts itself there. So
one run of the command tries all of them (or every few).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")

#: The child goes on where the parent was; what it wrote and its exit code are compared by the parent.
HARNESS = """
import atexit, os, sys
from autoddl.__main__ import main

num_tried, num_seen, wrong, every = 0, 0, [], int(sys.argv.pop(1))

def strike(where):
    global num_tried
    global num_seen
    num_seen += 1
    if num_tried < 0 or num_seen % every:
        return
    said = os.open("said", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    child = os.fork()
    if child == 0:
        num_tried = -1
        os.dup2(said, 2)
        os.kill(os.getpid(), 2)
        return
    status = os.waitpid(child, 0)[1]
    text = os.pread(said, 10000, 0).decode()
    os.close(said)
    num_tried += 1
    if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) != 130 or text != "autoddl: interrupted\\n":
        wrong.append((where, status, text))

class Finder:
    def find_spec(self, name, path=None, target=None):
        strike("import of " + name)

def report():
    global num_seen
    num_seen = -1  # so that this one is tried
    strike("exit")
    if num_tried > 0:
        import json
        with open("result.json", "w") as file:
            json.dump({"tried": num_tried, "wrong": wrong}, file)

sys.meta_path.insert(0, Finder())
atexit.register(report)
sys.argv[:1] = ["autoddl"]
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.fault(
    "search", "Ctrl-C while a command starts or ends", "one line says that it was interrupted", exit_code=130
)
@pytest.mark.parametrize(
    ("words", "code", "every"),
    [
        (["--help"], 0, 10),
        # Once the command works, an interrupted import goes on to its end: a second for each that is tried.
        (["schedule", "1f1b", "--stages", "2", "--micro-batches", "2"], 0, 25),
        # All that `plan` imports before it searches; what Ctrl-C does then is tested with the searches.
        (["plan", "mlp:64,64", "--cluster", "missing"], 2, 2),
    ],
    ids=["help", "schedule", "plan"],
)
def test_an_interrupt_at_every_import_and_at_the_end(tmp_path, words, code, every):
    """Over 10 s on a busy machine: each of hundreds of moments takes a process."""
    command = [sys.executable, "-c", HARNESS, str(every), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stderr
    result = json.loads(Path(tmp_path, "result.json").read_text())
    assert result["wrong"] == []
    assert result["tried"] >= 100 // every


IGNORED = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from autoddl.__main__ import main
sys.argv[:] = ["autoddl", "schedule", "list"]
code = main()
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
sys.exit(code)
"""


def test_where_interrupts_are_ignored_they_stay_so(tmp_path):
    """As in the background of a shell, or under nohup."""
    done = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "gpipe" in done.stdout


IN_A_DESTRUCTOR = """
import os, signal, sys, time
from autoddl.__main__ import main
import autoddl.cli.schedule as schedule

class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

def run(arguments):
    Thing()
    time.sleep(60)
    return 0

schedule.run = run
sys.argv[:] = ["autoddl", "schedule", "list"]
sys.exit(main())
"""


def test_an_interrupt_that_hits_a_destructor_is_not_lost():
    """Python itself prints a traceback then, and goes on."""
    command = [sys.executable, "-c", IN_A_DESTRUCTOR]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "autoddl: interrupted\n")


DURING_AN_IMPORT = """
import sys, time
from autoddl.__main__ import main
import autoddl.cli.schedule as schedule

def run(arguments):
    import slow
    time.sleep(60)

schedule.run = run
sys.argv[:] = ["autoddl", "schedule", "list"]
sys.path.insert(0, ".")
sys.exit(main())
"""
SLOW = """
import os, signal, time
for _ in range({times}):
    os.kill(os.getpid(), signal.SIGINT)
time.sleep({seconds})
print("imported")
"""


def _during_an_import(tmp_path: Path, times: int, seconds: float) -> subprocess.CompletedProcess[str]:
    (tmp_path / "slow.py").write_text(SLOW.format(times=times, seconds=seconds))
    command = [sys.executable, "-c", DURING_AN_IMPORT]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)


def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path):
    done = _during_an_import(tmp_path, times=1, seconds=1)
    assert (done.returncode, done.stdout, done.stderr) == (130, "imported\n", "autoddl: interrupted\n")


def test_a_second_interrupt_does_not_wait(tmp_path):
    """A user's file may compute while it is imported."""
    done = _during_an_import(tmp_path, times=2, seconds=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "autoddl: interrupted\n")
