from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import hypothesis
import pytest

import autoddl

# A busy machine is no fault of a test's.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


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
