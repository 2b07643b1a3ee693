"""A killed rank has one exit code and one line, whatever command started it. (Of `launch`: see `test_launch`.)"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from autoddl.__main__ import main
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.launcher import RankPool

ONEFLOW = is_available()
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)]

COMMANDS = {
    "verify": ["verify", "plan.json", "--ranks", "2"],
    "verify pipeline": ["verify", "pipeline.json", "--ranks", "2"],
    "calibrate": ["calibrate", "--ranks", "2", "--sizes", "1KiB,4KiB"],
    "rank": ["rank", "mlp:64,64,64", "--ranks", "2", "--strategies", "3"],
    "train": ["train", "gpt:2x16", "--steps", "1"],
}


@pytest.fixture(autouse=True)
def _killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank of every pool is killed as soon as it has something to do. Nobody need have loaded OneFlow for that, so the
    others just wait."""
    monkeypatch.chdir(tmp_path)
    start, run_each = RankPool.__init__, RankPool.run_each

    def start_without_oneflow(self: RankPool, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **{**options, "with_oneflow": False, "private_network": False})

    def kill_and_run(self: RankPool, *_arguments: Any, **options: Any) -> list[Any]:
        os.kill(self.pids[-1], signal.SIGKILL)
        return run_each(self, "time:sleep", [(600.0,)] * self.num_ranks, **options)

    monkeypatch.setattr(RankPool, "__init__", start_without_oneflow)
    monkeypatch.setattr(RankPool, "run_each", kill_and_run)


@pytest.mark.fault(
    "output",
    "a rank is killed in `verify`, `calibrate`, `rank` or `train`",
    "all ranks are ended; one line names the rank and the signal",
    exit_code=1,
)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_rank(name, capsys):
    plan = ["plan", "mlp:64,64,64", "--cluster", "local-cpu", "--devices-per-node", "2", "--quiet"]
    if "plan.json" in COMMANDS[name]:
        assert main([*plan, "-o", "plan.json"]) == 0
    if "pipeline.json" in COMMANDS[name]:
        assert main([*plan, "--pipeline", "dapple", "--time-limit", "2", "-o", "pipeline.json"]) == 0
    capsys.readouterr()
    assert main([*COMMANDS[name], "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("autoddl: rank 1 of 2 was killed by SIGKILL, perhaps for lack of memory")
