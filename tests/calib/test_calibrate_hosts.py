"""`autoddl calibrate` as one job on several hosts: over ssh, in Slurm's and in mpirun's steps; how it recognises the launcher."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.api.measuredjobs import JobPlace, member_of_job, place_on_hosts, place_on_member
from autoddl.calib.clusterfile import measured_on
from autoddl.calib.measurements import Sample, read_samples
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import is_available

from ..autoddl.launches import PATIENCE_S, START, forget_jobs
from ..cluster.namespaces import Hosts, hosts_available

AVAILABLE = is_available()
needs_oneflow = pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason)

#: In place of ssh: enters the namespaces of a host, whose process is named in a file beside this script.
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
pid=$(cat "$(dirname "$0")/$2.pid")
shift 2
exec nsenter -t "$pid" -n -u -m --wd=/ -- sh -c "$*"
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts, and "login" with the bridge between them."""
    if not (available := hosts_available()):
        pytest.skip(available.reason)
    folder = tmp_path_factory.mktemp("hosts")
    with contextlib.closing(Hosts(folder, ["login", "host1", "host2"])) as started:
        (folder / "ssh").write_text(SSH)
        (folder / "ssh").chmod(0o755)
        for name in started.names:
            (folder / f"{name}.pid").write_text(str(started.pid(name)))
        yield started


@pytest.fixture(autouse=True)
def _outside_of_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    forget_jobs(monkeypatch)


SMALL = ["--collectives", "all-reduce,point-to-point", "--repetitions", "1", "--communication-only", "--quiet"]
SIZES = ["--sizes", "4KiB,64KiB"]


def check_both_levels(path: Path, hosts_of_samples: set[str]) -> None:
    """The samples and the cluster of a job of two hosts of two ranks, which talk through the bridge."""
    samples = read_samples(path.with_suffix(".csv"))
    axes = {(s.level, s.ranks, s.stride) for s in samples}
    # Ranks 0 1 on one host, 2 3 on the other: neighbours are inside, ranks two apart between, all four on both levels.
    assert axes == {("intra-node", 2, 1), ("inter-node", 2, 2), ("both", 4, 1)}
    assert {(s.job_ranks, s.ranks_per_node, s.device, s.network) for s in samples} == {(4, 2, "CPU", "eth0")}
    assert {s.host for s in samples} == hosts_of_samples
    cluster = load_cluster(path)
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 2)
    assert cluster.document["description"].startswith("2 hosts x 2 CPU ranks over eth0; calibrated ")
    assert "loopback" not in cluster.document["description"]
    assert cluster.calibration is not None
    assert {covered.level for covered in cluster.calibration.covered} == {"inter-node", "intra-node"}


