"""Commands on GPUs: calibration, a launched plan, and an exported file under OneFlow's own launcher. Also on CPU ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autoddl
from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.devices import CPU, DEVICE_VARIABLE, GPU
from autoddl.pipelines.runtime.load import is_available

from ..autoddl.launches import forget_jobs
from ..processes import START
from ..sharedranks import lending

TEXT = Path(__file__).parents[1] / "runtime" / "sonnets.txt"
PATIENCE_S = 280.0
STEPS = 3
ONEFLOW = is_available()
#: Nothing else computes meanwhile.
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)]
BY_NUMBER = [pytest.param(n, marks=pytest.mark.gpu(n), id=f"{n} ranks") for n in (2, 4)]
#: On CPU ranks: as little as can be fitted.
FEW = ["--sizes", "4KiB,64KiB", "--collectives", "all-reduce", "--repetitions", "1"]


def run(command: list[str], device: str, folder: Path) -> str:
    """What a command prints; outside of any job."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in job and not k.startswith(("SLURM_", "OMPI_"))}
    environment[DEVICE_VARIABLE] = device
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def ours(*arguments: str) -> list[str]:
    return [sys.executable, "-c", START, *arguments]


@pytest.mark.gpu(2)
def test_calibration(device, tmp_path, note):
    """The cluster file has the rates of both precisions, and is of the devices that were measured.

    Every operation runs until its times settle, which takes CPU ranks 10 s.
    """
    if "--device" not in run(ours("calibrate", "--help"), device, tmp_path):
        pytest.skip("autoddl calibrate has no option --device")
    path, is_cpu = tmp_path / "measured.json", device == CPU
    arguments = ["--ranks", "2", "--budget", "60", "--base", "dgx-a100", "--quiet", "-o", str(path)]
    run(ours("calibrate", "--device", device, *arguments, *(FEW if is_cpu else [])), device, tmp_path)
    cluster = load_cluster(str(path))
    device_model = cluster.device
    for precision in ("float32", "mixed"):
        rate = device_model.efficiency * device_model.peak(precision)
        note(f"products in {precision}: {rate / 1e12:.3g} TFLOP/s")
        assert rate > 0
    assert cluster.has_gpus == (device == GPU)
    rows = (tmp_path / "measured.csv").read_text().splitlines()
    columns, *samples = (row.split(",") for row in rows)
    products = {
        sample[columns.index("precision")] for sample in samples if sample[columns.index("collective")] == "matmul"
    }
    assert products >= ({"mixed-cpu"} if is_cpu else {"float32", "mixed"})


def planned(num: int, folder: Path) -> tuple[Path, Path]:
    """A plan for GPUs in mixed precision, and its exported file."""
    plan: Any = autoddl.plan(
        "gpt:2x64", heads=4, sequence=32, vocabulary=256, batch=8, micro_batch=4, precision="mixed",
        cluster="dgx-a100", nodes=1, devices_per_node=num,
    )  # fmt: skip
    plan.save(folder / "plan.json")
    plan.export(folder / "model.py", form="oneflow")
    return folder / "plan.json", folder / "model.py"


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", text)]


@pytest.mark.on_cpu(num=(2,))
@pytest.mark.parametrize("num", BY_NUMBER)
def test_a_launched_plan_and_oneflows_own_launcher(device, tmp_path, note, num):
    """An exported file in mixed precision learns the same under both launchers; the loss falls from about log 256 = 5.5.

    It takes 10 s since each launcher starts ranks of its own.
    """
    plan, model = planned(num, tmp_path)
    arguments = ["--text", str(TEXT), "--steps", str(STEPS)]
    # `--force`: the GPUs here need not be those of the plan's cluster.
    launch = ours("launch", str(plan), "--force", "--device", device, str(model), "--", *arguments)
    launched = losses(run(launch, device, tmp_path))
    oneflows = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", str(num), str(model)]
    by_oneflow = losses(run([*oneflows, "--device", device, *arguments], device, tmp_path))
    note(f"losses {launched}")
    assert len(launched) == len(by_oneflow) == STEPS
    assert launched == pytest.approx(by_oneflow, rel=1e-4 if device == CPU else 5e-3)
    assert 5 < launched[0] < 7 and launched[-1] < launched[0]


@pytest.mark.gpu(2)
@pytest.mark.on_cpu(precision=("mixed",))
@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_training_on_this_machine(device, ranks, capsys, monkeypatch, note, precision):
    """`autoddl train` says where and in which types it ran."""
    forget_jobs(monkeypatch)
    command = ["train", "gpt:2x64", "--stages", "2", "--steps", str(STEPS), "--text", str(TEXT), "--json", "--quiet"]
    # On CPU ranks those that the other tests use.
    with lending(ranks) if device == CPU else contextlib.nullcontext():
        assert main([*command, "--device", device, "--precision", precision]) == 0
    document = json.loads(capsys.readouterr().out)
    compute = {"float32": "float32", "mixed": "float32" if device == CPU else "float16"}[precision]
    master = "float64" if device == CPU and precision == "mixed" else "float32"
    assert (document["device"], document["types"]) == (device, {"compute": compute, "master": master})
    note(f"losses {document['losses']}, {document['skipped_steps']} steps skipped")
    # The first scales of the loss may be too large for half precision; then those steps change nothing.
    if document["skipped_steps"] < STEPS - 1:
        assert document["losses"][-1] < document["losses"][0]
    assert len(document["losses"]) == STEPS and all(0 < loss < 10 for loss in document["losses"])
