"""Experiment "exchanges": how long exchanges of two ranks take that begin apart, without and with handshakes.

Each rank of two hosts begins up to 20 ms after all have met, as in a step. The ideal is the time of the bytes on the wire, which
all ranks of a host share, in both directions at once.
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

from cluster_common import ClusterSize, launch_words, run, show, started

from autoddl.costmodel.units import format_bytes, format_seconds

__all__ = ["exchanges"]

JOB = Path(__file__).resolve().parents[1] / "cluster" / "exchange_job.py"
SIZES, NUM_EXCHANGES, APART_S = (1 << 16, 1 << 18, 1 << 20), 30, 0.02
#: Trips of a message of OneFlow.
TRIPS = 4
NAMES = ("without", "with")
HEADINGS = ("each sends", "ideal", "handshake", "mean", "fastest tenth", "slowest tenth", "mean / ideal")


def exchanges(size: ClusterSize) -> None:
    """Time exchanges of several sizes between two hosts."""
    if size.num_hosts != 2:
        raise SystemExit(f"exchanges are between 2 hosts, not {size.num_hosts}")
    num_ranks, ours = 2 * size.ranks_per_host, size.wire.bandwidth / size.ranks_per_host
    rows = []
    with started(size) as (cluster, folder):
        words = ["mlp:64,64,64", "--cluster", "local-cpu", "--nodes", "2", "--devices-per-node", str(num_ranks // 2)]
        links = ["--latency", f"{TRIPS * size.wire.latency_s * 1e6:g}us", "--bandwidth", f"{ours / 1e6:g}MB/s"]
        run(cluster, "plan", *words, "--batch", "8", *links, "--quiet", "-o", "plan.json", folder=folder)
        for num_bytes in SIZES:
            chosen = random.Random(0)
            delays = [[APART_S * chosen.random() for _ in range(NUM_EXCHANGES)] for _ in range(num_ranks)]
            (folder / "delays.json").write_text(json.dumps(delays))
            arguments = [*launch_words(cluster), "--", str(folder), str(num_bytes), *NAMES]
            run(cluster, "launch", "plan.json", str(JOB), *arguments, folder=folder)
            times = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
            for name in NAMES:
                rows.append(_row(name, num_bytes, num_bytes / ours, [each[name] for each in times]))
    title = f"Exchanges of two ranks that begin up to {format_seconds(APART_S)} apart: {size.described()}"
    show(title, HEADINGS, rows, 3)


def _row(name: str, num_bytes: int, ideal_s: float, times: list[list[tuple[float, float]]]) -> tuple[str, ...]:
    """A row from when the exchanges of each rank began and ended; the slowest pair counts, from its last rank on."""
    half = len(times) // 2
    seconds = [
        max(max(end, other_end) - max(begin, other_begin) for (begin, end), (other_begin, other_end) in zip(one, two))
        for one, two in zip(zip(*times[:half]), zip(*times[half:]))
    ]
    deciles, mean = statistics.quantiles(seconds, n=10), statistics.mean(seconds)
    shown = (mean, deciles[0], deciles[-1])
    return (
        format_bytes(num_bytes),
        format_seconds(ideal_s),
        name,
        *map(format_seconds, shown),
        f"{mean / ideal_s:.2f}",
    )
