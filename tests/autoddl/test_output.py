"""Standard output that cannot be written, names that a terminal cannot show, outputs that are inputs, and what errors become."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.ranks.failures import RankError, RankUserError

needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")

LIST = ("schedule", "list")
LARGE = ("schedule", "1f1b", "--stages", "8", "--micro-batches", "64", "--format", "svg")
PLAN = ("plan", "mlp:64,64", "--cluster", "local-cpu")


def run(*words: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; its output is taken unless ``options`` say otherwise."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    environment = {**os.environ, **(env or {})}
    command = [sys.executable, "-m", "autoddl", *words]
    return subprocess.run(command, text=True, timeout=240, check=False, env=environment, errors="replace", **options)


def is_one_line(text: str) -> bool:
    return text.startswith("autoddl: ") and text.endswith("\n") and text.count("\n") == 1


# ---- Standard output -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault("output", "standard output is a full disk", "one line says so", exit_code=2)
@needs_dev_full
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [LARGE, (*LIST, "--json"), ("schedule", "--help")], ids=["svg", "json", "help"])
def test_a_full_disk(words, unbuffered):
    with open("/dev/full", "w") as full:
        done = run(*words, stdout=full, env={"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (
        2,
        "autoddl: standard output cannot be written (No space left on device)\n",
    )


@pytest.mark.slow
@pytest.mark.fault(
    "output",
    "a disk is full after a part of the output",
    "one line says so, with PYTHONUNBUFFERED too, where Python itself takes the part for all",
    exit_code=2,
)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_part_of_the_output_is_not_taken_for_all(tmp_path, unbuffered):
    """A limit on the size of files stands for the disk: writes become short, and then fail."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    with open(tmp_path / "out.svg", "w") as out:
        done = run(
            *LARGE, stdout=out, env={"PYTHONUNBUFFERED": unbuffered, "PYTHONDONTWRITEBYTECODE": "1"}, preexec_fn=limit
        )
    assert (tmp_path / "out.svg").stat().st_size == 4096
    assert (done.returncode, done.stderr) == (2, "autoddl: standard output cannot be written (File too large)\n")


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_all_of_a_large_output_is_written(tmp_path, unbuffered):
    """A pipe takes 64 kB at once."""
    done = run(*LARGE, env={"PYTHONUNBUFFERED": unbuffered})
    assert run(*LARGE, "-o", str(tmp_path / "out.svg")).returncode == 0
    assert done.returncode == 0 and done.stdout == (tmp_path / "out.svg").read_text() and len(done.stdout) > 100_000


def _closed(number: int) -> Any:
    return lambda: os.close(number)


@pytest.mark.slow
@pytest.mark.fault("output", "standard output is closed", "one line says so", exit_code=2)
@pytest.mark.parametrize("words", [LIST, ("schedule", "--help")], ids=["list", "help"])
def test_closed_standard_output(words):
    done = run(*words, preexec_fn=_closed(1))
    assert (done.returncode, done.stderr) == (2, "autoddl: standard output cannot be written (it is closed)\n")


@pytest.mark.slow
def test_nothing_is_lost_where_standard_output_is_closed(tmp_path):
    """The number of the closed file is not given to the next one that is opened, which would get the output."""
    path = tmp_path / "schedule.csv"
    words = ("schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--format", "csv")
    done = run(*words, "-o", str(path), preexec_fn=_closed(1))
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_text() == run(*words).stdout


@pytest.mark.slow
@pytest.mark.fault(
    "output", "standard error is closed, or a full disk", "the command does what it would do; its code tells"
)
@needs_dev_full
@pytest.mark.parametrize("how", ["closed", "full"])
def test_standard_error_that_cannot_be_written(how):
    with open("/dev/full", "w") as full:
        options: dict[str, Any] = {"preexec_fn": _closed(2)} if how == "closed" else {"stderr": full}
        assert run(*LIST, **options).returncode == 0
        wrong = run("schedule", "nonsense", **options)
        assert (wrong.returncode, wrong.stdout) == (2, "")  # the message is not among the output either


@pytest.mark.slow
def test_a_progress_bar_on_a_terminal_that_has_gone():
    """As after the window was closed: the plan is made all the same."""
    ours, theirs = os.openpty()
    os.close(ours)
    done = run(*PLAN, stderr=theirs)
    os.close(theirs)
    assert done.returncode == 0 and "proven" in done.stdout


@pytest.mark.slow
def test_closed_standard_input():
    assert run(*LIST, preexec_fn=_closed(0)).returncode == 0


@pytest.mark.slow
@pytest.mark.fault(
    "output", "the reader of the output has gone (a pager, head)", "the command ends without a word", exit_code=141
)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [LARGE, ("schedule", "--help")], ids=["svg", "help"])
def test_the_reader_has_gone(words, unbuffered):
    """128 + SIGPIPE, as of any program in a pipeline."""
    reading, writing = os.pipe()
    os.close(reading)
    done = run(*words, stdout=writing, env={"PYTHONUNBUFFERED": unbuffered})
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.fault("output", "a name that the terminal's encoding lacks", "it is written with escapes", exit_code=0)
@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "ascii:strict"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
    ids=["ascii", "strict", "C"],
)
def test_names_beyond_ascii(tmp_path, env):
    document = {**load_cluster("local-cpu").document, "name": "Größe 模型"}
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    path = tmp_path / "größe.json"
    done = run("plan", "mlp:64,64", "--cluster", str(tmp_path / "cluster.json"), "-o", str(path), "--quiet", env=env)
    assert done.returncode == 0, done.stderr
    assert "Gr\\xf6\\xdfe \\u6a21\\u578b" in done.stdout
    assert json.loads(path.read_text())
    missing = run("schedule", "größe", env=env)
    assert missing.returncode == 2 and is_one_line(missing.stderr)


