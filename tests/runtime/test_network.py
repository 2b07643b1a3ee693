"""Counting bytes on a network of one's own, against bytes that are sent by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoddl.pipelines.runtime.ranks.network import namespace_available

AVAILABLE = namespace_available()
needs_namespace = pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason)

SCRIPT = Path(__file__).with_name("count_by_hand.py")
ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_namespace
def test_the_payload_is_counted_exactly():
    assert run(str(SCRIPT), "send", "1", "1000", "40500") == "1\n1000\n40500\n"


@needs_namespace
def test_looking_for_namespaces_leaves_the_caller_where_it_is():
    before = os.readlink("/proc/self/ns/net")
    assert namespace_available()
    assert os.readlink("/proc/self/ns/net") == before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's namespaces")
def test_where_there_is_none_the_reason_is_given():
    """A system that forbids namespaces, as seen by a process whose libc refuses to make one."""
    code = (
        "import ctypes, sys\n"
        "from autoddl.pipelines.runtime.ranks import network\n"
        "class Forbidding:\n"
        "    def __init__(self, *args, **kwargs): ctypes.set_errno(1)\n"
        "    def unshare(self, flags): return -1\n"
        "network.ctypes.CDLL = Forbidding\n"
        "try:\n"
        "    network.create_namespace()\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    assert run("-c", code) == "[Errno 1] a network namespace cannot be created: Operation not permitted\n"


def test_other_systems_are_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    available = namespace_available()
    assert not available
    assert available.reason == "network namespaces need Linux; this is darwin"
