"""Faults of checkpoints and ranks while training, through the commands: `autoddl train`, and `autoddl launch --max-restarts`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.pipeline.checkpoint import checkpoints_in, open_checkpoint
from autoddl.pipelines.runtime.ranks.launcher import RankPool

from ..sharedranks import lending
from .launches import BRISK, START, launch_command, processes_with, shown, wait_until_gone
from .sample_plans import cpu_pipeline

ONEFLOW = is_available()
pytestmark = [pytest.mark.ranks("launches"), pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)]
Trained = tuple[list[str], Path, list[float]]
TEXT = "In the beginning was the pipe, and the pipe was without bubbles, and void. " * 20
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def trained(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A command, its checkpoints of steps 2 and 4, and the losses of the four steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_text(TEXT)
    command = ["train", "gpt:2x16", "--text", str(folder / "text"), "--sequence", "8", "--every", "2", "--json"]
    out, err = io.StringIO(), io.StringIO()
    with lending(ranks), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*command, "--steps", "4", "--checkpoints", str(folder / "saved")])
    assert (code, err.getvalue()) == (0, "")
    return command, folder / "saved", json.loads(out.getvalue())["losses"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.fault(
    "training",
    "the newest checkpoint of `autoddl train` is damaged",
    "training goes on from the one before it, with the same losses; a warning names the damaged one",
    exit_code=0,
)
def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(trained, lent_ranks, tmp_path, capsys):
    command, saved, losses = trained
    directory = tmp_path / "saved"
    shutil.copytree(saved, directory)
    flip(directory / "step-00000004" / "rank-1.npz")
    assert main([*command, "--steps", "6", "--checkpoints", str(directory)]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["first_step"] == 2 and len(document["losses"]) == 4
    assert document["losses"][:2] == pytest.approx(losses[2:], rel=1e-6)
    warning = (
        f"autoddl: warning: checkpoint {directory}/step-00000004 is damaged and skipped: rank-1.npz has another SHA-256"
    )
    assert captured.err.startswith(warning) and captured.err.count("\n") == 1
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.fault(
    "training",
    "all checkpoints of `autoddl train` are damaged",
    "one line names the directory and what is wrong; training does not begin anew",
    exit_code=2,
)
def test_training_does_not_begin_anew_in_silence(trained, tmp_path, capsys):
    command, saved, _ = trained
    directory = tmp_path / "saved"
    shutil.copytree(saved, directory)
    for path in directory.glob("*/rank-0.npz"):
        path.unlink()
    assert main([*command, "--steps", "6", "--checkpoints", str(directory)]) == 2
    error = capsys.readouterr().err
    reasons = "step-00000004: rank-0.npz is missing; step-00000002: rank-0.npz is missing"
    assert f"checkpoints {directory}: none of 2 is intact ({reasons})" in error and error.count("\n") == 1


@pytest.mark.fault(
    "training",
    "the disk is full while a checkpoint is written",
    "a warning names the path, older ones stay whole, training goes on; code 2 where the last one is missing at the end",
    exit_code=2,
)
def test_a_full_disk(trained, tmp_path):
    """In a file system of a mount namespace, with room for one checkpoint and a half."""
    command, saved, losses = trained
    size = sum(path.stat().st_size for path in (saved / "step-00000004").iterdir())
    words = [sys.executable, "-c", START, *command, "--steps", "6", "--checkpoints", "full/saved"]
    script = f"""
        mkdir full && mount -t tmpfs -o size={3 * size // 2} none full || exit 99
        "$@" > out 2> err
        code=$?
        cp -r full/saved kept
        exit $code
    """
    namespace = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if not shutil.which("unshare") or os.geteuid() != 0:
        pytest.skip("a small file system takes root and unshare")
    done = subprocess.run([*namespace, *words], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode == 99 or done.stderr.startswith("unshare:"):
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    lines = (tmp_path / "err").read_text().splitlines()
    assert done.returncode == 2, lines
    assert json.loads((tmp_path / "out").read_text())["losses"][:4] == pytest.approx(losses, rel=1e-6)
    warnings, last = lines[:-1], lines[-1]
    assert len(warnings) == 2
    for step, warning in zip((4, 6), warnings):
        pattern = rf"checkpoint of step {step} cannot be written: \S*full/saved/\S+: No space left on device"
        assert re.match(f"autoddl: warning: {pattern}", warning), warning
    assert "steps after step 2 are not saved" in last and "No space left on device" in last
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-00000002"]
    left = open_checkpoint(tmp_path / "kept" / "step-00000002")
    left.verify(left.parts)


OWN_MODEL = """
import os, signal
import oneflow as flow

def killed():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return flow.nn.Sequential(flow.nn.Linear(2, 2), flow.nn.Linear(2, 2)), (flow.ones(4, 2), flow.ones(4, 2))
"""


@pytest.mark.fault(
    "training", "a rank of `autoddl train` is killed", "one line names the rank and its log", exit_code=1
)
def test_a_killed_rank_of_train(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN_MODEL)
    assert main(["train", f"{tmp_path}/own.py:killed", "--steps", "2"]) == 1
    error = capsys.readouterr().err
    assert "rank 1 of 2 was killed by SIGKILL" in error and error.count("\n") == 1


@pytest.mark.fault(
    "training",
    "`autoddl train` is interrupted by Ctrl-C or SIGTERM",
    "its ranks are ended; the next start goes on from the newest checkpoint",
    exit_code="130, 143",
)
@pytest.mark.parametrize(("number", "num_ranks"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_an_interrupted_training(trained, tmp_path, number, num_ranks):
    command, _, _ = trained
    directory = tmp_path / "saved"
    words = [*command, "--steps", "1000000", "--checkpoints", str(directory), "--stages", str(num_ranks)]
    environment = {**os.environ, "MARK": str(directory)}  # by which ranks are found
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", START, *words], **options) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not list(directory.glob("step-*")):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            assert len(processes_with(str(directory))) >= 1 + num_ranks
            process.send_signal(number)
            _, error = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode in (128 + number, -number)  # -15: the signal itself, which a shell calls 143
    assert error.count("\n") <= 1 and "Traceback" not in error
    wait_until_gone(str(directory), patience_s=120.0)
    _, newest = checkpoints_in(directory)[0]
    left = open_checkpoint(newest)
    left.verify(left.parts)


NUM_STEPS = 4


@pytest.mark.fault(
    "training",
    "a rank of `autoddl launch --max-restarts` is killed while it writes a checkpoint, twice, and the newest one is damaged",
    "the job goes on from the newest whole one each time, and its losses are those of an undisturbed one",
    exit_code=0,
)
def test_kills_while_checkpoints_are_written(tmp_path, monkeypatch, losses_alone):
    """Kills at random moments of a save, of either rank, and damage between two attempts.

    It takes 10 s: two ranks are started three times. Every single moment is tried without ranks, in test_saving.py. The undisturbed
    job is one of a single rank without a pipeline.
    """
    monkeypatch.chdir(tmp_path)
    rng = random.Random(11)
    words = [f"1:3:{rng.random()}", f"damage 0:2:{rng.random()}"]
    options = ["--max-restarts", "2", "--checkpoints", "saved", "--log-dir", "logs", "--", str(NUM_STEPS), *words]
    plan = cpu_pipeline(tmp_path / "plan.json", 1, 2, StageMesh(1, 1))
    command = launch_command(plan, *options, script=Path(__file__).with_name("killed_script.py"), start=BRISK)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    lines = shown(done.stdout)
    found: dict[int, float] = {}
    for _, step, loss in (line.split() for of_rank in lines.values() for line in of_rank if line.startswith("step")):
        assert found.setdefault(int(step), float(loss)) == float(loss)  # whenever the step is done
    losses = losses_alone(NUM_STEPS)
    assert [found[step] for step in range(1, NUM_STEPS + 1)] == pytest.approx(losses, rel=1e-5)
    assert len(set(losses)) == NUM_STEPS
    assert done.stderr.count("was killed by SIGKILL") == 2 == done.stderr.count("starting again")
    warnings = [line for line in lines[0] if line.startswith("autoddl: warning: ")]
    assert warnings and all("is damaged and skipped: rank-1.npz has 1000 bytes" in line for line in warnings)
    for of_rank in lines.values():
        assert of_rank[-1] == "left step-00000003 step-00000004"
