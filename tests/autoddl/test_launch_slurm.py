"""`autoddl launch` with Slurm: a real controller and two node daemons on namespaces of this machine, where Debian's packages are.

Everywhere, the batch script is run by bash with a stand-in for ``srun`` that starts the tasks here, with the variables that Slurm
gives them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.errors import UserError
from autoddl.launching.nodelist import expand_nodelist
from autoddl.pipelines.runtime.load import is_available

from ..cluster.namespaces import hosts_available
from ..cluster.slurm import SlurmHosts
from .launches import NASTY, SCRIPT, launch_command, losses_by_hand, shown

SLURM = hosts_available("slurmctld", "slurmd", "munged", "srun", "sbatch")
ONEFLOW = is_available()
needs_slurm = pytest.mark.skipif(not SLURM, reason=SLURM.reason)
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)
pytestmark = [pytest.mark.ranks("launches"), pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmHosts]:
    with contextlib.closing(SlurmHosts(tmp_path_factory.mktemp("slurm"), ["login", "node1", "node2"])) as started:
        yield started


@pytest.fixture(autouse=True)
def _here(outside_of_jobs: None) -> None:
    """All tests."""


def without_slurms_words(err: str) -> list[str]:
    return [line for line in err.splitlines() if not re.match(r"(srun|salloc|slurmstepd\S*): ", line)]


def wait_for_job(cluster: SlurmHosts, job: str, patience_s: float = 60.0) -> str:
    """The state in which a job ended."""
    deadline = time.monotonic() + patience_s
    while True:
        found = re.search(r"JobState=(\w+)", cluster.slurm("scontrol", "show", "job", job).stdout)
        assert found, job
        if found[1] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            return found[1]
        assert time.monotonic() < deadline, found[1]
        time.sleep(0.2)


# ---- A real cluster -----------------------------------------------------------------------------------------------------


@needs_slurm
@needs_oneflow
def test_a_submitted_job_trains_a_plan(cluster, mlp_plan):
    """Written, submitted, run: the batch script starts the step, whose tasks join; the losses are those of numpy."""
    words = ["--slurm", "--log-dir", "my logs", "--slurm-option=--time=5", "--", "train"]
    submitted = cluster.slurm(*launch_command(mlp_plan(2, 1), *words))
    assert submitted.returncode == 0, submitted.stderr
    number = submitted.stdout.split(":")[0].removeprefix("job ")
    assert wait_for_job(cluster, number, 120) == "COMPLETED"
    out = Path("my logs", f"slurm-{number}.out").read_text()
    lines = shown("\n".join(without_slurms_words(out)))
    assert sorted(lines) == [0, 1]
    for rank, said in lines.items():
        (line,) = [line for line in said if line.startswith("losses")]
        assert [float(word) for word in line.split()[1:]] == pytest.approx(losses_by_hand(), rel=1e-5)
        assert line in Path("my logs", f"rank{rank}.log").read_text()
    assert "[rank 0 @node1]" in out and "[rank 1 @node2]" in out


@needs_slurm
def test_an_allocation_starts_again_from_the_checkpoint(cluster, mlp_plan):
    words = ["--without-oneflow", "--max-restarts", "1", "--checkpoints", "saved", "--", "recover", "1"]
    done = cluster.slurm("salloc", "-N2", "-n2", *launch_command(mlp_plan(2, 1), *words))
    assert done.returncode == 0, done.stderr
    assert shown(done.stdout)[1][-2:] == ["attempt 1 begins at 3", "done"]
    failure, *others, again = without_slurms_words(done.stderr)
    assert failure.startswith("autoddl: rank 1 of 2 on node2 raised RuntimeError: lost at step 3 (its output: ")
    assert others == [] and re.fullmatch(r"autoddl: the step ended with code \d+; starting again \(1 of 1\)", again)
    cluster.wait_until_idle()


@needs_slurm
def test_tasks_get_arguments_as_they_are(cluster, mlp_plan, tmp_path):
    done = cluster.slurm(
        "salloc", "-N1", "-n2", *launch_command(mlp_plan(1, 2), "--without-oneflow", "--", "say", *NASTY)
    )
    assert done.returncode == 0, done.stderr
    lines = shown(done.stdout)
    assert sorted(lines) == [0, 1]
    for rank, (line,) in lines.items():
        said = json.loads(line)
        assert (said["words"], said["cwd"]) == (NASTY, str(tmp_path))
        assert (said["RANK"], said["LOCAL_RANK"]) == (str(rank), str(rank))
    assert not Path("x").exists()


@needs_slurm
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (["-N1", "-n1"], "the plan is for 4 ranks, Slurm started 1"),
        (
            ["-N2", "-n4", "--distribution=cyclic"],
            "the plan has rank 1 as number 1 of node 0, Slurm made it its number 0 of node 1",
        ),
    ],
)
def test_a_step_that_is_not_the_plans(cluster, mlp_plan, step, message):
    done = cluster.slurm("srun", *step, *launch_command(mlp_plan(2, 2), "--without-oneflow", "--", "say"))
    assert done.returncode != 0
    said = without_slurms_words(done.stderr)
    assert any(line.startswith(f"autoddl: {message}") for line in said), done.stderr
    assert len(said) <= 2


@needs_slurm
@pytest.mark.parametrize(("how", "num_nodes"), [("interrupt", 2), ("cancel", 1)])
def test_a_job_that_is_ended_leaves_nothing(cluster, mlp_plan, how, num_nodes):
    words = launch_command(mlp_plan(num_nodes, 1), "--without-oneflow", "--", "wait")
    start = ["salloc", f"-N{num_nodes}", f"-n{num_nodes}", *words]
    with subprocess.Popen(
        cluster.command("login", *start),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **cluster.environment},
    ) as process:
        assert process.stdout is not None
        for _ in range(num_nodes):
            assert "waiting" in process.stdout.readline()
        if how == "cancel":
            number = cluster.slurm("squeue", "--noheader", "--format=%i").stdout.split()[0]
            cluster.slurm("scancel", number)
        else:
            (launcher,) = (pid for pid in cluster.processes("login") if is_launcher(pid))
            os.kill(launcher, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    if how == "interrupt":
        assert without_slurms_words(err) == ["autoddl: interrupted by SIGINT; all ranks have been ended"]
    cluster.wait_until_idle(90)


def is_launcher(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[0] == sys.executable.encode() and b"launch" in words


@needs_slurm
def test_lists_of_hosts_are_read_as_slurm_reads_them(cluster):
    for text in LISTS:
        assert expand_nodelist(text) == cluster.slurm("scontrol", "show", "hostnames", text).stdout.split()


# ---- Without one ----------------------------------------------------------------------------------------------------------

LISTS = {
    "login": ["login"],
    "a,b-1,c.d": ["a", "b-1", "c.d"],
    "node[1-3]": ["node1", "node2", "node3"],
    "gpu[08-11,2],x[7]": ["gpu08", "gpu09", "gpu10", "gpu11", "gpu2", "x7"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
}


@pytest.mark.parametrize("text", LISTS)
def test_lists_of_hosts(text):
    assert expand_nodelist(text) == LISTS[text]


@pytest.mark.parametrize("text", ["", "a[1-", "a[x]", "a]", "a[1-2-3]"])
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(UserError, match="list of hosts"):
        expand_nodelist(text)


STAND_IN = '''
"""srun, as far as `autoddl launch` uses it: the tasks of a step, all here; when one fails the others are ended."""
import json, os, subprocess, sys, time
options = [word for word in sys.argv[1:] if word.startswith("--")][: sys.argv[1:].index(sys.executable)]
command = sys.argv[1 + len(options) :]
values = dict(option[2:].partition("=")[::2] for option in options)
nodes, tasks, per_node = (int(values[name]) for name in ("nodes", "ntasks", "ntasks-per-node"))
step = str(len(open("steps").read())) if os.path.exists("steps") else "0"
open("steps", "a").write("s")
json.dump(options, open("options.json", "w"))
common = {"SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NODELIST": "localhost",
          "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})"}
started = []
for rank in range(tasks):
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % per_node), "SLURM_NODEID": str(rank // per_node)}
    started.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
while any(task.poll() is None for task in started):
    if any(task.poll() for task in started):
        for task in started:
            task.terminate()
        break
    time.sleep(0.05)
sys.exit(max(abs(task.wait()) for task in started))
'''


def test_the_batch_script_with_a_stand_in(mlp_plan, capsys, tmp_path):
    words = ["--slurm", "--dry-run", "--without-oneflow", "--max-restarts", "1", "--checkpoints", "my checkpoints"]
    options = ["--slurm-option=--partition=gpu", "--slurm-option=--comment=it's mine"]
    for num_nodes in (2, 1):
        assert main(["launch", str(mlp_plan(num_nodes, 1)), str(SCRIPT), *words, *options, "--", "recover", "1"]) == 0
        text = capsys.readouterr().out
        asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        assert f"#SBATCH --nodes={num_nodes}" in asked and "#SBATCH --ntasks-per-node=1" in asked
        assert "#SBATCH --partition=gpu" in asked and not any("gpus" in line for line in asked)
    assert not Path("autoddl-logs").exists()
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(f"#!{sys.executable}\n{STAND_IN}")
    (programs / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    assert shown(done.stdout)[0][-2:] == ["attempt 1 begins at 3", "done"]
    assert Path("steps").read_text() == "ss"
    assert Path("my checkpoints", "rank0").read_text() == "10"
    assert "--kill-on-bad-exit=1" in json.loads(Path("options.json").read_text())


@pytest.mark.parametrize(
    ("option", "message"),
    [("partition=gpu", "should begin with a dash"), ("--comment=a\nb", "contains a line break")],
)
def test_options_that_no_batch_script_can_have(mlp_plan, capsys, option, message):
    words = ["--slurm", "--dry-run", f"--slurm-option={option}"]
    assert main(["launch", str(mlp_plan(1, 1)), str(SCRIPT), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_there_is_no_slurm(mlp_plan, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", str(mlp_plan(1, 1)), str(SCRIPT), "--slurm", "--log-dir", "logs"]) == 2
    assert "there is no sbatch here; the script is in" in capsys.readouterr().err
    assert Path("logs", "launch.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH ")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert main(["launch", str(mlp_plan(1, 1)), str(SCRIPT)]) == 2
    assert "there is no srun here" in capsys.readouterr().err
