"""`autoddl launch` of plans for GPUs: numbers of ranks, types of devices, Slurm, and hosts with an `nvidia-smi` of our own.

The hosts of the last part are network namespaces of this machine; a program in place of ssh enters them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.launching.context import launched
from autoddl.launching.demands import Demands, demands_of
from autoddl.launching.facts import HostFacts, gather_facts
from autoddl.launching.hosts import Host, Placement, place
from autoddl.launching.job import Job
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.gpus import Gpu
from autoddl.planfile import load_plan

from ..cluster.namespaces import Hosts, hosts_available
from .gpu_hosts import A100, install_nvidia_smi, ssh_stand_in
from .launches import PATIENCE_S, SCRIPT, launch_command, losses_by_hand, one_line, shown
from .sample_plans import cpu_pipeline, gpt_plan, pipeline_plan, written

GIB = 2**30
ONEFLOW = is_available()
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)
HOSTS = hosts_available()
needs_hosts = pytest.mark.skipif(not HOSTS, reason=HOSTS.reason)
pytestmark = [pytest.mark.ranks("launches"), pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")]


@pytest.fixture(autouse=True)
def _here(outside_of_jobs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests."""
    for name in ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu_plan(tmp_path: Path) -> Callable[..., str]:
    """``gpu_plan(nodes, devices, **options)``: the file of a small plan for A100s."""
    return lambda nodes, devices, **options: written(
        tmp_path / "plan.json", gpt_plan(None, "dgx-a100", nodes, devices, **options)
    )


# ---- Numbers of ranks -----------------------------------------------------------------------------------------------------


def spanning_plan(tmp_path: Path) -> str:
    """A pipeline for 2 nodes of 2 A100s, whose two workers each have a GPU of both nodes."""
    cluster = load_cluster("dgx-a100").resized(2, 2)
    return written(tmp_path / "spanning.json", pipeline_plan(cluster=cluster, mesh=StageMesh(2, 1)))


def make_job(demands: Demands, placements: tuple[Placement, ...], **options: Any) -> Job:
    return Job(Path("/p"), Path("/s"), (), demands, placements, Path("/"), Path("/l"), **options)


