"""Temporary folders of processes that were killed are removed by the next one; those that are in use or evidence stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autoddl.pipelines.runtime.ranks.workfolders import WorkFolder

HOLDER = """
import signal, sys
from autoddl.pipelines.runtime.ranks.workfolders import WorkFolder
folder = WorkFolder(sys.argv[1])
(folder.path / "data").write_text("data")
print(folder.path, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.fault(
    "output", "a command is killed by SIGKILL", "its work folder is removed by the next command that makes one"
)
@pytest.mark.parametrize("purpose", ["ranks", "host", "verify"])
def test_folders_of_killed_processes_are_swept(tmp_path, purpose):
    with subprocess.Popen([sys.executable, "-c", HOLDER, purpose], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        with WorkFolder("other") as folder:
            assert folder.is_dir()
            assert (left / "data").read_text() == "data"  # its maker lives
        assert not folder.exists()
        os.kill(holder.pid, signal.SIGKILL)
    assert left.is_dir()
    with WorkFolder("other"):
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_evidence_stays():
    kept = WorkFolder("ranks")
    (kept.path / "rank0.log").write_text("it failed")
    kept.keep()
    with WorkFolder("ranks"):
        assert [entry.name for entry in kept.path.iterdir()] == ["rank0.log"]


def test_what_is_not_ours_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "folder").mkdir(parents=True)
    (elsewhere / "folder" / "lock").touch()
    (tmp_path / "autoddl-link").symlink_to(elsewhere / "folder")
    (tmp_path / "autoddl-being-made").mkdir()
    (tmp_path / "other-folder").mkdir()
    (tmp_path / "other-folder" / "lock").touch()
    old = tmp_path / "autoddl-made-halfway"
    old.mkdir()
    os.utime(old, (1e9, 1e9))
    with WorkFolder("ranks") as folder:
        names = {entry.name for entry in tmp_path.iterdir()} - {folder.name}
    assert names == {"elsewhere", "autoddl-link", "autoddl-being-made", "other-folder"}
    assert (elsewhere / "folder" / "lock").exists()


POOL = """
import signal
from autoddl.pipelines.runtime.ranks.launcher import RankPool
with RankPool(2, with_oneflow=False) as pool:
    print(pool.log_dir, flush=True)
    signal.pause()
"""


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")
def test_the_logs_of_a_killed_pool_are_swept():
    with subprocess.Popen([sys.executable, "-c", POOL], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        os.kill(holder.pid, signal.SIGKILL)
    assert (left / "rank0.log").exists()
    with WorkFolder("verify"):
        assert not left.exists()
