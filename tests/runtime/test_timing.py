"""Timing of operations, and peak memory, on a CPU rank."""

from __future__ import annotations

import resource
from itertools import count

import numpy as np
import pytest

from autoddl.costmodel.devices import CPU
from autoddl.pipelines.runtime.peakmemory import PeakMemory, of_process
from autoddl.pipelines.runtime.timing import MAX_WINDOWS, WINDOW, is_settled, span_of, warm_up


def test_windows_end_when_the_times_settle():
    """A clock that doubles with each call until its eighth: windows of 3 have medians 64, 8, 1, 1."""
    calls = count()
    assert warm_up(lambda num: np.array([float(2 ** max(0, 7 - next(calls))) for _ in range(num)])) == 4
    assert next(calls) == 4 * WINDOW


def test_one_slow_call_of_a_window_does_not_matter():
    assert is_settled(np.array([1.0, 9.0, 1.0]), np.array([1.0, 1.0, 1.05]))
    assert not is_settled(np.array([1.2, 1.2, 1.2]), np.array([1.0, 1.0, 1.0]))
    assert is_settled(np.array([1.2, 1.2, 1.2]), np.array([1.0, 1.0, 1.0]), tolerance=0.25)


def test_times_that_never_settle_end():
    calls = count(1)
    assert warm_up(lambda num: np.full(num, 2.0 ** next(calls))) == MAX_WINDOWS
    assert next(calls) == MAX_WINDOWS + 1


def test_what_is_timed_begins_after_its_delay():
    events = []
    begin, end = span_of(lambda: events.append("run"), CPU, lambda: events.append("join"), delay_s=0.02)
    assert events == ["join", "run"]
    assert 0.02 <= begin <= end


def test_peak_memory_of_a_process():
    """At least that of an array that was written to."""
    memory = PeakMemory(CPU)
    np.ones(2**24)  # 128 MiB
    read = memory.read()
    assert read is not None and read >= 2**27
    assert read == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, rel=0.01)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("", None), ("7, 300\n", None), ("8, 300\n", 300), ("8, 300\n7, 1\n8, 20\n", 320), ("8, [N/A]\n", None)],
)
def test_memory_that_nvidia_smi_lists(listed, expected):
    assert of_process(listed, 8) == (None if expected is None else expected * 2**20)