@pytest.mark.slow
def test_a_file_name_that_is_no_text(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.json"
    command = [sys.executable, "-m", "autoddl", *PLAN, "-o", path]
    done = subprocess.run(command, capture_output=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, b"") and os.path.exists(path)


# ---- Places --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault("output", "the current folder has been removed", "one line says so", exit_code=2)
@pytest.mark.parametrize("words", [("-o", "plan.json"), ("-o", "./new/plan.json")])
def test_a_removed_folder(tmp_path, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run(*PLAN, *words, cwd=gone, preexec_fn=lambda: shutil.rmtree(gone))
    assert done.returncode == 2 and is_one_line(done.stderr)


@pytest.mark.fault("output", "-o with a path of 5,000 characters", "one line that shows 100 of them", exit_code=2)
def test_a_path_that_is_too_long(capsys):
    assert main([*LIST, "-o", "x" * 5000]) == 2
    err = capsys.readouterr().err
    assert is_one_line(err) and "cannot be written (File name too long)" in err and len(err) < 200


@pytest.mark.fault("output", "-o is the input file", "it is refused before anything is computed", exit_code=2)
@pytest.mark.parametrize("how", ["same", "other words", "link", "hard link"])
@pytest.mark.parametrize(
    "words",
    [
        ("export", "FILE", "--to", "json", "-o", "OUT"),
        ("report", "FILE", "-o", "OUT"),
        ("plan", "FILE", "--cluster", "local-cpu", "-o", "OUT"),
        ("plan", "mlp:64,64", "--cluster", "FILE", "-o", "OUT"),
        ("fit", "other.csv", "FILE", "-o", "OUT"),
        ("fit", "other.csv", "--base", "FILE", "-o", "OUT"),
        ("fit", "FILE", "--picture", "OUT"),
        ("calibrate", "--base", "FILE", "-o", "OUT"),
        ("calibrate", "--samples", "FILE", "-o", "OUT"),
        ("rank", "FILE", "--ranks", "2", "-o", "OUT"),
        ("extract", "FILE:function", "-o", "OUT"),
        ("schedule", "FILE", "-o", "OUT"),
    ],
    ids=lambda words: f"{words[0]} {next(word for word in words if 'FILE' in word)} {words[1]}",
)
def test_an_output_that_is_the_input(words, how, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = Path("input.py")
    file.write_text("what the user has")
    out = {"same": "input.py", "other words": f"../{tmp_path.name}/input.py", "link": "soft", "hard link": "hard"}[how]
    Path("soft").symlink_to(file)
    os.link(file, "hard")
    assert main([word.replace("FILE", "input.py").replace("OUT", out) for word in words]) == 2
    err = capsys.readouterr().err
    assert is_one_line(err) and "is the input input.py; name another file" in err
    assert file.read_text() == "what the user has"


def test_two_outputs_in_one_file(capsys):
    assert main(["fit", "measurements.csv", "-o", "new.json", "--picture", "./new.json"]) == 2
    assert "-o and --picture are the same file new.json" in capsys.readouterr().err


def test_an_output_that_is_there_already_is_written_anew(tmp_path):
    path = tmp_path / "list"
    path.write_text("old")
    path.chmod(0o600)
    assert main([*LIST, "-o", str(path)]) == 0
    assert "gpipe" in path.read_text() and path.stat().st_mode & 0o777 == 0o600


# ---- What errors become --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("batch 17\nis odd"), 2, "batch 17 is odd"),
        (RankError("rank 1 of 2 was killed by SIGKILL", 1, Path("log")), 1, "rank 1 of 2 was killed by SIGKILL"),
        (
            RankUserError("rank 1 of 2 refused: batch 17 is odd", 1, Path("log")),
            2,
            "rank 1 of 2 refused: batch 17 is odd",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            MemoryError(),
            2,
            "out of memory: the command needs more than the machine has, or than a limit allows (ulimit -v)",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), 2, "/tmp/x: No space left on device"),
        (
            RecursionError("too deep"),
            70,
            "internal error, please report it: RecursionError: too deep (AUTODDL_TRACEBACK=1 shows more)",
        ),
        (
            BrokenPipeError(errno.EPIPE, "Broken pipe"),  # of another pipe than standard output
            70,
            "internal error, please report it: BrokenPipeError: [Errno 32] Broken pipe (AUTODDL_TRACEBACK=1 shows more)",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_of_a_command(error, code, line, monkeypatch, capsys):
    from autoddl.cli import schedule

    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(schedule, "run", fail)
    monkeypatch.delenv("AUTODDL_TRACEBACK", raising=False)
    assert main(list(LIST)) == code
    assert capsys.readouterr().err == f"autoddl: {line}\n"
