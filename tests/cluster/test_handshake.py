"""Two ranks on two hosts that exchange data: whether both directions of their wires are in use at once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from autoddl.__main__ import main

from ..processes import PATIENCE_S
from .emulated import ClusterSize, cluster_available, emulated
from .links import parse_link

AVAILABLE = cluster_available()
pytestmark = [
    pytest.mark.ranks("launches"),
    pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason),
]
JOB = Path(__file__).with_name("exchange_job.py")
COMMAND = str(Path(sys.executable).with_name("autoddl"))
#: A latency far beyond what a rank waits for a core, since ranks have to begin within one.  A message of OneFlow has four, but the
#: plan's has two: exchanges of a second are then long enough for a handshake.
LATENCY_S = 0.1
WIRE, LINKS = "20Mbit,100ms", ["--latency", "200ms", "--bandwidth", "2.5MB/s"]
NUM_BYTES, NUM_EXCHANGES = 1 << 21, 12


def overlap(begin: float, end: float, readings: np.ndarray) -> float:
    """How much of the time in which one host sends the other one sends, too, from 0 to 1.

    Args:
        begin, end: of the exchange [s].
        readings: (time, bytes that host1 and host2 have sent); shape (readings, 3).
    """
    within = readings[(begin <= readings[:, 0]) & (readings[:, 0] <= end)]
    spans = []
    for sent in within[:, 1:].T - within[0, 1:, None]:
        assert sent[-1] >= NUM_BYTES
        busy = within[(0.1 * sent[-1] <= sent) & (sent <= 0.9 * sent[-1]), 0]
        spans.append((busy[0], busy[-1]))
    (first, first_end), (second, second_end) = spans
    both = min(first_end, second_end) - max(first, second)
    return max(0.0, both) / min(first_end - first, second_end - second)


def test_the_overlap_of_two_senders():
    """Each sends its bytes in 10 s of 20: at once, one after the other, and half of the time."""
    ramp = np.clip(np.arange(101) / 50, 0, 1) * NUM_BYTES
    times = np.linspace(0, 20, 101)
    for shift, expected in ((0, 1.0), (50, 0.0), (20, 0.5)):
        readings = np.stack([times, ramp, np.clip((np.arange(101) - shift) / 50, 0, 1) * NUM_BYTES], axis=1)
        assert overlap(0, 20, readings) == pytest.approx(expected, abs=0.03)


def test_after_a_handshake_both_directions_are_in_use_at_once(tmp_path):
    """Rank 1 begins three latencies after rank 0. Without a handshake, chance decides: about every second exchange overlaps.

    Twelve exchanges of a second each, and the start of hosts and ranks.
    """
    options = ["--nodes", "2", "--devices-per-node", "1", "--batch", "8", *LINKS]
    plan = str(tmp_path / "plan.json")
    assert main(["plan", "mlp:64,64,64", "--cluster", "local-cpu", *options, "-o", plan, "--quiet"]) == 0
    size = ClusterSize(2, 1, parse_link(WIRE))
    (tmp_path / "hosts").mkdir()
    with emulated(tmp_path / "hosts", size) as cluster:
        (tmp_path / "delays.json").write_text(json.dumps([[delay_s] * NUM_EXCHANGES for delay_s in (0, 3 * LATENCY_S)]))
        command = [COMMAND, "launch", "plan.json", str(JOB), "--ssh", cluster.ssh, "--hosts", ",".join(size.hosts)]
        job = subprocess.Popen(
            cluster.command("login", *command, "--", str(tmp_path), str(NUM_BYTES), "with", folder=tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        readings = []
        try:
            deadline = time.monotonic() + PATIENCE_S
            while job.poll() is None and time.monotonic() < deadline:
                sent = cluster.wires.traffic()
                readings.append((time.monotonic(), *(sent[host].wire_bytes for host in size.hosts)))
                time.sleep(0.005)
        finally:
            job.kill()
            printed = job.communicate()[0]
        assert job.returncode == 0, printed
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    overlaps = [
        overlap(max(one[0], other[0]), max(one[1], other[1]), np.array(readings))
        for one, other in zip(first["with"], second["with"])
    ]
    assert sum(each > 0.5 for each in overlaps) >= 0.75 * NUM_EXCHANGES, overlaps
