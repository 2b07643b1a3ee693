from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.joint.result import unpipelined
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.planfile import PlanFile, plan_document, save_plan
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import gpt, resolve_model

from ..cluster.namespaces import hosts_available
from ..cluster.ssh import SshHosts
from .export_plans import MODELS, staged_plan
from .launches import BRISK, PATIENCE_S, Attempt, forget_jobs, launch_command, run_attempts, started
from .sample_plans import SMALL

JOBS = Path(__file__).with_name("plan_training.py")


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
    forget_jobs(monkeypatch)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Four hosts as they should be, one that does not accept the key, and "login"; skips where there can be none."""
    if not (available := hosts_available("sshd", "ssh", "ssh-keygen")):
        pytest.skip(available.reason)
    names = ["login", "host1", "host2", "host3", "host4", "refusing"]
    with contextlib.closing(SshHosts(tmp_path_factory.mktemp("hosts"), names, refusing=["refusing"])) as started:
        yield started


@pytest.fixture
def idle_hosts(hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder; afterwards nothing may run on any host."""
    monkeypatch.chdir(tmp_path)
    yield
    hosts.wait_until_idle(PATIENCE_S)


@pytest.fixture(scope="session")
def lost_hosts(
    hosts: SshHosts, mlp_plan: Callable[[int, int], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[Attempt]]:
    """A job over ssh that loses host2 twice: its supervisor is killed, and then suspended until the job has ended."""
    folder, faults = tmp_path_factory.mktemp("lost"), ["supervisor-SIGKILL", "supervisor-SIGSTOP"]
    options = ["--max-restarts", "2", "--host-timeout", "1", "--without-oneflow", "--checkpoints", str(folder)]
    command = launch_command(
        mlp_plan(2, 1), *hosts.launch_options("host1", "host2"), *options, "--", "misfortunes", *faults, start=BRISK
    )
    try:
        return run_attempts(hosts.command("login", *command, folder=folder), folder, num_ranks=2)
    finally:
        for pid in hosts.processes("host2"):  # the suspended supervisor may go on, and so ends
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        hosts.wait_until_idle(PATIENCE_S)


@pytest.fixture(scope="session")
def broken_network(
    hosts: SshHosts, mlp_plan: Callable[[int, int], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[str], float]:
    """A job that is started again while host2 cannot be reached any more: its exit code, its lines, the seconds until its end."""
    folder = tmp_path_factory.mktemp("broken")
    ssh = f"{hosts.ssh} -o ServerAliveInterval=1 -o ServerAliveCountMax=2 -o ConnectTimeout=2"
    options = ["--max-restarts", "1", "--host-timeout", "10", "--without-oneflow", "--ssh", ssh]
    command = launch_command(mlp_plan(2, 1), *hosts.launch_options("host1", "host2"), *options, "--", "escape")
    with started(hosts.command("login", *command, folder=folder)) as job:
        begun = time.monotonic()
        hosts.run("host2", "ip", "link", "set", "eth0", "down")
        try:
            code, _, err = job.end()
            seconds = time.monotonic() - begun
        finally:
            hosts.run("host2", "ip", "link", "set", "eth0", "up")
    hosts.wait_until_idle(PATIENCE_S)
    return code, err.splitlines(), seconds


@pytest.fixture(scope="session")
def losses_alone(
    ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[float]]:
    """``losses_alone(n)``: of so many steps of the model of `sample_plans.cpu_pipeline` by a plan of one rank, with no pipeline."""
    path = tmp_path_factory.mktemp("alone") / "plan.json"
    graph, cluster = gpt(replace(SMALL, layers=4)), load_cluster("local-cpu").resized(1, 1)
    planned = make_plan(graph, cluster, Options(batch=8, micro_batch=4, precision="float32", quiet=True))
    save_plan(path, plan_document(unpipelined(planned)))
    known: list[float] = []

    def losses(num_steps: int) -> list[float]:
        if len(known) < num_steps:
            known[:] = ranks(1).run(f"{JOBS}:losses_alone", str(path), num_steps, timeout_s=PATIENCE_S)[0]
        return known[:num_steps]

    return losses


@pytest.fixture(scope="session")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a plan of a model on 2 x 4 devices, made once."""
    folder = tmp_path_factory.mktemp("plans")

    def make(name: str) -> Path:
        path = folder / f"{name}.json"
        if not path.exists():
            text, sizes = MODELS[name]
            options = Options(batch=32, micro_batch=16, objective="communication", recompute=name == "bert", quiet=True)
            planned = make_plan(resolve_model(text, **sizes), load_cluster("dgx-a100").resized(2, 4), options)
            save_plan(path, plan_document(unpipelined(planned)))
        return path

    return make


@pytest.fixture(scope="session")
def pipeline_plan() -> PlanFile:
    """A plan of two stages."""
    return staged_plan([(0, 2, "none"), (2, 4, "stage")], 2)