@pytest.mark.ranks("launches")
@needs_oneflow
def test_hosts_are_measured_as_one_job(hosts, tmp_path, capsys):
    """Two ranks on each of two hosts.  Four ranks, each with OneFlow, take their time on few cores."""
    output = tmp_path / "ours.json"
    words = ["calibrate", "--hosts", "host1:2,host2:2", "--ssh", str(hosts.folder / "ssh"), "-o", str(output), *SMALL]
    assert main([*words, *SIZES]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "Formulas tried, inter-node" in said.out and "Formulas tried, intra-node" in said.out
    assert "Both levels" in said.out and "at once" in said.out
    check_both_levels(output, {"host1"})


def environments(launcher: str) -> list[Mapping[str, str]]:
    """What a launcher sets for each of four ranks on two hosts."""
    found = []
    for rank in range(4):
        local, node = rank % 2, rank // 2
        known = {
            "Slurm": {
                "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 4, "SLURM_NTASKS": 4,
                "SLURM_LOCALID": local, "SLURM_NODEID": node, "SLURM_STEP_NODELIST": "host[1-2]",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            },
            "OpenMPI": {
                "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_RANK": local,
                "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "PMIX_NAMESPACE": "prterun-login-7@1", "MASTER_ADDR": "host1",
            },
            "MPICH": {
                "PMI_RANK": rank, "PMI_SIZE": 4, "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": 2, "MASTER_ADDR": "host1",
            },
            "the environment": {
                "RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "host1",
                "MASTER_PORT": 23456,
            },
        }  # fmt: skip
        found.append({name: str(value) for name, value in known[launcher].items()})
    return found


@pytest.mark.parametrize("launcher", ["Slurm", "OpenMPI", "MPICH", "the environment"])
def test_launchers_are_recognised(launcher):
    members = [member_of_job(environment) for environment in environments(launcher)]
    assert all(member is not None for member in members)
    assert [(m.launcher, m.rank, m.num_ranks, m.local_rank, m.num_local) for m in members if m] == [
        (launcher, rank, 4, rank % 2, 2) for rank in range(4)
    ]
    assert len({m.rendezvous for m in members if m}) == 1 and members[0] is not None
    assert members[0].rendezvous.address == "host1"
    places = [place_on_member(member) for member in members if member]
    assert [place.has_rank_0 for place in places] == [True, False, False, False]
    assert {(place.num_ranks, place.ranks_per_node) for place in places} == {(4, 2)}


def test_one_rank_or_an_allocation_is_no_job():
    """A shell in an allocation, a batch script, and a job of one rank measure on this machine."""
    assert member_of_job({}) is None
    assert member_of_job({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) is None
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    assert member_of_job(alone) is None


def test_ranks_that_are_dealt_out_are_refused():
    """OneFlow expects ranks host by host."""
    dealt = {**environments("OpenMPI")[1], "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    member = member_of_job(dealt)
    assert member is not None
    with pytest.raises(UserError, match=r"OpenMPI made rank 1 number 0, should be number 1 of node 0: start as many"):
        place_on_member(member)


@pytest.mark.ranks("launches")
@needs_oneflow
@pytest.mark.parametrize("launcher", ["Slurm", "OpenMPI"])
def test_a_launchers_job_on_two_hosts(hosts, tmp_path, launcher):
    """The command itself on every rank, with what the launcher sets.  Four ranks take their time on few cores."""
    output = tmp_path / "ours.json"
    command = [
        sys.executable,
        "-c",
        START,
        "calibrate",
        "-o",
        str(output),
        *SMALL,
        *SIZES,
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    ranks = [
        subprocess.Popen(
            hosts.command(f"host{rank // 2 + 1}", *command, folder=tmp_path),
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, environment in enumerate(environments(launcher))
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    assert "Formulas tried, inter-node" in said[0][0]
    assert [out for out, _ in said[1:]] == [""] * 3
    check_both_levels(output, {"host1"})


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["a:2", "b"], "hosts: b has no number of ranks, should be like b:2"),
        (["a:2", "b:3"], "hosts: b has 3 ranks, should have 2 like a"),
        (["a:1"], "hosts: a has 1 rank; a measuring job needs at least 2"),
        (["a:2", "a:2"], "host 'a' is given twice"),
    ],
)
def test_hosts_of_a_job(hosts, message):
    with pytest.raises(UserError, match=message):
        place_on_hosts(hosts)
    place = place_on_hosts(["a:2", "user@b:2", "c:2"])
    assert isinstance(place, JobPlace) and (place.num_ranks, place.ranks_per_node) == (6, 2)
    assert [(p.host.name, list(p.ranks)) for p in place.placements] == [
        ("a", [0, 1]),
        ("user@b", [2, 3]),
        ("c", [4, 5]),
    ]


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ((8, 2, "CPU", "eth0"), "4 hosts x 2 CPU ranks over eth0"),
        ((4, 4, "CPU", "loopback"), "1 host x 4 CPU ranks over loopback"),
        ((2, 1, "CPU", ""), "2 hosts x 1 CPU rank"),
        ((16, 8, "NVIDIA A100", "NCCL"), "2 nodes x 8 NVIDIA A100, NCCL"),
        ((4, 2, "", ""), "2 hosts x 2 ranks"),
        ((4, 4, "", ""), ""),
    ],
)
def test_what_was_measured_is_said(job, text):
    num_ranks, size, device, network = job
    sample = Sample("all-reduce", "intra-node", 2, 4096, 0, 1e-3, job_ranks=num_ranks, ranks_per_node=size)
    assert measured_on(Sample(**{**vars(sample), "device": device, "network": network})) == text
