"""Faults of checkpoints and ranks while training, through the commands: `autoddl train`, and `autoddl launch --max-restarts`."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.joint.meshes import StageMesh
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.pipeline.checkpoint import checkpoints_in, open_checkpoint

from .sample_plans import pipeline_plan, written
from .test_launch import START, processes_with, shown, wait_until_gone

ONEFLOW = is_available()
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)]
SCRIPT = Path(__file__).with_name("killed_script.py")
TEXT = "In the beginning was the pipe, and the pipe was without bubbles, and void. " * 20
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, list[float]]:
    """A command, its checkpoints of steps 2 and 4, and the losses of the four steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_text(TEXT)
    command = ["train", "gpt:2x16", "--text", str(folder / "text"), "--sequence", "8", "--every", "2", "--json"]
    words = [*command, "--steps", "4", "--checkpoints", str(folder / "saved")]
    done = subprocess.run([sys.executable, "-c", START, *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    return command, folder / "saved", json.loads(done.stdout)["losses"]


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
    warning = f"autoddl: warning: checkpoint {directory}/step-00000004 is damaged and passed over: rank-1.npz has another SHA-256"
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
    assert f"checkpoints {directory}: none of 2 is whole ({reasons})" in error and error.count("\n") == 1


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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training(trained, tmp_path, number):
    command, _, _ = trained
    directory = tmp_path / "saved"
    words = [*command, "--steps", "1000000", "--checkpoints", str(directory)]
    environment = {**os.environ, "MARK": str(directory)}  # by which ranks are found
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", START, *words], **options) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not list(directory.glob("step-*")):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            assert len(processes_with(str(directory))) >= 3
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


def launched(plan: str, checkpoints: str, *words: str) -> tuple[dict[int, list[str]], list[float], str]:
    """What the ranks say, the losses of all steps (the same whenever a step is done), and what the launcher says."""
    options = ["--max-restarts", str(len(words)), "--checkpoints", checkpoints, "--log-dir", f"{checkpoints}-logs"]
    command = [sys.executable, "-c", START, "launch", plan, str(SCRIPT), *options, "--", str(NUM_STEPS), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    lines, losses = shown(done.stdout), {}
    for line in (line for of_rank in lines.values() for line in of_rank if line.startswith("step")):
        _, step, loss = line.split()
        assert losses.setdefault(step, loss) == loss, line
    return lines, [float(losses[str(step)]) for step in range(1, NUM_STEPS + 1)], done.stderr


@pytest.mark.fault(
    "training",
    "a rank of `autoddl launch --max-restarts` is killed while it writes a checkpoint, twice, and the newest one is damaged",
    "the job goes on from the newest whole one each time, and its losses are those of an undisturbed one",
    exit_code=0,
)
def test_kills_while_checkpoints_are_written(tmp_path, monkeypatch):
    """Kills at random moments of a save, of either rank, and damage between two attempts.

    It takes 15 s: ranks are started four times, once for the undisturbed job. Every single moment is tried without ranks, in
    test_saving.py.
    """
    monkeypatch.chdir(tmp_path)
    cluster = load_cluster("local-cpu").resized(1, 2)
    plan = written(tmp_path / "plan.json", pipeline_plan(cluster=cluster, mesh=StageMesh(1, 1), precision="float32"))
    lines, losses, _ = launched(plan, "undisturbed")
    assert len(set(losses)) == NUM_STEPS
    ends = {rank: of_rank[-1].split() for rank, of_rank in lines.items()}
    assert all(end[0] == "events" and end[2:] == ["step-00000003", "step-00000004"] for end in ends.values())
    per_save = {rank: int(end[1]) // NUM_STEPS for rank, end in ends.items()}
    rng = random.Random(11)
    words = [f"1:{rng.randrange(2 * per_save[1], 3 * per_save[1])}", f"damage 0:{rng.randrange(per_save[0])}"]
    lines, disturbed, said = launched(plan, "disturbed", *words)
    assert disturbed == pytest.approx(losses, rel=1e-6)
    assert said.count("was killed by SIGKILL") == 2 == said.count("starting again")
    warnings = [line for line in lines[0] if line.startswith("autoddl: warning: ")]
    assert warnings and all("is damaged and passed over: rank-1.npz has 1000 bytes" in line for line in warnings)
    assert ends[0][2:] == lines[0][-1].split()[2:]