def test_workers_that_span_nodes_of_gpus(tmp_path, capsys):
    """OneFlow would look for ranks 0 and 1 on one node. So each rank is a node of its own, where the plan has it."""
    path = spanning_plan(tmp_path)
    demands = demands_of(load_plan(path))
    assert (demands.devices, demands.on_gpus) == ((0, 2, 1, 3), True)
    assert demands.stray_worker.startswith("worker 0 of the plan has the devices 0, 2 of the nodes 0, 1; ")
    placements = (Placement(Host("a"), (0, 2)), Placement(Host("b"), (1, 3)))
    job = make_job(demands, placements)
    assert job.has_own_nodes
    assert job.rank_variables(0) == {
        "AUTODDL_PLAN": "/p",
        "AUTODDL_RESTART": "0",
        "AUTODDL_DEVICE": "cuda",
        "AUTODDL_OWN_NODES": "1",
    }
    assert [job.local_rank(one, rank) for one in placements for rank in one.ranks] == [0, 1, 0, 1]
    assert main(["launch", path, str(SCRIPT), "--hosts", "a,b", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "host a: ranks 0, 2\n" in out and "host b: ranks 1, 3\n" in out and "AUTODDL_OWN_NODES=1\n" in out


def test_workers_that_span_nodes_without_oneflow(tmp_path, capsys):
    """There the script itself joins the ranks in OneFlow, which cannot be told about nodes."""
    path = spanning_plan(tmp_path)
    assert main(["launch", path, str(SCRIPT), "--hosts", "a,b", "--without-oneflow", "--dry-run"]) == 2
    assert one_line(
        capsys.readouterr().err,
        "autoddl: worker 0 of the plan has the devices 0, 2 of the nodes 0, 1; OneFlow would expect its ranks 0, 1 on the same "
        "node; launch can change that only for ranks that it joins in OneFlow: leave out --without-oneflow, or plan with workers "
        "that have all devices of each of their nodes",
    )


@pytest.mark.parametrize(
    ("workers", "devices"),
    [
        ([[0, 1], [2, 3]], ()),
        ([[2, 3], [0, 1]], (2, 3, 0, 1)),  # nodes in another order
        ([[1], [0], [3, 2]], (1, 0, 3, 2)),  # GPUs of a node in another order
    ],
)
def test_numbers_that_oneflow_expects_as_well(tmp_path, workers, devices):
    """Which node, and which GPU of a node, does not matter: LOCAL_RANK is the rank's position among those of its node."""
    plan = load_plan(spanning_plan(tmp_path))
    documents = [{"ranks": ranks, "memory_bytes": 1.0} for ranks in workers]
    demands = demands_of(dataclasses.replace(plan, document={**plan.document, "workers": documents}))
    assert (demands.devices, demands.stray_worker) == (devices, "")
    nodes = [[demands.rank_on(device) for device in range(2 * node, 2 * node + 2)] for node in range(2)]
    placements = tuple(Placement(Host(f"h{number}"), tuple(ranks)) for number, ranks in enumerate(nodes))
    job = make_job(demands, placements)
    assert not job.has_own_nodes
    for placement in placements:
        assert {rank // 2 for rank in placement.ranks} in ({0}, {1})
        assert all(job.local_rank(placement, rank) == rank % 2 for rank in placement.ranks)


def test_hosts_with_unequal_numbers_of_ranks():
    """OneFlow divides ranks by hosts, so these are nodes of their own, too: also CPU ranks."""
    placements = tuple(place([Host("a", 3), Host("b", 1)], 2, 2, force=True))
    for demands in (
        Demands(2, 2, "A100", True, (1.0,) * 4, (), "mixed", "cuda"),
        Demands(2, 2, "a core", False, (1.0,) * 4),
    ):
        job = make_job(demands, placements)
        assert job.has_own_nodes and "AUTODDL_OWN_NODES" in job.rank_variables(0)
        assert [job.local_rank(one, rank) for one in placements for rank in one.ranks] == [0, 1, 2, 0]
        assert not make_job(demands, placements, with_oneflow=False).has_own_nodes


@needs_oneflow
def test_ranks_that_are_nodes_compute_the_same(mlp_plan):
    """Two CPU ranks, each the only rank of a node for OneFlow: losses are those of numpy.

    It may take over 10 s: two processes load OneFlow.
    """
    command = launch_command(mlp_plan(1, 2), "--env=AUTODDL_OWN_NODES=1", "--log-dir", "logs", "--", "train")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    lines = shown(done.stdout)
    assert sorted(lines) == [0, 1]
    for (line,) in lines.values():
        assert [float(word) for word in line.split()[1:]] == pytest.approx(losses_by_hand(), rel=1e-5)


# ---- Types of devices -----------------------------------------------------------------------------------------------------


def test_a_plan_for_gpus_on_cpu_ranks(gpu_plan, capsys):
    """No GPU is looked for; the ranks are told the type of device; the wider types need twice the memory.

    It may take over 10 s on a busy machine: it launches two ranks.
    """
    path = gpu_plan(1, 2, precision="mixed")
    plan = load_plan(path)
    demands, on_cpus = demands_of(plan), demands_of(plan, "cpu")
    assert (demands.on_gpus, demands.device_type, demands.precision) == (True, "cuda", "mixed")
    assert (on_cpus.on_gpus, on_cpus.device_type, on_cpus.precision) == (False, "cpu", "mixed-cpu")
    assert on_cpus.memory_bytes == tuple(2 * size for size in demands.memory_bytes)
    done = subprocess.run(
        launch_command(path, "--device", "cpu", "--without-oneflow", "--log-dir", "logs", "--", "say"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(shown(done.stdout)) == [0, 1]
    assert main(["launch", path, str(SCRIPT), "--device", "cpu", "--dry-run"]) == 0
    assert "with AUTODDL_DEVICE=cpu\n" in capsys.readouterr().out
    for words, asks_for_gpus in (([], True), (["--device", "cpu"], False)):
        assert main(["launch", path, str(SCRIPT), *words, "--slurm", "--dry-run"]) == 0
        text = capsys.readouterr().out
        assert ("#SBATCH --gpus-per-node=2" in text.splitlines()) == asks_for_gpus
        assert ("--device=cpu" in text) != asks_for_gpus


def test_types_of_devices_that_a_plan_does_not_have(gpu_plan, mlp_plan, capsys):
    for path, device, message in (
        (gpu_plan(1, 2), "gpu", "device 'gpu' is not one of cuda, cpu"),
        (mlp_plan(1, 2), "cuda", "--device cuda is for plans for GPUs; this plan is for "),
    ):
        assert main(["launch", str(path), str(SCRIPT), "--device", device, "--dry-run"]) == 2
        assert one_line(capsys.readouterr().err, f"autoddl: {message}")
    assert main(["launch", str(mlp_plan(1, 2)), str(SCRIPT), "--device", "cpu", "--dry-run"]) == 0
    assert "AUTODDL_DEVICE" not in capsys.readouterr().out


def test_scripts_are_told_the_type_of_device():
    job = {"AUTODDL_PLAN": "p", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert launched(job).device == "cpu"
    assert launched({**job, "AUTODDL_DEVICE": "cuda"}).device == "cuda"


# ---- Slurm ----------------------------------------------------------------------------------------------------------------


def test_slurm_reserves_nothing_for_a_plan_that_cannot_run(tmp_path, capsys):
    path = written(tmp_path / "plan.json", gpt_plan(None, "dgx-h100", 1, 2))
    words = ["launch", path, str(SCRIPT), "--slurm", "--dry-run"]
    assert main(words) == 2
    assert one_line(capsys.readouterr().err, "autoddl: the plan's device ")
    assert main([*words, "--force"]) == 0  # another build of OneFlow may have the code
    captured = capsys.readouterr()
    assert captured.out.startswith("#!/bin/bash\n") and captured.err.endswith("; continuing anyway\n")


@pytest.mark.parametrize("option", ["--distribution=cyclic", "-m cyclic", "-mcyclic:block", "--distribution arbitrary"])
def test_orders_of_tasks_that_are_not_the_plans(mlp_plan, capsys, option):
    assert main(["launch", str(mlp_plan(2, 1)), str(SCRIPT), "--slurm", "--dry-run", f"--slurm-option={option}"]) == 2
    message = (
        f"autoddl: --slurm-option: {option!r} should be left out: a plan's ranks are numbered node by node (block)"
    )
    assert one_line(capsys.readouterr().err, message)


def test_orders_of_tasks_that_are_the_plans(mlp_plan, capsys):
    for option in ("--distribution=block:cyclic", "-m block", "--mail-user=me"):
        assert (
            main(["launch", str(mlp_plan(2, 1)), str(SCRIPT), "--slurm", "--dry-run", f"--slurm-option={option}"]) == 0
        )
        assert f"#SBATCH {option}" in capsys.readouterr().out


def test_steps_show_all_gpus_to_each_task(gpu_plan, capsys, monkeypatch):
    """Where the allocation binds tasks to GPUs, as with --gpus-per-task; older versions of Slurm do not know the option."""
    path = gpu_plan(1, 2)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for variable, is_said in ((None, False), ("SLURM_GPUS_PER_TASK", True)):
        if variable:
            monkeypatch.setenv(variable, "1")
        assert main(["launch", path, str(SCRIPT), "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert ("--gpu-bind=none" in out) == is_said and "--distribution=block:block" in out


# ---- Launches -------------------------------------------------------------------------------------------------------------


def test_facts_are_gathered(tmp_path, monkeypatch):
    programs = install_nvidia_smi(tmp_path / "bin", [A100, A100])
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    facts = gather_facts("/", [], on_gpus=True)
    assert facts.gpu_facts is not None
    first = Gpu(0, "GPU-a0", "NVIDIA A100-SXM4-80GB", "515.65.01", (8, 0), 80 * GIB, 81100 << 20)
    assert facts.gpu_facts.gpus == (first, dataclasses.replace(first, index=1, uuid="GPU-a1"))
    assert (facts.gpu_facts.visible_devices, facts.gpu_facts.ifname) == ("1", "eth")
    assert HostFacts.of_document(json.loads(json.dumps(facts.document()))) == facts
    assert HostFacts.of_document({**facts.document(), "gpu_facts": {"gpus": 2}}).gpu_facts is None  # of another version


def launch_here(path: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = launch_command(path, "--log-dir", "logs", *words)
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@needs_oneflow
def test_a_launch_is_refused_before_the_start(gpu_plan, tmp_path, monkeypatch):
    programs = install_nvidia_smi(tmp_path / "bin", [A100, A100.replace("515.65.01", "418.87.01")][::-1])
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    done = launch_here(gpu_plan(1, 2), "--", "wait")
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(
        done.stderr, "autoddl: host localhost has NVIDIA driver 418.87.01; OneFlow's CUDA 11.7 needs 450.80.02 or "
    )
    assert not Path("logs").exists()


@needs_oneflow
def test_gpus_that_only_nvidia_smi_sees(gpu_plan, tmp_path, monkeypatch):
    """All checks pass; the ranks start, and say that OneFlow finds no GPU, before they create a tensor (which would abort).

    It may take over 10 s: two processes load OneFlow.
    """
    programs = install_nvidia_smi(tmp_path / "bin", [A100, A100])
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # should this machine have GPUs
    done = launch_here(gpu_plan(1, 2), "--env=CUDA_VISIBLE_DEVICES=1,0", "--", "wait")
    assert done.returncode == 2, done.stderr
    assert re.match(r"autoddl: rank \d of 2 .*: OneFlow sees no GPUs on host ", done.stderr.splitlines()[-1]), (
        done.stderr
    )


@needs_oneflow
def test_tasks_that_slurm_binds_to_a_gpu(gpu_plan, tmp_path, monkeypatch):
    """Each task of the step sees one GPU and joins as one rank: the checks pass, and both ranks look for their GPU at index 0.

    OneFlow then finds none, after the ranks have joined as two nodes. It may take over 10 s: two processes load OneFlow.
    """
    programs = install_nvidia_smi(tmp_path / "bin", [A100, A100])
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as unused:
        port = unused.getsockname()[1]
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    step |= {
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(port),
    }
    path, tasks = gpu_plan(1, 2), []
    for task in ("0", "1"):
        own = {"SLURM_PROCID": task, "SLURM_LOCALID": task, "CUDA_VISIBLE_DEVICES": task}
        command = launch_command(path, "--log-dir", f"logs{task}", "--", "wait")
        environment = {**os.environ, **step, **own}
        tasks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    for number, task in enumerate(tasks):
        _, err = task.communicate(timeout=PATIENCE_S)
        assert task.returncode == 2, err
        expected = f"rank {number} of 2 .*: OneFlow sees no GPUs on host .* the one of index 0 \\(LOCAL_RANK\\)"
        assert re.match(f"autoddl: {expected}", err.splitlines()[-1]), err


# ---- Several hosts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """``login``, and two hosts with two A100s each, on a network of their own; ``host2`` has another interface without a wire."""
    if not HOSTS:
        pytest.skip(HOSTS.reason)
    names = ["login", "host1", "host2"]
    folder = tmp_path_factory.mktemp("machines")
    with contextlib.closing(Hosts(folder, names)) as started:
        for name in names[1:]:
            install_nvidia_smi(folder / name, [A100, A100])
            # The same address everywhere, as of a container's bridge: whoever asks it talks to himself.
            started.run(name, "ip", "link", "add", "name", "docker0", "type", "bridge")
            started.run(name, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
            started.run(name, "ip", "link", "set", "docker0", "up")
        ssh_stand_in(folder, [started.command(name)[:-1] for name in names], names)
        yield started


def launch_there(machines: Hosts, path: str, *words: str) -> subprocess.CompletedProcess[str]:
    options = ["--ssh", str(machines.folder / "ssh"), "--hosts", "host1,host2", "--log-dir", "logs"]
    command = machines.command("login", *launch_command(path, *options, *words))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    machines.wait_until_idle()
    return done


@needs_hosts
@needs_oneflow
def test_hosts_reach_each_other_on_nccls_interface(machines, gpu_plan):
    """All checks pass, those between hosts too; then the ranks find that there are no GPUs.

    It may take over 10 s: four processes load OneFlow.
    """
    done = launch_there(machines, gpu_plan(2, 2), "--", "wait")
    assert done.returncode == 2, done.stderr
    assert re.match(r"autoddl: rank \d of 4 on host\d .*: OneFlow sees no GPUs on host ", done.stderr.splitlines()[-1])


@needs_hosts
@needs_oneflow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "docker0",
            r"host host\d does not reach host host\d from docker0 \(172\.17\.0\.1\) at 172\.17\.0\.1: Connection refused; ",
        ),
        (
            "eth7",
            r"host host1: NCCL_SOCKET_IFNAME=eth7 names none of its network interfaces; it should name one of .*eth0",
        ),
    ],
)
def test_interfaces_on_which_hosts_do_not_reach_each_other(machines, gpu_plan, setting, message):
    done = launch_there(machines, gpu_plan(2, 2), f"--env=NCCL_SOCKET_IFNAME={setting}", "--", "wait")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(f"autoddl: {message}", done.stderr) and done.stderr.count("\n") == 1, done.stderr


@needs_hosts
@needs_oneflow
def test_cpu_ranks_on_hosts_with_unequal_numbers(machines, mlp_plan):
    """3 ranks on one host, 1 on the other: OneFlow takes them for four nodes. The losses are those of numpy.

    It may take over 10 s: four processes load OneFlow.
    """
    Path("hostfile").write_text("host1 slots=3\nhost2 slots=1\n")
    options = ["--ssh", str(machines.folder / "ssh"), "--hostfile", "hostfile", "--force", "--log-dir", "logs"]
    command = launch_command(mlp_plan(2, 2), *options, "--master-address", machines.addresses["host1"], "--", "train")
    done = subprocess.run(machines.command("login", *command), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    lines = shown(done.stdout)
    assert sorted(lines) == [0, 1, 2, 3]
    for (line,) in lines.values():
        assert [float(word) for word in line.split()[1:]] == pytest.approx(losses_by_hand(), rel=1e-5)
    machines.wait_until_idle()


@needs_hosts
@needs_oneflow
def test_workers_that_span_hosts_train_as_nodes_of_their_own(machines, tmp_path, losses_alone):
    """What GPU ranks of such a plan do, on CPU ranks: each rank is a node for OneFlow, where the plan has its worker's device.

    The losses are those of a plan of one rank. It may take over 10 s: four processes load OneFlow.
    """
    path = cpu_pipeline(tmp_path / "pipeline.json", 2, 2, StageMesh(2, 1))
    done = launch_there(machines, path, "--env=AUTODDL_OWN_NODES=1", "--", "train_plan", "2")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for said in shown(done.stdout).values() for line in said if line.startswith("step")]
    found = [float(loss) for _, _, loss in sorted(lines, key=lambda words: int(words[1]))]
    assert found == pytest.approx(losses_alone(2), rel=1e-5)
