"""Checkpoints that are damaged or hostile when a job goes on from them. Threads stand for the ranks."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import threading
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoddl.costmodel.documents import canonical_hash
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.pipeline import checkpoint as files
from autoddl.pipelines.runtime.pipeline.checkpoint import (
    open_checkpoint,
)
from autoddl.pipelines.runtime.pipeline.saving import Member, Restored, restore

from .thread_ranks import NUM_RANKS, SHAPE, Job, entries, shapes


def passed_over(saved: Path, reason: str) -> None:
    """All ranks take step 2, and one warning names step 4 and what is wrong with it."""
    job = Job()
    assert job.restore(saved) == 2
    (warning,) = job.warnings
    assert f"{saved / 'step-00000004'} is damaged and skipped: " in warning
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


@pytest.mark.fault(
    "training",
    "the newest checkpoint is truncated",
    "the newest whole one is taken; a warning names the damaged one and why",
)
def test_a_truncated_part(saved):
    path = saved / "step-00000004" / "rank-1.npz"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    passed_over(saved, f"rank-1.npz has {size - 1} bytes, should have {size}")


@pytest.mark.fault(
    "training",
    "a bit of the newest checkpoint is flipped",
    "the newest whole one is taken; a warning names the damaged one and why",
)
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
                assert len(job.warnings) == 1 and f"damaged and skipped: {path.name}" in job.warnings[0]
        path.write_bytes(content)


@pytest.mark.fault(
    "training",
    "a part of the newest checkpoint is missing",
    "the newest whole one is taken; a warning names the damaged one and why",
)
def test_a_missing_part(saved):
    (saved / "step-00000004" / "rank-0.npz").unlink()
    passed_over(saved, "rank-0.npz is missing")


@pytest.mark.fault(
    "training",
    "the newest checkpoint's manifest is missing",
    "the newest whole one is taken; a warning names the damaged one and why",
)
def test_a_missing_manifest(saved):
    (saved / "step-00000004" / "checkpoint.json").unlink()
    passed_over(saved, "checkpoint.json is missing")


@pytest.mark.fault(
    "training",
    "the newest checkpoint is a file, or a part of it a folder or a pipe",
    "the newest whole one is taken; a warning names the damaged one and why",
)
def test_files_and_folders_that_are_the_other_kind(saved):
    folder = saved / "step-00000004"
    for name in ("rank-1.npz", "checkpoint.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).mkdir()
        passed_over(saved, f"{name} is not a file")
        (folder / name).rmdir()
        os.mkfifo(folder / name)  # which would be waited for
        passed_over(saved, f"{name} is not a file")
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    shutil.rmtree(folder)
    folder.write_bytes(b"no folder")
    passed_over(saved, "it is not a folder")
    job = Job()
    assert job.restore(saved) == 2
    assert job.save(saved, 4) == ""
    assert job.restore(saved) == 4


@pytest.mark.fault(
    "training",
    "the newest checkpoint's manifest is edited or unreadable",
    "the newest whole one is taken; a warning names the damaged one and why",
)
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
        '{"format": "autoddl-plan"}': "is not a manifest of a checkpoint",
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
        ("files", [{**parts[0], "name": "../step-00000002/rank-0.npz"}], "which is not the name of a part"),
        ("files", [{**parts[0], "bytes": -1}], "bytes is -1"),
    ):
        rewritten(folder, **{field: value})
        passed_over(saved, reason)
        path.write_text(text)
    os.truncate(path, files._MAX_MANIFEST_BYTES + 1)
    passed_over(saved, f"at most {files._MAX_MANIFEST_BYTES} are read")


@pytest.mark.fault(
    "training", "ranks see different states of the newest checkpoint", "none takes it; all take the one before it"
)
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
    "training",
    "there are checkpoints, and none is whole",
    "refused in one line: training does not begin anew in silence",
)
def test_no_whole_checkpoint(saved):
    for step in (2, 4):
        (saved / f"step-{step:08d}" / "rank-0.npz").unlink()
    job = Job()
    errors = job.each(lambda member: restore(saved, member, shapes(member.rank)))
    assert all(isinstance(error, UserError) for error in errors)
    reasons = "step-00000004: rank-0.npz is missing; step-00000002: rank-0.npz is missing"
    assert f"checkpoints {saved}: none of 2 is intact ({reasons})" in str(errors[0]) and job.warnings == []


@pytest.mark.fault(
    "training",
    "the newest whole checkpoint is of another model",
    "refused in one line on all ranks; no older one is tried",
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


def header(shape: str, dtype: str = "'<f4'") -> bytes:
    out = io.BytesIO()
    np.save(out, np.zeros(1, np.float32))
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}"
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
        ({names[0]: header("(35,)", "'|V4'") + bytes(140)}, zipfile.ZIP_STORED, "has elements of type"),
        ({names[0]: header("(35,)", "()") + bytes(140)}, zipfile.ZIP_STORED, "rank-1.npz is malformed: "),
        ({names[0]: b"\x93NUMPY\x03\x00" + bytes(100)}, zipfile.ZIP_STORED, "is of version (3, 0)"),
        ({names[0]: bytes(2**24)}, zipfile.ZIP_DEFLATED, "is compressed"),
        ({names[0]: b"no array at all"}, zipfile.ZIP_STORED, "rank-1.npz is malformed: "),
        ({f"layer1.weight/{'k' * 5000}.npy": good}, zipfile.ZIP_STORED, "has 5000 characters, should have at most 100"),
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
