"""Ranks that stop using OneFlow's network do not notice that others leave; ranks that use it die of that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.failures import FailureKind
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.pipelines.runtime.ranks.processes import is_listening, rank_environment, reserve_port

JOBS = Path(__file__).with_name("launcher_jobs.py")
ONEFLOW = is_available()
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)]


@pytest.mark.fault(
    "launch",
    "ranks are done, and one leaves seconds before the others",
    "none of these notices: all have stopped using OneFlow's network before any may leave",
)
@pytest.mark.parametrize("have_parted", [False, True])
def test_others_go(tmp_path, have_parted):
    """Without the first phase of leaving OneFlow aborts the process, which shows that this test can fail."""
    with RankPool(2, log_dir=tmp_path) as pool:
        assert [sums.tolist() for sums in pool.run(f"{JOBS}:do_while_others_communicate", -1, "")] == [[2.0] * 4] * 2
        pool.run(f"{JOBS}:let_connections_break")
        if have_parted:
            pool._part()
        os.kill(pool.pids[1], signal.SIGKILL)
        stays = pool._ranks.of(0)
        deadline = time.monotonic() + (1.0 if have_parted else 60.0)
        while stays.death() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        death = stays.death()
    said = (tmp_path / "rank0.log").read_text()
    if have_parted:
        # OneFlow's control service calls the others every 10 s or so: on a busy machine it may do so just now.
        assert (death, said) == (None, "") or "Machine 1 lost" in said
    else:
        assert death is not None and death.kind is FailureKind.CUT_OFF and "Check failed" in said


TOGETHER = """
import os, sys, time
from autoddl.pipelines.runtime.load import load_oneflow
load_oneflow()
from autoddl.pipelines.runtime.ranks.rank import run_script_together
script = sys.argv[1]
run_script_together(script, [])
here = os.path.dirname(script)
if os.environ["RANK"] == "0":  # the last one
    print(sorted(name for name in os.listdir(here) if name.startswith("gone")))
    time.sleep(0.5)  # while the other goes
else:
    time.sleep(0.5)
    open(os.path.join(here, "gone" + os.environ["RANK"]), "w").close()
os._exit(0)
"""
SCRIPT = f"""
import oneflow as flow
value = flow.ones(4)
flow.comm.all_reduce(value)
print(value.numpy()[0])
from autoddl.pipelines.runtime.ranks.rank import resolve_target
resolve_target("{JOBS}:let_connections_break")()
"""


def test_ranks_that_nobody_keeps_leave_together(tmp_path):
    """As those of a job that Slurm started: each goes as soon as it may, rank 0 last, and what its going does to it is seen."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with reserve_port() as holder, contextlib.ExitStack() as started:
        port = holder.getsockname()[1]
        processes = []
        for rank in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", TOGETHER, str(tmp_path / "script.py")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=rank_environment(rank, 2, port, 60.0, {}),
            )
            started.enter_context(process)
            started.callback(process.kill)
            processes.append(process)
            deadline = time.monotonic() + 60
            while rank == 0 and not is_listening(process.pid, port):  # the other would wait for 10 s
                assert time.monotonic() < deadline
                time.sleep(0.02)
        for process, said in zip(processes, ("2.0\n['gone1']\n", "2.0\n")):
            assert (*process.communicate(timeout=120), process.returncode) == (said, "", 0)
