from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autoddl.__main__ import main


@pytest.fixture(scope="session")
def mlp_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """``mlp_plan(nodes, devices_per_node)``: a plan of a small model for so many CPU ranks."""
    folder = tmp_path_factory.mktemp("plans")

    def make(nodes: int, devices_per_node: int) -> Path:
        path = folder / f"plan{nodes}x{devices_per_node}.json"
        if not path.exists():
            shape = ["--nodes", str(nodes), "--devices-per-node", str(devices_per_node)]
            options = [*shape, "--batch", "32", "--quiet", "-o", str(path)]
            with contextlib.redirect_stdout(io.StringIO()):
                assert main(["plan", "mlp:64,128,64", "--cluster", "local-cpu", *options]) == 0
        return path

    return make


@pytest.fixture
def outside_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, and not inside anybody's job."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "OMPI_", "AUTODDL_")):
            monkeypatch.delenv(name)
