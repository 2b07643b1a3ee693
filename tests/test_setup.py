"""The set-up script, run among made-up interpreters: which one it takes, what it says, and when it works again."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = [
    "bash",
    "sh",
    "cat",
    "cksum",
    "cp",
    "cut",
    "dirname",
    "env",
    "head",
    "ls",
    "mkdir",
    "mktemp",
    "mv",
    "rm",
    "sed",
    "sort",
    "tail",
    "uname",
]

# An interpreter that answers the script's questions, makes "environments" that hold a copy of itself, and keeps a record.
INTERPRETER = """#!/bin/sh
case "$*" in
    *"import ctypes"*) echo "{implementation} {version} {ensurepip} $0" ;;
    *"import venv, pip"*) exit 1 ;;
    "-m venv "*) echo venv >>"$CALLS"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip install --editable"*) echo install >>"$CALLS"; exit ${{PIP_EXIT:-0}} ;;
esac
"""
SHIM = '#!/bin/sh\necho "pyenv: $0: command not found" >&2\nexit 127\n'  # what pyenv leaves for versions not chosen


@dataclass(frozen=True)
class Machine:
    """A machine with nothing on it but a shell's tools, in a folder with a space in its name."""

    folder: Path

    def put(self, path: str, text: str) -> str:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
        return str(file)

    def put_python(self, path: str, version: str, implementation: str = "cpython", ensurepip: bool = True) -> str:
        pip = "ensurepip" if ensurepip else "-"
        return self.put(path, INTERPRETER.format(implementation=implementation, version=version, ensurepip=pip))

    def run(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": str(self.folder / "bin"),
            "HOME": str(self.folder / "home"),
            "CALLS": str(self.folder / "calls"),
        }
        script = str(self.folder / "repository" / ".ci" / "setup")
        return subprocess.run(
            [str(self.folder / "bin" / "bash"), script, *args],
            env={**variables, "TMPDIR": str(self.folder), **environment},
            cwd=self.folder / "repository",
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """What the interpreters were asked to make since the last look."""
        record = self.folder / "calls"
        calls = record.read_text().split() if record.exists() else []
        record.unlink(missing_ok=True)
        return calls


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    folder = tmp_path / "a machine"
    (folder / "bin").mkdir(parents=True)
    (folder / "home").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool, path="/usr/bin:/bin:" + os.environ["PATH"])
        assert found is not None, tool
        (folder / "bin" / tool).symlink_to(found)
    (folder / "repository" / ".ci").mkdir(parents=True)
    for name in (".ci/setup", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / "repository" / name)
    (folder / "bin" / "uname").unlink()
    machine = Machine(folder)
    machine.put("bin/uname", '#!/bin/sh\n[ "$1" = -s ] && echo Linux || echo x86_64\n')
    return machine


def found_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- Which interpreter ------------------------------------------------------------------------------------------------


def test_python_310_on_the_path_comes_first(machine):
    machine.put_python("bin/python3", "3.12.1")
    wanted = machine.put_python("bin/python3.10", "3.10.4")
    done = machine.run("--find")
    assert found_by(done) == wanted
    assert done.stderr == ""


def test_broken_shim_is_passed_over_for_pyenvs_version(machine):
    machine.put("bin/python3.10", SHIM)
    machine.put("bin/python3", SHIM)
    for version in ("3.10.9", "3.10.13", "3.10.11"):
        machine.put_python(f"home/.pyenv/versions/{version}/bin/python3.10", version)
    wanted = f"{machine.folder}/home/.pyenv/versions/3.10.13/bin/python3.10"
    machine.put_python("home/.pyenv/versions/3.12.1/bin/python3", "3.12.1")
    done = machine.run("--find")
    assert found_by(done) == wanted, "the newest 3.10 is not taken"
    assert done.stderr == ""


def test_pyenv_root_is_asked_for(machine):
    machine.put_python("bin/python3", "3.12.1")
    machine.put("bin/pyenv", f'#!/bin/sh\n[ "$1" = root ] && echo "{machine.folder}/elsewhere"\n')
    wanted = machine.put_python("elsewhere/versions/3.10.13/bin/python3.10", "3.10.13")
    assert found_by(machine.run("--find")) == wanted


def test_uv_is_asked_for(machine):
    machine.put("bin/python3.10", SHIM)
    machine.put_python("bin/python3", "3.12.1")
    wanted = machine.put_python("uv/python3.10", "3.10.16")
    machine.put("bin/uv", f'#!/bin/sh\n[ "$*" = "python find 3.10" ] && echo "{wanted}"\n')
    assert found_by(machine.run("--find")) == wanted


def test_any_other_python_does_and_it_is_said_what_is_skipped(machine):
    machine.put("bin/python3.10", SHIM)
    machine.put("bin/python3", SHIM)
    machine.put_python("home/.pyenv/versions/3.8.18/bin/python3", "3.8.18")
    wanted = machine.put_python("home/.pyenv/versions/3.13.0/bin/python3", "3.13.0")
    done = machine.run("--find")
    assert found_by(done) == wanted
    (line,) = done.stderr.splitlines()
    assert line.startswith("OneFlow parts are skipped: they need CPython 3.10, and none was found")


