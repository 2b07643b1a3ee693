"""Files in memory: other processes find them by path, and what is forgotten takes no memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from autoddl.pipelines.runtime.memory_files import MemoryFile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")


def test_other_processes_write_there():
    file = MemoryFile()
    subprocess.run(["sh", "-c", f"echo one >> {file.path}; echo two >> {file.path}"], check=True, timeout=60)
    assert file.path.read_text() == "one\ntwo\n"
    file.close()


def test_what_is_forgotten_takes_no_memory():
    file = MemoryFile()
    file.path.write_bytes(b"x" * (1 << 20))
    before = os.fstat(file.fd).st_blocks
    file.forget(1 << 19)
    file.forget(-5)
    assert os.fstat(file.fd).st_blocks <= before // 2
    assert os.fstat(file.fd).st_size == 1 << 20
    assert os.pread(file.fd, 2, (1 << 19) - 1) == b"\0x"
    file.close()
