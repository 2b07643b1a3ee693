"""`autoddl launch` of plans with pipelines: ranks where the plan has their workers, training, and going on after a failure.

One script trains any plan, so what a pipeline learns is compared with what a plan of one rank learns.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.joint.meshes import StageMesh
from autoddl.launching.demands import demands_of
from autoddl.launching.hosts import Host, Placement, place, renumbered
from autoddl.models import gpt
from autoddl.pipelines.runtime.load import is_available
from autoddl.plan import load_plan, plan_document, save_plan
from autoddl.planner import Options, make_plan

from .sample_plans import SMALL, pipeline_plan, written
from .several_hosts import SshHosts, hosts_available
from .test_launch import START, shown

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")]
SCRIPT = Path(__file__).with_name("launched_script.py")
ONEFLOW = is_available()
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)
HOSTS = hosts_available("sshd", "ssh", "ssh-keygen")
NUM_STEPS = 3


@pytest.fixture(autouse=True)
def _here(outside_of_jobs: None) -> None:
    """All tests."""


def pipeline(path: Path, nodes: int = 1, devices: int = 4, mesh: StageMesh | None = None) -> str:
    """A plan of two stages for CPU ranks."""
    cluster = load_cluster("local-cpu").resized(nodes, devices)
    return written(path, pipeline_plan(cluster=cluster, mesh=mesh, precision="float32"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same model and data by a plan of one rank, without a pipeline."""
    if not ONEFLOW:
        pytest.skip(ONEFLOW.reason)
    folder = tmp_path_factory.mktemp("alone")
    graph, cluster = gpt(replace(SMALL, layers=4)), load_cluster("local-cpu").resized(1, 1)
    planned = make_plan(graph, cluster, Options(batch=16, micro_batch=4, precision="float32", quiet=True))
    save_plan(folder / "alone.json", plan_document(planned))
    return losses(run(folder / "alone.json", SCRIPT, "--", "train_plan", str(NUM_STEPS), cwd=folder).stdout)


def run(plan: str | Path, script: Path, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START, "launch", str(plan), str(script), "--log-dir", "logs", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def losses(out: str) -> list[float]:
    """Of all steps, from whatever rank knows them."""
    found = [line.split() for lines in shown(out).values() for line in lines if line.startswith("step")]
    return [float(loss) for _, _, loss in sorted(found, key=lambda words: int(words[1]))]


# ---- Where ranks are ----------------------------------------------------------------------------------------------------


def test_ranks_are_where_the_plan_has_their_workers(tmp_path, capsys):
    """Workers of one device on each of two nodes: ranks 0 1 of worker 0 are devices 0 2, those of worker 1 devices 1 3."""
    path = pipeline(tmp_path / "plan.json", 2, 2, StageMesh(2, 1))
    demands = demands_of(load_plan(path))
    assert demands.devices == (0, 2, 1, 3)
    assert [demands.rank_on(device) for device in range(4)] == [0, 2, 1, 3]
    hosts = [Host("a"), Host("b")]
    assert renumbered(place(hosts, 2, 2), demands.rank_on) == [Placement(hosts[0], (0, 2)), Placement(hosts[1], (1, 3))]
    assert main(["launch", path, str(SCRIPT), "--hosts", "a,b", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "host a: ranks 0 2\n" in out and "host b: ranks 1 3\n" in out


def test_memory_is_that_of_each_stage(tmp_path):
    plan = load_plan(pipeline(tmp_path / "plan.json"))
    demands = demands_of(plan)
    first, second = (worker["memory_bytes"] for worker in plan.document["pipeline"]["workers"])
    assert demands.devices == () and first != second
    assert demands.memory_bytes == (first, first, second, second)


def test_workers_have_to_share_out_the_devices(tmp_path):
    plan = load_plan(pipeline(tmp_path / "plan.json"))
    workers = [dict(worker) for worker in plan.document["pipeline"]["workers"]]
    workers[1]["ranks"] = [1, 2]
    document = {**plan.document, "pipeline": {**plan.document["pipeline"], "workers": workers}}
    with pytest.raises(UserError, match=r"has ranks \[0, 1, 1, 2\], should have each of 0 to 3 once"):
        demands_of(replace(plan, document=document))


def test_a_slurm_script_says_that_its_folder_is_needed(tmp_path, capsys):
    words = ["--slurm", "--dry-run", "--log-dir", "my logs"]
    assert main(["launch", pipeline(tmp_path / "plan.json"), str(SCRIPT), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"# mkdir -p '{tmp_path}/my logs'" in lines
    assert f"#SBATCH --output='{tmp_path}/my logs/slurm-%j.out'" in lines


# ---- Training -----------------------------------------------------------------------------------------------------------


@needs_oneflow
def test_a_pipeline_is_trained_and_goes_on_after_a_failure(tmp_path, expected):
    """It saves a checkpoint after each step, loses a rank before the third, and ends as if nothing had been."""
    options = ["--max-restarts", "1", "--checkpoints", "saved"]
    plan = pipeline(tmp_path / "plan.json", 1, 2, StageMesh(1, 1))
    done = run(plan, SCRIPT, *options, "--", "train_plan", str(NUM_STEPS), "2")
    assert losses(done.stdout) == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == NUM_STEPS
    assert "raised RuntimeError: lost" in done.stderr and done.stderr.count("starting again") == 1


@needs_oneflow
def test_an_exported_pipeline_is_launched(lent_ranks, tmp_path, capsys):
    """Its losses are those of `autoddl train` of the plan, on the same text with the same seed."""
    plan, text = pipeline(tmp_path / "plan.json", 1, 2, StageMesh(1, 1)), tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    assert main(["export", plan, "--to", "oneflow", "-o", "model.py"]) == 0
    options = ["--steps", "2", "--seed", "3", "--learning-rate", "0.002"]
    out = run(plan, Path("model.py"), "--", *options, "--text", str(text)).stdout
    found = [float(line.partition("loss ")[2]) for line in shown(out)[0]]
    capsys.readouterr()
    assert main(["train", plan, "--text", str(text), *options, "--json", "--quiet"]) == 0
    assert found == pytest.approx(json.loads(capsys.readouterr().out)["losses"], abs=2e-6)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Two hosts besides the one of the launcher."""
    if not HOSTS:
        pytest.skip(HOSTS.reason)
    with contextlib.closing(SshHosts(tmp_path_factory.mktemp("hosts"), ["login", "host1", "host2"])) as started:
        yield started


@needs_oneflow
def test_a_pipeline_is_trained_over_ssh(hosts, tmp_path, expected):
    """Each worker has a rank on both hosts."""
    plan = pipeline(tmp_path / "plan.json", 2, 2, StageMesh(2, 1))
    start = [sys.executable, "-c", START, "launch", plan, str(SCRIPT), "--ssh", hosts.ssh, "--hosts", "host1,host2"]
    command = hosts.command("login", *start, "--log-dir", "logs", "--", "train_plan", str(NUM_STEPS))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(done.stdout) == pytest.approx(expected, rel=1e-5)
    hosts.wait_until_idle()
