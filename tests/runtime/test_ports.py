"""Which sockets a job on this machine opens: none of ours listens; OneFlow's are out of reach in a network of the job's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.pipelines.runtime.ranks.network import namespace_available
from autoddl.pipelines.runtime.ranks.processes import reserve_port

from ..processes import START

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="sockets are read in /proc")]

NAMESPACES = namespace_available()
SCRIPT = "import sys, time; print('waiting', flush=True); time.sleep(600)"
LISTENING = "0A"


def listening(pid: int) -> Iterator[str]:
    """The local addresses, as /proc has them, that a process listens on."""
    held = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(file))
        except FileNotFoundError:  # just closed
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *others = line.split()
            if state == LISTENING and f"socket:[{others[5]}]" in held:
                yield address


def descendants(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


def _make_plan(num_ranks: int) -> None:
    where = ["--cluster", "local-cpu", "--devices-per-node", str(num_ranks)]
    assert main(["plan", "mlp:64,64", *where, "--quiet", "-o", "plan.json"]) == 0


def test_a_reserved_port_is_on_loopback():
    with reserve_port() as holder:
        assert holder.getsockname()[0] == "127.0.0.1"


def test_ranks_themselves_listen_nowhere():
    with RankPool(2, with_oneflow=False) as pool:
        for pid in [os.getpid(), *pool.pids]:
            assert list(listening(pid)) == []


def test_no_process_of_a_local_launch_listens(tmp_path, monkeypatch):
    """Launcher, supervisor and ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    _make_plan(2)
    launch = ["launch", "plan.json", "script.py", "--local", "--without-oneflow"]
    with subprocess.Popen([sys.executable, "-c", START, *launch], stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout is not None
            for _ in range(2):
                assert b"waiting" in job.stdout.readline()
            pids = list(descendants(job.pid))
            assert len(pids) >= 4  # the launcher, the supervisor, two ranks
            assert [address for pid in pids for address in listening(pid)] == []
        finally:
            job.terminate()
            job.wait(60)
    assert job.returncode == 143


@pytest.mark.skipif(not NAMESPACES, reason=NAMESPACES.reason)
def test_oneflows_ports_are_in_the_jobs_own_network(ranks: Callable[[int], RankPool]):
    """As docs/security.md has it: each rank's control server listens on all addresses, which in the ranks' network are its own."""
    ours = os.readlink("/proc/self/ns/net")
    for pid in ranks(2).pids:
        (address,) = listening(pid)
        assert set(address.partition(":")[0]) == {"0"}
        assert os.readlink(f"/proc/{pid}/ns/net") != ours


@pytest.mark.skipif(not NAMESPACES, reason=NAMESPACES.reason)
@pytest.mark.skipif(not (shutil.which("unshare") and shutil.which("ip")), reason="there is no unshare or no ip")
def test_the_command_of_the_page_gives_a_job_its_own_network(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    (line,) = [line[2:] for line in page.splitlines() if line.startswith("$ unshare ")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("import os; print(os.readlink('/proc/self/ns/net'))")
    _make_plan(1)
    command = line.replace("PLAN.json SCRIPT.py", "plan.json script.py --without-oneflow")
    command = command.replace("autoddl launch", f"{sys.executable} -m autoddl launch")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[rank 0] net:[") and os.readlink("/proc/self/ns/net") not in done.stdout
