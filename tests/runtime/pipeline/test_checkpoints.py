"""Checkpoints that are damaged, cannot be written, or are cut short by a kill at any moment. Threads stand for the ranks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoddl.__main__ import main
from autoddl.costmodel.documents import canonical_hash
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.pipeline import checkpoint as files
from autoddl.pipelines.runtime.pipeline.checkpoint import (
    DamagedError,
    Entry,
    checkpoints_in,
    open_checkpoint,
    prepare_directory,
)
from autoddl.pipelines.runtime.pipeline.saving import Member, Restored, restore, save

NUM_RANKS = 2
SHAPE = (7, 5)
PATIENCE_S = 120.0


class Job:
    """The ranks of a job, as threads, with what they were warned of."""

    def __init__(self, num_ranks: int = NUM_RANKS) -> None:
        self.num_ranks = num_ranks
        self.warnings: list[str] = []
        self.damaged: set[Path] = set()
        self._barrier = threading.Barrier(num_ranks)
        self._told = [""] * num_ranks

    def each(self, action: Callable[[Member], Any]) -> list[Any]:
        """What each rank returned or raised."""
        results: list[Any] = [None] * self.num_ranks

        def run(rank: int) -> None:
            def exchange(text: str) -> list[str]:
                self._told[rank] = text
                self._barrier.wait(PATIENCE_S)
                told = list(self._told)
                self._barrier.wait(PATIENCE_S)
                return told

            try:
                results[rank] = action(Member(rank, self.num_ranks, exchange, self.warnings.append))
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def save(self, directory: Path, step: int) -> str:
        """Why a checkpoint could not be written, which all ranks have to know."""

        def save_on(member: Member) -> str:
            return save(directory, member, step, 4 * step, "1f1b", entries(step, member.rank), self.damaged)

        failures = self.each(save_on)
        for failure in failures:
            if isinstance(failure, BaseException):
                raise failure
        assert len(set(failures)) == 1
        return failures[0]

    def restore(self, directory: Path) -> int | None:
        """The step that all ranks go on from, with the values of that step; None where there is no checkpoint."""
        found = self.each(lambda member: restore(directory, member, shapes(member.rank)))
        for one in found:
            if isinstance(one, BaseException):
                raise one
        if found == [None] * self.num_ranks:
            return None
        steps = {one.checkpoint.num_updates for one in found}
        (step,) = steps
        for rank, one in enumerate(found):
            assert isinstance(one, Restored) and one.checkpoint.num_micro_batches == 4 * step
            assert same(one.entries, entries(step, rank))
            self.damaged = set(one.damaged)
        return step


def entries(step: int, rank: int) -> dict[str, Entry]:
    """What a rank has at a step."""
    rng = np.random.default_rng([step, rank])
    return {
        f"layer{rank}.{name}": {
            "value": rng.standard_normal(SHAPE).astype(np.float32),
            "exp_avg": rng.standard_normal(SHAPE).astype(np.float32),
            "all.step": np.array(step),
        }
        for name in ("weight", "bias")
    }


def shapes(rank: int) -> dict[str, tuple[int, ...]]:
    return {name: SHAPE for name in entries(0, rank)}


def same(found: dict[str, Entry], wanted: dict[str, Entry]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].keys() == wanted[name].keys()
        and all((found[name][key] == value).all() for key, value in wanted[name].items())
        for name in wanted
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with checkpoints of steps 2 and 4."""
    directory = tmp_path / "saved"
    job = Job()
    assert [job.save(directory, step) for step in (2, 4)] == ["", ""]
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000002", "step-00000004"]
    assert job.restore(directory) == 4 and job.warnings == []
    return directory


def passed_over(saved: Path, reason: str) -> None:
    """All ranks take step 2, and one warning names step 4 and what is wrong with it."""
    job = Job()
    assert job.restore(saved) == 2
    (warning,) = job.warnings
    assert f"{saved / 'step-00000004'} is damaged and passed over: " in warning
    assert reason in warning and "\n" not in warning


def rewritten(folder: Path, **fields: Any) -> None:
    """The manifest with other fields, and a hash that is right."""
    path = folder / "checkpoint.json"
    document = {**json.loads(path.read_text()), **fields}
    del document["hash"]
    path.write_text(json.dumps({**document, "hash": canonical_hash(document)}))


