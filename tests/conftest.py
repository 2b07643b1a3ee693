from __future__ import annotations

import os
from dataclasses import astuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import autoddl

from .faults import PAGE, Fault, of_mark, page_with

# A busy machine is no fault of a test's.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--faults``: run the tests that are marked as a fault's, and write docs/faults.md. ``--fuzz-cases``: how much to fuzz."""
    parser.addoption("--faults", action="store_true", help="run the tests of faults, and write docs/faults.md")
    parser.addoption(
        "--fuzz-cases", type=int, default=2000, metavar="N", help="mutated inputs of each reader (%(default)s)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(area, fault, outcome, exit_code=None): a row of docs/faults.md")
    config.addinivalue_line("markers", "ranks: starts ranks, or other processes that need the machine for themselves")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks of faults are checked, and passed on to the reports."""
    for item in items:
        for mark in item.iter_markers("fault"):
            fault = of_mark(mark.args, mark.kwargs, item.nodeid.partition("[")[0])
            item.user_properties.append(("fault", astuple(fault)))
    if config.getoption("--faults"):
        config.hook.pytest_deselected(items=[item for item in items if not item.get_closest_marker("fault")])
        items[:] = [item for item in items if item.get_closest_marker("fault")]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """With ``--faults`` and nothing failed: write the page. Of a test with parameters, the longest one's seconds."""
    if not config.getoption("--faults") or exitstatus != 0:
        return
    measured: dict[Fault, float | None] = {}
    for outcome in ("passed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            properties = dict(report.user_properties)
            if "fault" in properties:
                fault = Fault(*properties["fault"])
                seconds = None if outcome == "skipped" else properties.get("seconds", report.duration)
                measured[fault] = max((s for s in (seconds, measured.get(fault)) if s is not None), default=None)
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), measured.items()), encoding="utf-8")
    terminalreporter.write_line(f"{len(measured)} faults written to {PAGE}")


def pytest_report_header() -> str:
    """What is under test: the sources or an installed wheel, with OneFlow or without."""
    try:
        oneflow = f"OneFlow {version('oneflow')}"
    except PackageNotFoundError:
        oneflow = "no OneFlow, its tests are skipped"
    return f"autoddl {version('autoddl')} from {Path(autoddl.__path__[0])}; {oneflow}"


@pytest.fixture(scope="session", autouse=True)
def _away_from_the_sources(tmp_path_factory: pytest.TempPathFactory):
    """Run everything in an empty folder.

    A `python -m autoddl` started by a test would otherwise import the repository's autoddl/ folder in place of the
    installed package, and a test could depend on where it was started.
    """
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(before)
