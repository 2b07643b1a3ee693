"""Experiment "faults": a host's wire is cut for some seconds, and a rank is killed, in the middle of a training.

The launcher starts the job again from its latest checkpoint. Losses are compared with those of a run without a fault.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from cluster_common import COMMAND, ClusterSize, EmulatedCluster, calibrated, launch_words, show, started
from cluster_ways import CASES, plan_of

__all__ = ["faults"]

JOB = Path(__file__).with_name("fault_job.py")
NUM_STEPS, FAULT_AFTER = 12, 5


class Run:
    """A training, line by line.

    Attributes:
        steps: (time, number, loss) of each step that rank 0 finished.
        said: (time, line) of what the launcher said.
        pids: the process of each rank.
    """

    def __init__(self, cluster: EmulatedCluster, folder: Path, disturb: Callable[[Run], None] | None) -> None:
        self.steps: list[tuple[float, int, float]] = []
        self.said: list[tuple[float, str]] = []
        self.pids: dict[int, int] = {}
        self.disturbed_at = 0.0
        checkpoints = folder / f"checkpoints{time.monotonic_ns()}"
        options = ["--checkpoints", str(checkpoints), "--max-restarts", "8", "--host-timeout", "5"]
        words = ["launch", "plan.json", str(JOB), *launch_words(cluster), *options, "--", str(NUM_STEPS)]
        command = cluster.command("login", COMMAND, *words, folder=folder)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                now = time.monotonic()
                if found := re.search(r"rank (\d+) .*\] pid (\d+)", line):
                    self.pids[int(found[1])] = int(found[2])
                elif found := re.search(r"step (\d+): (\S+)", line):
                    self.steps.append((now, int(found[1]), float(found[2])))
                    if disturb is not None and int(found[1]) == FAULT_AFTER and not self.disturbed_at:
                        self.disturbed_at = now
                        disturb(self)
                elif line.startswith("autoddl: "):
                    self.said.append((now, line.strip()))
            self.exit_code = process.wait()


def faults(size: ClusterSize, only: str, budget_s: float, sizes: str, cut_s: float) -> None:
    """Train the first model whose name holds a text: without a fault, with a wire that is cut, and with a rank that is killed."""
    case = next(each for each in CASES if only in each.name)
    rows = []
    with started(size) as (cluster, folder):
        plan_of(case, calibrated(cluster, folder, budget_s, sizes)).save(folder / "plan.json")
        host = size.hosts[-1]

        def cut(run: Run) -> None:
            assert cluster.wires is not None
            cluster.wires.cut(host)
            restore = f"import time; time.sleep({cut_s})"
            waiting.append(subprocess.Popen(["python3", "-c", restore]))

        def kill(run: Run) -> None:
            os.kill(run.pids[size.num_hosts * size.ranks_per_host - 1], signal.SIGKILL)

        waiting: list[subprocess.Popen[bytes]] = []
        plain = Run(cluster, folder, None)
        losses = {number: loss for _, number, loss in plain.steps}
        for name, disturb in ((f"wire of {host} cut for {cut_s:g} s", cut), (f"rank on {host} killed", kill)):
            run = _with_restored_wire(cluster, host, waiting, lambda disturb=disturb: Run(cluster, folder, disturb))
            rows.append((name, *_figures(run, losses)))
    headings = ("fault", "noticed after", "steps again after", "starts", "steps lost", "losses", "exit code")
    title = f"Faults in the middle of {NUM_STEPS} steps of the {case.name}, batch {case.batch}: {size.described()}"
    show(title, headings, rows)


def _with_restored_wire(
    cluster: EmulatedCluster, host: str, waiting: list[subprocess.Popen[bytes]], start: Callable[[], Run]
) -> Run:
    """Run a training; its wire is restored when the process that waits for it has ended."""
    import threading

    done = threading.Event()

    def restore() -> None:
        while not done.is_set():
            if waiting and waiting[0].poll() is not None:
                waiting.pop()
                cluster.wires.restore(host)  # type: ignore[union-attr]
            time.sleep(0.05)

    thread = threading.Thread(target=restore)
    thread.start()
    try:
        return start()
    finally:
        done.set()
        thread.join()


def _figures(run: Run, losses: dict[int, float]) -> tuple[str, ...]:
    """What a row says of a run with a fault."""
    after = [(now, line) for now, line in run.said if now > run.disturbed_at]
    noticed = f"{after[0][0] - run.disturbed_at:.1f} s" if after else "not"
    numbers = [number for _, number, _ in run.steps]
    since = after[0][0] if after else run.disturbed_at
    later = [now for now, _, _ in run.steps if now > since]
    resumed = f"{later[0] - run.disturbed_at:.1f} s" if later else "-"
    lost = len(numbers) - len(set(numbers))
    same = all(abs(loss / losses[number] - 1) < 1e-5 for _, number, loss in run.steps) and set(numbers) == set(losses)
    return noticed, resumed, str(1 + len(after)), str(lost), "equal" if same else "DIFFERENT", str(run.exit_code)
