"""Ranks take short turns on their cores, where the kernel has such a thing."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from autoddl.pipelines.runtime.ranks.turns import _ATTRIBUTES, TURN_NS

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}

SCRIPT = """
import ctypes, os, sys, threading
from autoddl.pipelines.runtime.ranks.turns import _ATTRIBUTES, take_short_turns

def turn():
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall({number}, 0, buffer, len(buffer), 0) == 0
    _, policy, _, nice, _, runtime, *_ = _ATTRIBUTES.unpack(buffer.raw)
    return policy, nice, runtime

os.nice(3)
assert take_short_turns()
threads = [threading.Thread(target=lambda: print(*turn()))]
threads[0].start()
threads[0].join()
print(*turn())
"""


def turn_ns() -> int:
    """Of this process; 0 where the kernel does not say."""
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    ctypes.CDLL(None).syscall(SCHED_GETATTR[platform.machine()], 0, buffer, len(buffer), 0)
    return _ATTRIBUTES.unpack(buffer.raw)[5]


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() not in SCHED_GETATTR, reason="a matter of Linux"
)
def test_threads_inherit_short_turns_and_niceness_stays():
    script = SCRIPT.format(number=SCHED_GETATTR[platform.machine()])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = TURN_NS if turn_ns() else 0
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    assert done.stdout.splitlines() == [f"{os.SCHED_OTHER} {niceness} {expected}"] * 2
