"""Timing operations on a device: the process waits for the device before and after, and operations warm up first.

OneFlow returns from an operation before the device has run it. Two waits are needed around what is timed:

- ``eager.Sync()`` waits until OneFlow's virtual machine has run all instructions of this process. On CPU that is the work itself.
  On a GPU it is only the launch of the kernels, including those of NCCL.
- ``cuda.synchronize()`` waits for all streams of the GPU too. (It calls ``eager.Sync()`` first.)

OneFlow 0.9.0 has no CUDA events: neither ``oneflow``, ``oneflow.cuda`` nor its extension module has an event that can be recorded
in a stream. So times are those of the host's clock between two waits. What a wait costs is in every time (10 to 55 us for
``eager.Sync()`` on CPU ranks); short operations are therefore timed several times in a row, as they run in a step.

A device that was idle has a low clock, and the first calls of an operation also choose kernels, allocate memory, and connect NCCL's
ranks. So an operation runs in *windows* of a few calls until the median of a window is close to that of the window before
(`warm_up`). Repetitions of different operations are interleaved by the callers, so that a clock that drifts affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from autoddl.costmodel.devices import GPU

from .load import load_oneflow

__all__ = ["MAX_WINDOWS", "TOLERANCE", "WINDOW", "is_settled", "span_of", "synchronize", "warm_up"]

#: Number of calls of a window of the warm-up.
WINDOW = 3
#: Largest relative difference between the medians of two windows that counts as settled.
TOLERANCE = 0.1
#: Number of windows after which a warm-up ends, settled or not.
MAX_WINDOWS = 8


def synchronize(device: str) -> None:
    """Wait until all operations that this process has issued on a type of device are done."""
    flow = load_oneflow()
    if device == GPU:
        flow.cuda.synchronize()
    else:
        flow._oneflow_internal.eager.Sync()


def span_of(
    run: Callable[[], Any], device: str, join: Callable[[], Any] | None = None, delay_s: float = 0.0
) -> tuple[float, float]:
    """Return when ``run`` begins and ends on the device [s].

    Args:
        run: What to time.
        device: The type of device that it runs on.
        join: Called before the clock starts, when this process's device is idle; for example a barrier of all ranks.
        delay_s: How long to sleep in between.
    """
    synchronize(device)
    if join is not None:
        join()
    zero = time.perf_counter()
    if delay_s:
        time.sleep(delay_s)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return begin - zero, time.perf_counter() - zero


def is_settled(earlier: np.ndarray, later: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    """Return whether the medians of two windows of times differ by at most ``tolerance``, relative to the later one.

    >>> is_settled(np.array([9.0, 1.2, 1.1]), np.array([1.1, 1.0, 1.2]))
    True
    >>> is_settled(np.array([9.0, 5.2, 4.1]), np.array([1.1, 1.0, 1.2]))
    False
    """
    before, now = float(np.median(earlier)), float(np.median(later))
    return abs(before - now) <= tolerance * now


def warm_up(
    times_of: Callable[[int], np.ndarray], *, tolerance: float = TOLERANCE, max_windows: int = MAX_WINDOWS
) -> int:
    """Repeat an operation until its times settle, or ``max_windows`` windows have passed.

    Ranks that warm up together have to see the same times, so that they all stop after the same window.

    Args:
        times_of: Runs the operation a number of times and returns the seconds of each time.
        tolerance: See `is_settled`.
        max_windows: Largest number of windows, at least 2.

    Returns:
        The number of windows.

    >>> clock = iter([8.0, 4.0, 2.0] + [1.0] * 9)  # a clock that ramps up
    >>> warm_up(lambda num: np.array([next(clock) for _ in range(num)]))
    3
    """
    earlier = times_of(WINDOW)
    for number in range(2, max_windows + 1):
        later = times_of(WINDOW)
        if is_settled(earlier, later, tolerance):
            return number
        earlier = later
    return max_windows
