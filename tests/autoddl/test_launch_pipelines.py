"""`autoddl launch` of plans with pipelines: ranks where the plan has their workers, and training.

One script trains any plan, so what a pipeline learns is compared with what a plan of one rank learns. That a job with a pipeline
goes on after a failure is shown in test_train_faults.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.errors import UserError
from autoddl.launching.demands import demands_of
from autoddl.launching.hosts import Host, Placement, place, renumbered
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.runtime.load import is_available
from autoddl.planfile import load_plan

from .launches import PATIENCE_S, SCRIPT, launch_command, shown
from .sample_plans import cpu_pipeline

pytestmark = [pytest.mark.ranks("launches"), pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")]
ONEFLOW = is_available()
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)
NUM_STEPS = 2


@pytest.fixture(autouse=True)
def _here(outside_of_jobs: None) -> None:
    """All tests."""


def losses(out: str) -> list[float]:
    """Of all steps, from whatever rank knows them."""
    found = [line.split() for lines in shown(out).values() for line in lines if line.startswith("step")]
    return [float(loss) for _, _, loss in sorted(found, key=lambda words: int(words[1]))]


# ---- Where ranks are ----------------------------------------------------------------------------------------------------


def test_ranks_are_where_the_plan_has_their_workers(tmp_path, capsys):
    """Workers of one device on each of two nodes: ranks 0 1 of worker 0 are devices 0 2, those of worker 1 devices 1 3."""
    path = cpu_pipeline(tmp_path / "plan.json", 2, 2, StageMesh(2, 1))
    demands = demands_of(load_plan(path))
    assert demands.devices == (0, 2, 1, 3)
    assert [demands.rank_on(device) for device in range(4)] == [0, 2, 1, 3]
    hosts = [Host("a"), Host("b")]
    assert renumbered(place(hosts, 2, 2), demands.rank_on) == [Placement(hosts[0], (0, 2)), Placement(hosts[1], (1, 3))]
    assert main(["launch", path, str(SCRIPT), "--hosts", "a,b", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "host a: ranks 0, 2\n" in out and "host b: ranks 1, 3\n" in out


def test_memory_is_that_of_each_stage(tmp_path):
    plan = load_plan(cpu_pipeline(tmp_path / "plan.json"))
    demands = demands_of(plan)
    first, second = (worker["memory_bytes"] for worker in plan.document["workers"])
    assert demands.devices == () and first != second
    assert demands.memory_bytes == (first, first, second, second)


def test_workers_have_to_share_out_the_devices(tmp_path):
    plan = load_plan(cpu_pipeline(tmp_path / "plan.json"))
    workers = [dict(worker) for worker in plan.document["workers"]]
    workers[1]["ranks"] = [1, 2]
    document = {**plan.document, "workers": workers}
    with pytest.raises(UserError, match=r"has ranks \[0, 1, 1, 2\], should have each of 0 to 3 once"):
        demands_of(replace(plan, document=document))


def test_a_slurm_script_says_that_its_folder_is_needed(tmp_path, capsys):
    words = ["--slurm", "--dry-run", "--log-dir", "my logs"]
    assert main(["launch", cpu_pipeline(tmp_path / "plan.json"), str(SCRIPT), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"# mkdir -p '{tmp_path}/my logs'" in lines
    assert f"#SBATCH --output='{tmp_path}/my logs/slurm-%j.out'" in lines


# ---- Training -----------------------------------------------------------------------------------------------------------


@needs_oneflow
def test_an_exported_pipeline_is_launched(lent_ranks, tmp_path, capsys):
    """Its losses are those of `autoddl train` of the plan, on the same text with the same seed."""
    plan, text = cpu_pipeline(tmp_path / "plan.json", 1, 2, StageMesh(1, 1)), tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    assert main(["export", plan, "--to", "oneflow", "-o", "model.py"]) == 0
    options = ["--steps", "2", "--seed", "3", "--learning-rate", "0.002"]
    command = launch_command(plan, "--log-dir", "logs", "--", *options, "--text", str(text), script=Path("model.py"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = [float(line.partition("loss ")[2]) for line in shown(done.stdout)[0]]
    capsys.readouterr()
    assert main(["train", plan, "--text", str(text), *options, "--json", "--quiet"]) == 0
    assert found == pytest.approx(json.loads(capsys.readouterr().out)["losses"], abs=2e-6)


@needs_oneflow
def test_a_pipeline_is_trained_over_ssh(hosts, tmp_path, losses_alone):
    """Each worker has a rank on both hosts. What it learns is what a plan of one rank learns. Four ranks may take over 10 s."""
    plan = cpu_pipeline(tmp_path / "plan.json", 2, 2, StageMesh(2, 1))
    words = [*hosts.launch_options("host1", "host2"), "--", "train_plan", str(NUM_STEPS)]
    command = hosts.command("login", *launch_command(plan, *words))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(done.stdout) == pytest.approx(losses_alone(NUM_STEPS), rel=1e-5)
    assert len(set(losses_alone(NUM_STEPS))) == NUM_STEPS
    hosts.wait_until_idle()
