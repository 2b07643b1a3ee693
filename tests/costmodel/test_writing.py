"""Files are written wholly or not at all, keep their mode and owner, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.writing import is_same_file, write_atomically


@pytest.mark.fault(
    "output", "a file of mode 0600 is written anew", "it keeps its mode, and its owner where that is allowed"
)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_rewritten_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(mode)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_rewritten_file_keeps_its_owner(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    os.chown(path, 12345, 23456)
    write_atomically(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 23456)


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_links_are_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/plan.json")
    for text in ("first", "second"):  # the file does not exist, and does
        write_atomically(link, text)
        assert link.is_symlink() and (tmp_path / "folder" / "plan.json").read_text() == text


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        write_atomically(pipe, "text")
        assert reader.communicate(timeout=60)[0] == b"text"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_name_may_be_as_long_as_names_can_be(tmp_path):
    path = tmp_path / ("n" * 255)
    write_atomically(path, "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize(
    "name",
    ["n" * 5000, "n" * 256, "nul\0", "no/such/folder", ".", "loop"],
    ids=["5000", "256", "nul", "none", "folder", "loop"],
)
def test_unwritable_paths(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="cannot be written") as refused:
        write_atomically(f"{tmp_path}/{name}", "text")
    assert len(str(refused.value)) < 250
    assert [entry.name for entry in tmp_path.iterdir()] == ["loop"]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"plan.json: cannot be written \(No space left on device\)"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from autoddl.costmodel.writing import write_atomically
os.fsync = lambda handle: (print("writing", flush=True), signal.pause())
write_atomically(sys.argv[1], "new")
"""


@pytest.mark.fault(
    "output", "killed while it writes a file", "the old file is whole; the next writer there removes what was begun"
)
def test_what_a_killed_writer_left_is_swept(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        write_atomically(tmp_path / "other", "text")
        (part,) = tmp_path.glob(".autoddl-*.part")  # it lives: nobody else touches its part
        os.kill(writer.pid, signal.SIGKILL)
    assert path.read_text() == "old"
    begun = time.monotonic()
    write_atomically(path, "new")
    assert not part.exists() and path.read_text() == "new" and time.monotonic() - begun < 60


def test_one_file_by_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("soft").symlink_to("file")
    os.link("file", "hard")
    for name in ("file", "./file", "soft", "hard", str(tmp_path / "file")):
        assert is_same_file(name, "file")
    assert is_same_file("new", "./new") and not is_same_file("new", "file") and not is_same_file("a\0b", "file")
