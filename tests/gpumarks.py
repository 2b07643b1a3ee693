"""Tests that need GPUs: they are skipped where OneFlow finds fewer than they need, and can run on CPU ranks instead.

A test of tests/gpu has the argument ``device``. It is collected once with ``cuda`` and once with ``cpu``, in all its cases:

- The cases with ``cuda`` have the mark ``gpu(n)``, and are skipped with fewer than n GPUs.
- The cases with ``cpu`` run the same code on CPU ranks, with wider types in place of half precision. With ``--gpu-tests-on-cpu``
  all of them run, and those with ``cuda`` do not. Without it only some run, so that the tests cannot rot: those whose values are
  named by the mark ``on_cpu(argument=(value, ...), ...)`` of the test, by default its first case.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest

from autoddl.costmodel.devices import CPU, GPU
from autoddl.pipelines.runtime.load import is_available

__all__ = ["FIGURES", "OPTION", "add_marks", "num_gpus", "select_devices", "skip_without_gpus", "summary_of"]

OPTION = "--gpu-tests-on-cpu"
#: Name of the lines of figures that a test leaves for the end of the run.
FIGURES = "figures of devices"
#: Run in a process of its own, since pytest's does not load OneFlow.
_COUNT = """
from autoddl.pipelines.runtime.load import load_oneflow
cuda = load_oneflow().cuda
print(cuda.device_count() if cuda.is_available() else 0)
"""
_COUNT_PATIENCE_S = 120.0
_NEEDS = "needs GPUs"


def add_marks(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(n): its cases with the device cuda need n GPUs")
    config.addinivalue_line("markers", "on_cpu(**values): the cases that also run on CPU ranks where there are no GPUs")


@functools.cache
def num_gpus() -> int:
    """The number of GPUs that OneFlow finds; 0 where it cannot be loaded."""
    if not is_available():
        return 0
    command = [
        sys.executable,
        "-I",
        "-c",
        _COUNT,
    ]  # isolated: the repository's autoddl/ folder must not hide the package
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_PATIENCE_S)
    assert done.returncode == 0, f"OneFlow does not say how many GPUs there are:\n{done.stderr}"
    return int(done.stdout)


def _needed(item: pytest.Item) -> int:
    mark = item.get_closest_marker("gpu")
    return int(mark.args[0]) if mark else 0


def _device(item: pytest.Item) -> str | None:
    """The device of a case of a test with the mark ``gpu``."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("device") if callspec is not None and _needed(item) else None


def select_devices(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of tests of GPUs that this run is not for."""
    on_cpu, seen, left_out = config.getoption(OPTION), set(), []
    for item in items:
        device = _device(item)
        if device == GPU and on_cpu:
            left_out.append(item)
        elif device == CPU and not on_cpu:
            test, mark = item.nodeid.partition("[")[0], item.get_closest_marker("on_cpu")
            params = item.callspec.params  # type: ignore[attr-defined]
            is_chosen = (
                all(params[name] in values for name, values in mark.kwargs.items()) if mark else test not in seen
            )
            seen.add(test)
            if not is_chosen:
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


def skip_without_gpus(item: pytest.Item) -> None:
    """Skip a case that needs more GPUs than there are."""
    if _device(item) == GPU:
        needed, found = _needed(item), num_gpus()
        if found < needed:
            item.user_properties.append((_NEEDS, needed))
            pytest.skip(f"needs {needed} GPU{'s' if needed > 1 else ''}, OneFlow finds {found}")


def summary_of(reports: list[Any]) -> list[str]:
    """Lines for the end of a run: figures that tests of GPUs left, and how many were skipped."""
    lines = []
    for report in reports:
        if report.when == "call":
            lines += [str(value) for name, value in report.user_properties if name == FIGURES]
    at_setup = [dict(report.user_properties) for report in reports if report.when == "setup"]
    skipped = [properties[_NEEDS] for properties in at_setup if _NEEDS in properties]
    if skipped:
        counts = ", ".join(f"{skipped.count(n)} need {n}" for n in sorted(set(skipped)))
        lines.append(f"{len(skipped)} tests of GPUs were skipped ({counts}): OneFlow finds {num_gpus()} here")
    return lines
