"""`autoddl launch` in tests: how it is started, what its ranks said, and what it left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ..processes import PATIENCE_S, START, parent, wait_until_ended

__all__ = [
    "BRISK",
    "NASTY",
    "PATIENCE_S",
    "SCRIPT",
    "START",
    "Attempt",
    "Started",
    "forget_jobs",
    "launch_command",
    "losses_by_hand",
    "one_line",
    "processes_with",
    "run_attempts",
    "shown",
    "started",
    "wait_until_ended",
    "wait_until_gone",
]

SCRIPT = Path(__file__).with_name("launched_script.py")
#: A failure waits for others that it may come from. Where one rank alone can fail that is time lost.
BRISK = START.replace("sys.exit", "import autoddl.launching.session as s; s._SETTLE_SECONDS = 0.1; sys.exit")
NASTY = ["a b", "it's", '"', "$(touch x)", "`touch x`", "a\nb", "", "--hosts", "--", "*", "\\", "ü"]


def forget_jobs(patch: pytest.MonkeyPatch) -> None:
    """Be inside of nobody's job."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "OMPI_", "AUTODDL_")):
            patch.delenv(name)


def launch_command(plan: str | Path, *words: str, script: Path = SCRIPT, start: str = START) -> list[str]:
    """The command line of a launch."""
    return [sys.executable, "-c", start, "launch", str(plan), str(script), *words]


# ---- What is said -------------------------------------------------------------------------------------------------------


def shown(out: str) -> dict[int, list[str]]:
    """The lines of each rank."""
    lines: dict[int, list[str]] = {}
    for line in out.splitlines():
        match = re.fullmatch(r"\[rank (\d+)(?: @\S+)?\] ?(.*)", line)
        assert match, line
        lines.setdefault(int(match[1]), []).append(match[2])
    return lines


def one_line(err: str, beginning: str) -> bool:
    """Whether this is all that was said."""
    return err.startswith(beginning) and err.count("\n") == 1


def losses_by_hand() -> list[float]:
    """Three steps of gradient descent on mean (relu(x W1^T) W2^T - t)^2, as `launched_script.train` does them."""
    generator = np.random.default_rng(2)
    first = 0.1 * generator.standard_normal((128, 64)).astype(np.float32)
    second = 0.1 * generator.standard_normal((64, 128)).astype(np.float32)
    inputs, targets = (generator.standard_normal((32, 64)).astype(np.float32) for _ in range(2))
    losses = []
    for _ in range(3):
        before = inputs @ first.T
        hidden = np.maximum(before, 0)
        error = hidden @ second.T - targets
        losses.append(float(np.mean(error**2)))
        slope = 2 * error / error.size
        gradient = (slope @ second * (before > 0)).T @ inputs
        second = second - slope.T @ hidden
        first = first - gradient
    return losses


# ---- What is left -------------------------------------------------------------------------------------------------------


def processes_with(text: str) -> set[int]:
    """Processes that have this in their environment or command line."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found - {os.getpid()}


def wait_until_gone(text: str, patience_s: float = PATIENCE_S) -> None:
    """Of all processes that have this in their environment or command line."""
    deadline = time.monotonic() + patience_s
    while left := processes_with(text):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


# ---- Launches that wait -------------------------------------------------------------------------------------------------


class Started:
    """A launch in a process of its own; each rank has said "child PID" of all that it started, and then "waiting PID"."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.ranks: dict[int, int] = {}
        self.children: set[int] = set()

    def supervisor(self, rank: int) -> int:
        """Of the rank's host. Between the two is the rank's keeper."""
        return parent(parent(self.ranks[rank]))

    def end(self) -> tuple[int, str, str]:
        """Wait for it; its exit code, and what it said since then."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def read(self, num_ranks: int) -> None:
        """Until all ranks wait."""
        assert self.process.stdout is not None
        while len(self.ranks) < num_ranks:
            line = self.process.stdout.readline()
            assert line, self.end()
            if match := re.match(r"\[rank (\d)(?: @\S+)?\] (waiting|child) (\d+)$", line):
                if match[2] == "child":
                    self.children.add(int(match[3]))
                else:
                    self.ranks[int(match[1])] = int(match[3])


@contextlib.contextmanager
def started(command: Sequence[str], num_ranks: int = 2) -> Iterator[Started]:
    """A launch whose ranks wait. Afterwards it ends by itself, and the ranks and all that they started have ended."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        job = Started(process)
        try:
            job.read(num_ranks)
            yield job
            process.wait(PATIENCE_S)
            wait_until_ended({*job.ranks.values(), *job.children})
        finally:
            process.kill()
            for pid in job.children:  # of a test that failed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


# ---- Launches that start again ------------------------------------------------------------------------------------------


class Attempt(NamedTuple):
    """How an attempt ended: what was said of it, so long after the fault, and what had run."""

    said: str
    seconds: float
    supervisor: int
    pids: set[int]


def run_attempts(command: Sequence[str], folder: Path, num_ranks: int) -> tuple[int, list[Attempt]]:
    """Run a launch of `launched_script.misfortunes` with checkpoints in a folder; its exit code and its attempts.

    Whenever it starts again, and at the end, the ranks and all that they started in the attempt before have ended.
    """
    attempts: list[Attempt] = []

    def look_back(said: str) -> None:
        files = [folder / f"attempt{len(attempts)}-rank{rank}" for rank in range(num_ranks)]
        supervisors, *pids = zip(*(map(int, file.read_text().split()) for file in files))
        seconds = time.time() - max(file.stat().st_mtime for file in files)
        attempts.append(Attempt(said, seconds, supervisors[-1], {pid for of_kind in pids for pid in of_kind}))
        wait_until_ended(attempts[-1].pids)

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                look_back(line)
            code = process.wait(PATIENCE_S)
            if code == 0:
                look_back("")
        finally:
            process.kill()
    return code, attempts
