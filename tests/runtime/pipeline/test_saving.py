"""Checkpoints that cannot be written, or are cut short by a kill at any moment. Threads stand for the ranks."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoddl.__main__ import main
from autoddl.pipelines.runtime.pipeline import checkpoint as files
from autoddl.pipelines.runtime.pipeline.checkpoint import (
    DamagedError,
    checkpoints_in,
    open_checkpoint,
    prepare_directory,
)
from autoddl.pipelines.runtime.pipeline.saving import save

from .thread_ranks import PATIENCE_S, Job, entries

# ---- Writing -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, name: str, num_bytes: int = 300) -> Iterator[None]:
    """Within it files of a name take so many bytes, then the disk is full."""
    opened = files._synchronized_file

    class Full(io.RawIOBase):
        def __init__(self, file: Any) -> None:
            self.file, self.left = file, num_bytes

        def write(self, data: Any) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)

        def fileno(self) -> int:
            return self.file.fileno()

    @contextlib.contextmanager
    def written(path: Path) -> Iterator[Any]:
        with opened(path) as file:
            yield Full(file) if path.name == name else file

    with monkeypatch.context() as patch:
        patch.setattr(files, "_synchronized_file", written)
        yield


@pytest.mark.parametrize("name", ["rank-0.npz", "rank-1.npz", "checkpoint.json"])
def test_a_disk_that_is_full_for_a_while(saved, monkeypatch, name):
    """One warning names the path; older ones stay whole, nothing half written stays, and the next one is tried."""
    job = Job()
    with full_disk(monkeypatch, name):
        failure = job.save(saved, 6)
    assert f"{saved}/.step-00000006.part/{name}: No space left on device" in failure
    (warning,) = job.warnings
    assert str(saved) in warning and "training goes on, and older ones are kept" in warning
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000002", "step-00000004"]
    assert Job().restore(saved) == 4
    assert job.save(saved, 8) == "" and len(job.warnings) == 1
    assert Job().restore(saved) == 8


@pytest.mark.fault(
    "training", "ranks do not share the directory of checkpoints", "each save fails with a warning that names the file"
)
def test_parts_that_rank_0_does_not_see(tmp_path):
    job = Job()
    failures = job.each(
        lambda member: save(tmp_path / str(member.rank), member, 2, 8, "1f1b", entries(2, member.rank), set())
    )
    assert "rank-1.npz: has 0 bytes here, its rank wrote" in failures[0] and len(set(failures)) == 1
    assert "all hosts should share the directory" in job.warnings[0]
    assert checkpoints_in(tmp_path / "0") == []


def test_old_ones_are_removed_and_damaged_ones_do_not_count(saved):
    """The newest, and the newest whole one before it: no damage of one leaves nothing to go on from."""
    job = Job()
    assert job.save(saved, 6) == ""
    assert [number for number, _ in checkpoints_in(saved)] == [6, 4]
    os.truncate(saved / "step-00000006" / "rank-0.npz", 100)
    assert job.save(saved, 8) == ""
    assert [number for number, _ in checkpoints_in(saved)] == [8, 6, 4]
    path = saved / "step-00000008" / "rank-0.npz"  # a flipped bit, which restoring finds
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    again = Job()
    assert again.restore(saved) == 4 and len(again.warnings) == 2 and len(again.damaged) == 2
    assert again.save(saved, 9) == ""
    assert [number for number, _ in checkpoints_in(saved)] == [9, 8, 6, 4]
    assert again.save(saved, 10) == ""
    assert [number for number, _ in checkpoints_in(saved)] == [10, 9]
    fresh = Job()  # one that does not restore, and saves an earlier step: what is newer is none of its business
    assert fresh.save(saved, 3) == ""
    assert [number for number, _ in checkpoints_in(saved)] == [10, 9, 3]


@pytest.mark.fault(
    "training", "the power fails after a checkpoint", "its files and folders were synchronized before it got its name"
)
def test_all_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    directory, events = tmp_path / "deep" / "saved", []
    fsync, rename = os.fsync, os.rename

    def note_fsync(handle: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def note_rename(source: Any, target: Any) -> None:
        events.append(("rename", Path(source)))
        rename(source, target)

    if sys.platform != "linux":
        pytest.skip("paths of open files are read from /proc")
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    assert Job().save(directory, 2) == ""
    folder = directory / ".step-00000002.part"
    renamed = events.index(("rename", folder))
    before, after = events[:renamed], events[renamed + 1 :]
    names = [folder / name for name in ("rank-0.npz", "rank-1.npz", "checkpoint.json")]
    for path in names:
        assert ("fsync", folder) in before[before.index(("fsync", path)) :]
    assert {("fsync", path) for path in (tmp_path, tmp_path / "deep", directory)} <= set(before)
    assert ("fsync", directory) in after


# ---- Kills ---------------------------------------------------------------------------------------------------------------

EVENTS = ("os.fsync", "os.rename", "os.mkdir", "os.unlink", "os.rmdir", "numpy.lib.format.write_array")


def killed_while_saving(directory: Path, step: int, event: int) -> bool:
    """Save in a process that is killed before the call of that number; False where there are fewer. What is after a call for the
    disk is before the next one."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_S))
        try:
            count = 0

            def pass_by() -> None:
                nonlocal count
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

            def watched(function: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any, **options: Any) -> Any:
                    pass_by()
                    return function(*arguments, **options)

                return call

            for name in EVENTS:
                module, _, attribute = name.rpartition(".")
                owner = {"os": os, "numpy.lib.format": np.lib.format}[module]
                setattr(owner, attribute, watched(getattr(owner, attribute)))
            job = Job(1)
            assert job.restore(directory) in (None, step - 2)
            assert job.save(directory, step) == ""
        except BaseException:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


@pytest.mark.fault(
    "training",
    "a job is killed at any moment of writing a checkpoint",
    "the one before it is whole, or already the new one; nothing is warned of, and what is left is removed with the next one",
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_killed_at_every_moment_of_writing(tmp_path):
    """Before each call that changes the disk, for the first checkpoint, and one that removes an old one."""
    start = tmp_path / "start"
    for step in (2, 6):
        event, seen = 0, set()
        for before in range(2, step, 2):
            assert Job(1).save(start, before) == ""
        while True:
            directory = tmp_path / "saved"
            shutil.rmtree(directory, ignore_errors=True)
            if start.exists():
                shutil.copytree(start, directory)
            if not killed_while_saving(directory, step, event):
                break
            job = Job(1)
            found = job.restore(directory)
            assert found in ((None, 2) if step == 2 else (step - 2, step)) and job.warnings == [], (step, event)
            seen.add(found)
            assert job.save(directory, step) == ""
            left = sorted(path.name for path in directory.iterdir())
            assert left == [f"step-{kept:08d}" for kept in (step - 2, step) if kept], (step, event)
            event += 1
        assert len(seen) == 2 and event > 12


# ---- The directory -------------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "training", "--checkpoints is a file, or cannot be written", "refused in one line before ranks start", exit_code=2
)
@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300, "nul\0", "link"])
def test_a_directory_that_cannot_be_written(tmp_path, capsys, name):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("link")
    assert main(["train", "gpt:2x16", "--steps", "1", "--checkpoints", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "cannot be written" in captured.err or "is no path" in captured.err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_is_made_and_left_empty(tmp_path):
    prepare_directory(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    with pytest.raises(DamagedError, match=r"checkpoint\.json is missing"):
        open_checkpoint(tmp_path / "a")