def declared(folder: Path) -> None:
    """The manifest with the sizes and checksums that the parts have now, as a forger would write it."""
    parts = []
    for path in sorted(folder.glob("rank-*.npz")):
        content = path.read_bytes()
        parts.append({"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    rewritten(folder, files=parts)


# ---- Damage --------------------------------------------------------------------------------------------------------------

OUTCOME = "the newest whole one is taken, and a warning names the damaged one with the reason"


@pytest.mark.fault("training", "the newest checkpoint is truncated", OUTCOME)
def test_a_truncated_part(saved):
    path = saved / "step-00000004" / "rank-1.npz"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    passed_over(saved, f"rank-1.npz has {size - 1} bytes, should have {size}")


@pytest.mark.fault("training", "a bit of the newest checkpoint is flipped", OUTCOME)
def test_a_flipped_bit(saved):
    """In any of its files, wherever it is."""
    folder, rng = saved / "step-00000004", random.Random(3)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for position in [0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(10))]:
            damaged = bytearray(content)
            damaged[position] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            job = Job()
            if job.restore(saved) == 4:  # blanks between the words of the manifest mean nothing
                assert path.name == "checkpoint.json" and json.loads(damaged) == json.loads(content)
            else:
                assert len(job.warnings) == 1 and f"damaged and passed over: {path.name}" in job.warnings[0]
        path.write_bytes(content)


@pytest.mark.fault("training", "a part of the newest checkpoint is missing", OUTCOME)
def test_a_missing_part(saved):
    (saved / "step-00000004" / "rank-0.npz").unlink()
    passed_over(saved, "rank-0.npz is missing")


@pytest.mark.fault("training", "the newest checkpoint's manifest is missing", OUTCOME)
def test_a_missing_manifest(saved):
    (saved / "step-00000004" / "checkpoint.json").unlink()
    passed_over(saved, "checkpoint.json is missing")


@pytest.mark.fault("training", "the newest checkpoint, or a part of it, is a file where a folder should be, or the reverse", OUTCOME)
def test_files_and_folders_that_are_the_other_kind(saved):
    folder = saved / "step-00000004"
    for name in ("rank-1.npz", "checkpoint.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).mkdir()
        passed_over(saved, f"{name} is no file")
        (folder / name).rmdir()
        os.mkfifo(folder / name)  # which would be waited for
        passed_over(saved, f"{name} is no file")
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    shutil.rmtree(folder)
    folder.write_bytes(b"no folder")
    passed_over(saved, "it is no folder")
    job = Job()
    assert job.restore(saved) == 2
    assert job.save(saved, 4) == ""
    assert job.restore(saved) == 4


@pytest.mark.fault("training", "the newest checkpoint's manifest is edited or unreadable", OUTCOME)
def test_manifests_that_are_not_what_was_written(saved):
    folder = saved / "step-00000004"
    path = folder / "checkpoint.json"
    text = path.read_text()
    cases = {
        text.replace('"num_updates": 4', '"num_updates": 5'): "checkpoint.json has another hash than its content",
        text.replace('"num_micro_batches": 16', '"num_micro_batches": 1'): "has another hash than its content",
        text[:100]: "checkpoint.json is malformed: ",
        "": "checkpoint.json is malformed: ",
        "[" * 100_000: "checkpoint.json is malformed: ",
        "[]": "should be an object",
        "{}": "field 'format' is missing",
        '{"format": "autoddl-plan"}': "is no manifest of a checkpoint",
        text.replace('"version": 2', '"version": 3'): "is of version 3, this release reads 1 and 2",
    }
    for content, reason in cases.items():
        path.write_text(content)
        passed_over(saved, reason)
    path.write_bytes(b"\xff" + text.encode())
    passed_over(saved, "checkpoint.json is malformed: ")
    path.write_text(text)
    parts = json.loads(text)["files"]
    for field, value, reason in (
        ("num_updates", 5, "is of step 5"),
        ("files", [*parts, parts[0]], "lists a part twice"),
        ("files", [{**parts[0], "name": "../step-00000002/rank-0.npz"}], "which is no part's name"),
        ("files", [{**parts[0], "bytes": -1}], "bytes is -1"),
    ):
        rewritten(folder, **{field: value})
        passed_over(saved, reason)
        path.write_text(text)
    os.truncate(path, files._MANIFEST_LIMIT_BYTES + 1)
    passed_over(saved, f"at most {files._MANIFEST_LIMIT_BYTES} are read")


@pytest.mark.fault("training", "ranks see different states of the newest checkpoint", "none takes it; all take the one before it")
def test_ranks_that_see_different_files(saved, monkeypatch):
    def of_rank(folder: Path) -> Any:
        found = open_checkpoint(folder)
        is_other = folder.name == "step-00000004" and threading.current_thread() in others
        return replace(found, hash="another") if is_other else found

    others: set[threading.Thread] = set()
    monkeypatch.setattr("autoddl.pipelines.runtime.pipeline.saving.open_checkpoint", of_rank)
    job = Job()

    def read(member: Member) -> Any:
        if member.rank == 1:
            others.add(threading.current_thread())
        return restore(saved, member, shapes(member.rank))

    assert [found.checkpoint.num_updates for found in job.each(read)] == [2, 2]
    assert "its manifest is not the same for all ranks" in job.warnings[0]


@pytest.mark.fault(
    "training", "there are checkpoints, and none is whole", "refused in one line: training does not begin anew in silence"
)
def test_no_whole_checkpoint(saved):
    for step in (2, 4):
        (saved / f"step-{step:08d}" / "rank-0.npz").unlink()
    job = Job()
    errors = job.each(lambda member: restore(saved, member, shapes(member.rank)))
    assert all(isinstance(error, UserError) for error in errors)
    assert f"checkpoints {saved}: none of 2 is whole (step-00000002: rank-0.npz is missing)" in str(errors[0])
    assert len(job.warnings) == 2


@pytest.mark.fault(
    "training", "the newest whole checkpoint is of another model", "refused in one line on all ranks; no older one is tried"
)
def test_a_checkpoint_of_another_model(saved):
    wanted = {
        "has no parameter layer9.weight; it is of another model": {"layer9.weight": SHAPE},
        "has layer1.weight/value of 7x5, should be 5x7; it is of another model": {"layer1.weight": (5, 7)},
    }
    for words, others in wanted.items():
        job = Job()
        errors = job.each(lambda member, others=others: restore(saved, member, others if member.rank else shapes(0)))
        assert [type(error) for error in errors] == [UserError, UserError]
        assert all(words in str(error) for error in errors) and job.warnings == []


def test_nothing_there_is_no_checkpoint(tmp_path):
    assert Job().restore(tmp_path / "nowhere") is None
    (tmp_path / "step-1").mkdir()
    (tmp_path / "notes").write_text("mine")
    assert Job().restore(tmp_path) is None
    with pytest.raises(UserError, match="notes cannot be read"):
        Job().restore(tmp_path / "notes")


# ---- Hostile parts -------------------------------------------------------------------------------------------------------


class _Code:
    """What runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def hostile_member(value: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, value, allow_pickle=True)
    return out.getvalue()


def header(shape: str, dtype: str = "<f4") -> bytes:
    out = io.BytesIO()
    np.save(out, np.zeros(1, np.float32))
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    return out.getvalue()[:8] + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


@pytest.mark.fault(
    "training",
    "a checkpoint is hostile: pickled code, a shape of terabytes, a zip bomb, with checksums that are right",
    "nothing runs and no memory is taken; it is passed over with the reason",
)
def test_hostile_parts(saved, tmp_path):
    folder, trap = saved / "step-00000004", tmp_path / "trap"
    content = (folder / "rank-1.npz").read_bytes()
    names = [f"layer1.{name}/value.npy" for name in ("weight", "bias")]
    objects = np.empty(1, object)
    objects[0] = _Code(trap)
    good = hostile_member(np.ones(SHAPE, np.float32))
    cases: list[tuple[dict[str, bytes], int, str]] = [
        ({names[0]: hostile_member(objects)}, zipfile.ZIP_STORED, "has elements of type object"),
        ({names[0]: header("(1000000000000,)")}, zipfile.ZIP_STORED, "which is not its shape's size"),
        ({names[0]: header("(-7, -5)") + bytes(140)}, zipfile.ZIP_STORED, "of -7x-5, should be 7x5"),
        ({names[0]: header("(35,)", "|V4") + bytes(140)}, zipfile.ZIP_STORED, "has elements of type"),
        ({names[0]: b"\x93NUMPY\x03\x00" + bytes(100)}, zipfile.ZIP_STORED, "is of version (3, 0)"),
        ({names[0]: bytes(2**24)}, zipfile.ZIP_DEFLATED, "is compressed"),
        ({names[0]: b"no array at all"}, zipfile.ZIP_STORED, "rank-1.npz is malformed: "),
        ({f"layer1.weight/{'k' * 5000}.npy": good}, zipfile.ZIP_STORED, "or it is too long"),
        ({names[0]: good, "layer1.weight/all.step.npy": good}, zipfile.ZIP_STORED, "should be a single number"),
    ]
    for members, compression, reason in cases:
        with zipfile.ZipFile(folder / "rank-1.npz", "w", compression) as archive:
            for name, value in members.items():
                archive.writestr(name, value)
        declared(folder)
        job = Job()
        tracemalloc.start()
        found = job.each(lambda member: restore(saved, member, shapes(member.rank)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 * 2**20 and not trap.exists()
        said = [*job.warnings, *(str(each) for each in found)]
        assert any(reason in each for each in said), said
        assert all(len(warning) < 400 for warning in job.warnings)
    (folder / "rank-1.npz").write_bytes(content[:200] + content)
    declared(folder)
    assert Job().restore(saved) in (2, 4)  # bytes before an archive are none of its members
    for damaged in (b"", content[:-30], b"PK\x05\x06" + bytes(18)):
        (folder / "rank-1.npz").write_bytes(damaged)
        declared(folder)
        job = Job()
        found = job.each(lambda member: restore(saved, member, shapes(member.rank)))
        assert all(isinstance(each, (Restored, UserError)) for each in found), found


def test_old_checkpoints_have_no_checksums(saved):
    """Version 1 is read; the zip format's own checks find what is damaged in it."""
    folder = saved / "step-00000004"
    names = [f"rank-{rank}.npz" for rank in range(NUM_RANKS)]
    for rank, name in enumerate(names):
        with open(folder / name, "wb") as file:
            arrays = {f"{one}/{key}": value for one, entry in entries(4, rank).items() for key, value in entry.items()}
            np.savez(file, **arrays)
    fields = {"num_updates": 4, "num_micro_batches": 16, "schedule": "1f1b", "files": names}
    (folder / "checkpoint.json").write_text(json.dumps({"format": "autoddl-checkpoint", "version": 1, **fields}))
    assert Job().restore(saved) == 4
    content = bytearray((folder / names[1]).read_bytes())
    content[content.index(np.float32(entries(4, 1)["layer1.weight"]["value"][3, 3]).tobytes())] ^= 4
    (folder / names[1]).write_bytes(content)
    passed_over(saved, "rank-1.npz is malformed: Bad CRC-32")


# ---- Writing -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, name: str, num_bytes: int = 300) -> Iterator[None]:
    """Within it files of a name take so many bytes, then the disk is full."""
    opened = files._written

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
        patch.setattr(files, "_written", written)
        yield


@pytest.mark.parametrize("name", ["rank-0.npz", "rank-1.npz", "checkpoint.json"])
def test_a_disk_that_is_full_for_a_while(saved, monkeypatch, name):
    """One warning names the path; older ones stay whole, nothing half written stays, and the next one is tried."""
    job = Job()
    with full_disk(monkeypatch, name):
        failure = job.save(saved, 6)
    assert f"{name}: No space left on device" in failure.replace(str(saved), "saved") or "No space left" in failure
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
        lambda member: save(tmp_path / str(member.rank), member, 2, 8, "1f1b", entries(2, member.rank), ())
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
    assert again.restore(saved) == 4 and len(again.warnings) == 2
    assert again.save(saved, 9) == ""
    assert [number for number, _ in checkpoints_in(saved)] == [9, 8, 6, 4]
    assert again.save(saved, 10) == ""
    assert [number for number, _ in checkpoints_in(saved)] == [10, 9]
    fresh = Job()  # one that does not restore, and saves an earlier step: what is newer is none of its business
    assert fresh.save(saved, 3) == ""
    assert [number for number, _ in checkpoints_in(saved)] == [10, 9, 3]


@pytest.mark.fault("training", "the power fails after a checkpoint", "its files and folders were synchronized before it got its name")
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
    """Save in a process that is killed at an event, counted from 0 with one before and one after each call; False where it ended
    first."""
    child = os.fork()
    if child == 0:
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
                    result = function(*arguments, **options)
                    pass_by()
                    return result

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
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


@pytest.mark.fault(
    "training",
    "a job is killed at any moment of writing a checkpoint",
    "the one before it is whole, or already the new one; nothing is warned of, and what is left is removed with the next one",
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_killed_at_every_moment_of_writing(tmp_path):
    """Before and after each call that changes the disk, for the first checkpoint, the second, and one that removes an old one."""
    start = tmp_path / "start"
    for step in (2, 4, 6):
        event, seen = 0, set()
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
        assert len(seen) == 2 and event > 20
        shutil.rmtree(start, ignore_errors=True)
        shutil.copytree(directory, start)


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
    with pytest.raises(DamagedError, match="checkpoint.json is missing"):
        open_checkpoint(tmp_path / "a")
