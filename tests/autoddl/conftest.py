from __future__ import annotations

import contextlib
import io
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
