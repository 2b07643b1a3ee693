"""Sample files: appended, continued, read; and everything that can be wrong with them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from autoddl.calib.measurements import COLUMNS, Sample, SampleFile, read_samples
from autoddl.costmodel.errors import UserError

SAMPLE = Sample(
    "all-gather", "intra-node", 2, 4096, 0, 1.25e-4, "host", "2026-01-02T03:04:05Z", 4, 4, 2, 2, "", 0.01, "x, y"
)
PRODUCT = Sample("matmul", "device", 1, 96, 0, 2e-5, job_ranks=2, ranks_per_node=2, cores=2, shape="2x3x4")


def test_samples_round_trip(tmp_path):
    path = tmp_path / "samples.csv"
    SampleFile(path).append([SAMPLE, PRODUCT, replace(SAMPLE, repetition=1)])
    assert read_samples(path) == [SAMPLE, PRODUCT, replace(SAMPLE, repetition=1)]


def test_a_file_is_continued_and_an_incomplete_line_removed(tmp_path):
    path = tmp_path / "samples.csv"
    SampleFile(path).append([SAMPLE, replace(SAMPLE, repetition=1)])
    torn = path.read_text()[:-25]
    path.write_text(torn)
    file = SampleFile(path)
    assert file.samples == [SAMPLE]
    file.append([replace(SAMPLE, repetition=1, seconds=3e-4)])
    assert [sample.seconds for sample in read_samples(path)] == [1.25e-4, 3e-4]


def test_each_append_is_on_the_disk_at_once(tmp_path):
    path = tmp_path / "samples.csv"
    file = SampleFile(path)
    file.append([SAMPLE])
    assert len(path.read_text().splitlines()) == 2
    file.append([SAMPLE])
    assert len(path.read_text().splitlines()) == 3


def test_a_plain_csv(tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_text(
        "seconds,bytes,collective,ranks,comment\n0.001,1024,all_reduce,4,first\n0.002,2048,All-Reduce,4,second\n"
    )
    assert read_samples(path) == [
        Sample("all-reduce", "intra-node", 4, 1024, 0, 0.001, job_ranks=4, ranks_per_node=4),
        Sample("all-reduce", "intra-node", 4, 2048, 0, 0.002, job_ranks=4, ranks_per_node=4),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("collective,ranks,bytes\nall-reduce,2,10\n", r"column 'seconds' is missing; its first line names collective, ranks"),
        ("", "column 'collective' is missing; its first line names nothing"),
        ("collective,ranks,bytes,seconds\n", "holds no samples"),
        ("collective,ranks,bytes,seconds\nall-reduce,2,10,-0.5\n", "line 2: seconds is '-0.5', should be a time of more than 0"),
        ("collective,ranks,bytes,seconds\nall-reduce,2,10,0\n", "line 2: seconds is '0'"),
        ("collective,ranks,bytes,seconds\nall-reduce,2,10,nan\n", "line 2: seconds is 'nan'"),
        ("collective,ranks,bytes,seconds\nall-reduce,2,10,fast\n", "line 2: seconds is 'fast'"),
        ("collective,ranks,bytes,seconds\nall-reduce,2,10,1\nall-reduce,2,1", "line 3: has 3 values, should have 4; was the"),
        ("collective,ranks,bytes,seconds\nall-reduce,1,10,1\n", "ranks is '1', should be a whole number of at least 2"),
        ("collective,ranks,bytes,seconds\nall-reduce,2,1.5,1\n", "bytes is '1.5', should be a whole number"),
        ("collective,ranks,bytes,seconds\nall-reduce,2,0,1\n", "bytes is '0'"),
        ("collective,ranks,bytes,seconds\nbroadcast,2,10,1\n", "collective is 'broadcast', should be one of all-reduce"),
        ("collective,ranks,bytes,seconds,level\nall-reduce,2,10,1,rack\n", "level of all-reduce is 'rack', should be"),
        ("collective,ranks,bytes,seconds,shape\nmatmul,1,10,1,3x4\n", "shape of a matmul is '3x4', should be MxKxN"),
        ("collective,ranks,bytes,seconds,seconds\nall-reduce,2,10,1,1\n", "names a column twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=f"bad.csv: .*{message}|bad.csv: {message}"):
        read_samples(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.csv: cannot be read"):
        read_samples(tmp_path / "nowhere.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary.csv: cannot be read"):
        read_samples(tmp_path / "binary.csv")


def test_another_kind_of_file_is_not_overwritten(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nof today\n")
    with pytest.raises(UserError, match="its first line should be the header of a file of samples"):
        SampleFile(path)
    assert path.read_text() == "my notes\nof today\n"


def test_a_full_disk_keeps_what_was_written(tmp_path):
    """On a file system of 64 KB: the error says so, and every whole line that fitted is still there."""
    mount = tmp_path / "small"
    mount.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], check=False).returncode
    ):
        pytest.skip("needs the right to mount a small file system")
    try:
        path = mount / "samples.csv"
        file = SampleFile(path)
        with pytest.raises(
            UserError,
            match=r"samples.csv: cannot be written \(No space left on device\); the \d+ samples in it are kept",
        ):
            for number in range(10_000):
                file.append([replace(SAMPLE, repetition=number)])
        assert len(file.samples) > 200
        text = path.read_text()
        assert text.count("\n") >= len(file.samples)
        # The next run starts from all whole lines.
        assert SampleFile(path).samples[: len(file.samples)] == file.samples
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_device_without_space(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with pytest.raises(UserError, match=r"/dev/full: cannot be written \(No space left on device\)"):
        SampleFile("/dev/full")


def test_columns_are_those_that_are_documented():
    assert COLUMNS[:8] == ("collective", "level", "ranks", "bytes", "repetition", "seconds", "host", "time")
    assert "versions" in COLUMNS


def test_repetitions_are_numbered_again(tmp_path):
    path = tmp_path / "twice.csv"
    SampleFile(path).append([SAMPLE, SAMPLE, replace(SAMPLE, stride=1), SAMPLE])
    assert [sample.repetition for sample in read_samples(path)] == [0, 1, 0, 2]
