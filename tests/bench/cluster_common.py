"""What the experiments of `bench_cluster` share: commands on the login host, calibration, tables."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import autoddl  # noqa: F401 - before tests/ is on the path, whose folder autoddl would hide the package
from autoddl.text.tables import Column, Table

sys.path.append(str(Path(__file__).resolve().parents[1]))

from cluster.emulated import ClusterSize, EmulatedCluster, cluster_available, emulated
from cluster.links import Link, parse_link

__all__ = [
    "ClusterSize",
    "EmulatedCluster",
    "Link",
    "agreement",
    "calibrated",
    "cluster_available",
    "launch_words",
    "parse_link",
    "run",
    "show",
    "started",
]

#: A difference that counts: of a measured time from the predicted one, of two measured times.
NOTABLE = 0.1
COMMAND = str(Path(sys.executable).with_name("autoddl"))


@contextlib.contextmanager
def started(size: ClusterSize) -> Iterator[tuple[EmulatedCluster, Path]]:
    """A cluster, and a folder for the files of its jobs."""
    with tempfile.TemporaryDirectory() as text, emulated(Path(text), size) as cluster:
        folder = Path(text, "job")
        folder.mkdir()
        yield cluster, folder


def run(cluster: EmulatedCluster, *words: str, folder: Path, timeout_s: float = 900.0) -> str:
    """Run an autoddl command on the login host."""
    done = subprocess.run(
        cluster.command("login", COMMAND, *words, folder=folder),
        env={**os.environ, **cluster.environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(f"autoddl {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def calibrated(cluster: EmulatedCluster, folder: Path, budget_s: float, sizes: str, *more: str) -> Path:
    """Calibrate the cluster as a real one, with further options; returns its file."""
    words = ["--hosts", cluster.slots, "--ssh", cluster.ssh, "--sizes", sizes, "--repetitions", "6", "--quiet"]
    run(cluster, "calibrate", *words, *more, "--budget", str(budget_s), "-o", "cluster.json", folder=folder)
    return folder / "cluster.json"


def launch_words(cluster: EmulatedCluster) -> list[str]:
    """Options of a launch on all hosts of a cluster."""
    return [
        "--ssh",
        cluster.ssh,
        "--hosts",
        ",".join(cluster.size.hosts),
        "--log-dir",
        "logs",
        "--stall-timeout",
        "300",
    ]


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> None:
    """Print a table; all columns but the first ``num_left`` are aligned to the right."""
    columns = tuple(Column(heading, right=number >= num_left) for number, heading in enumerate(headings))
    print(f"\n{title}")
    print("\n".join(Table(columns, tuple(map(tuple, rows))).lines()), flush=True)


def agreement(pairs: Sequence[tuple[float, float]]) -> str:
    """A line on how well (predicted, measured) times agree: one by one, and in the order of two of them."""
    near = sum(abs(seconds / predicted - 1) <= NOTABLE for predicted, seconds in pairs)
    right = total = 0
    for number, (predicted, seconds) in enumerate(pairs):
        for other_predicted, other_seconds in pairs[:number]:
            if max(seconds, other_seconds) > (1 + NOTABLE) * min(seconds, other_seconds):
                total += 1
                right += (predicted < other_predicted) == (seconds < other_seconds)
    differing = f"pairs whose measured times differ by more than {NOTABLE:.0%}"
    return f"within {NOTABLE:.0%} of the prediction: {near} of {len(pairs)}; order as predicted: {right} of {total} {differing}"