def test_pypy_310_does_not_count(machine):
    machine.put_python("bin/python3.10", "3.10.14", implementation="pypy")
    assert "they need CPython 3.10" in machine.run("--find").stderr


def test_no_310_is_looked_for_where_oneflow_does_not_exist(machine):
    machine.put("bin/uname", '#!/bin/sh\n[ "$1" = -s ] && echo Darwin || echo arm64\n')
    machine.put_python("bin/python3.10", "3.10.4")
    wanted = machine.put_python("bin/python3", "3.12.1")
    done = machine.run("--find")
    assert found_by(done) == wanted
    assert done.stderr == (
        "OneFlow parts are skipped: OneFlow 0.9.0 exists for Linux on x86-64 only, and this is Darwin on arm64.\n"
    )


def test_python_that_cannot_make_environments_is_passed_over(machine):
    machine.put_python("bin/python3", "3.11.2", ensurepip=False)
    wanted = machine.put_python("bin/python3.12", "3.12.1")
    assert found_by(machine.run("--find")) == wanted


@pytest.mark.parametrize("version", ["3.8.18", "2.7.18"])
def test_old_pythons_alone_are_an_error_in_one_line(machine, version):
    machine.put_python("bin/python3", version)
    done = machine.run(".venv")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "no Python from 3.9 on was found" in line
    assert machine.calls() == []


def test_chosen_interpreter_overrides_the_search(machine):
    machine.put_python("bin/python3.10", "3.10.4")
    wanted = machine.put_python("opt/python", "3.9.18")
    done = machine.run("--find", PYTHON=wanted)
    assert found_by(done) == wanted
    assert done.stderr == f"OneFlow parts are skipped: they need CPython 3.10, and PYTHON={wanted} is cpython 3.9.18.\n"


@pytest.mark.parametrize(("text", "fault"), [(SHIM, "does not run"), ("3.8.18", "is Python 3.8.18; AutoDDL needs 3.9")])
def test_wrong_choice_is_an_error_in_one_line(machine, text, fault):
    chosen = machine.put("opt/python", text) if text is SHIM else machine.put_python("opt/python", text)
    machine.put_python("bin/python3", "3.12.1")
    done = machine.run("--find", PYTHON=chosen)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert fault in line


def test_missing_ensurepip_is_named(machine):
    machine.put_python("bin/python3", "3.11.2", ensurepip=False)
    done = machine.run(".venv")
    assert done.returncode == 1
    assert "apt-get install python3.11-venv" in done.stderr.splitlines()[-1]


# ---- When it works ----------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(machine: Machine) -> Path:
    """The machine's environment, made once with Python 3.12."""
    machine.put_python("bin/python3", "3.12.1")
    done = machine.run(".venv")
    assert done.returncode == 0, done.stderr
    assert machine.calls() == ["venv", "install"]
    return machine.folder / "repository" / ".venv"


def test_second_run_does_nothing(machine, environment):
    done = machine.run(".venv")
    assert done.returncode == 0
    assert machine.calls() == []
    assert len(done.stderr.splitlines()) == 1, "only what is skipped is said"


@pytest.mark.parametrize("name", ["setup.cfg", "pyproject.toml"])
def test_changed_dependencies_are_installed_into_it(machine, environment, name):
    file = environment.parent / name
    file.write_text(file.read_text() + "\n")
    assert machine.run(".venv").returncode == 0
    assert machine.calls() == ["install"]
    assert machine.run(".venv").returncode == 0
    assert machine.calls() == []


@pytest.mark.parametrize("damage", ["stamp", "interpreter", "place", "better interpreter"])
def test_what_cannot_be_trusted_is_made_anew(machine, environment, damage):
    leftover = environment / "leftover"
    leftover.touch()
    if damage == "stamp":
        (environment / "setup.stamp").unlink()
    elif damage == "interpreter":
        (environment / "bin" / "python").unlink()
    elif damage == "place":
        environment.parent.rename(machine.folder / "moved")
        (machine.folder / "repository").symlink_to(machine.folder / "moved")
        leftover = machine.folder / "moved" / ".venv" / "leftover"
    else:
        machine.put_python("bin/python3.10", "3.10.4")
    assert machine.run(".venv").returncode == 0
    assert machine.calls() == ["venv", "install"]
    assert not leftover.exists()


def test_failed_installation_is_shown_and_tried_again(machine):
    machine.put_python("bin/python3", "3.12.1")
    for _ in range(2):
        done = machine.run(".venv", PIP_EXIT="1")
        assert done.returncode == 1
        assert "this failed" in done.stderr
        assert "--editable" in done.stderr
        assert machine.calls() == ["venv", "install"]
    assert machine.run(".venv").returncode == 0
    assert machine.calls() == ["venv", "install"]
    assert not list(machine.folder.glob("autoddl-setup.*")), "a log was left behind"
