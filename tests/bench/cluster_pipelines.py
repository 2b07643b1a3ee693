"""Experiment "pipelines": schedules on wires slow enough to matter, measured beside the simulation with calibrated transfers.

Stages sleep in place of computing, since the cores are fewer than the ranks; messages, sums of gradients and their order are real.
"""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Sequence
from pathlib import Path

from cluster_common import ClusterSize, EmulatedCluster, calibrated, launch_words, run, show, started

import autoddl
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.pipelines import Times, generate, simulate, simulate_one_stream
from autoddl.pipelines.runtime.pipeline.lowering import lower
from autoddl.pipelines.runtime.pipeline.report import combine
from autoddl.pipelines.schedule import Schedule

__all__ = ["pipelines", "slept"]

HEADINGS = ("schedule", "micro-batches", "with free links", "simulated", "measured", "measured / simulated")
JOB = Path(__file__).with_name("pipeline_job.py")
ROWS = 4
FAMILIES = (
    ("gpipe", {}),
    ("1f1b", {}),
    ("chimera", {}),
    ("zero-bubble", {}),
    ("wpipe", {"iterations": 3}),
)


def pipelines(
    size: ClusterSize, budget_s: float, forward_s: float, boundary_bytes: int, gradient_bytes: int, repeats: int
) -> list[tuple[str, float, float]]:
    """Run every family with as many micro-batches as stages, and twice as many; returns (name, simulated, measured) step [s].

    Simulated is with one communication stream per rank, as ranks have.
    """
    num_ranks = size.num_hosts * size.ranks_per_host
    found, rows = [], []
    with started(size) as (cluster, folder):
        path = calibrated(cluster, folder, budget_s, "4KiB:4MiB")
        link = load_cluster(path).levels[0].link
        options = {"nodes": size.num_hosts, "devices_per_node": size.ranks_per_host, "batch": 8, "quiet": True}
        autoddl.plan("mlp:64,64", cluster=str(path), **options).save(folder / "plan.json")
        for name, more in FAMILIES:
            for num_micro_batches in (num_ranks, 2 * num_ranks):
                schedule = generate(name, num_stages=num_ranks, num_micro_batches=num_micro_batches, **more)
                num_stages = schedule.num_stages
                own_s = forward_s * num_ranks / num_stages  # a rank may have several stages
                reduced = Step(Collective.ALL_REDUCE, Axis(schedule.num_pipelines, 1, 0), gradient_bytes)
                times = Times.of(
                    num_stages,
                    forward=own_s,
                    backward=2 * own_s,
                    transfer=boundary_bytes / link.bandwidth,
                    transfer_latency=link.latency_s,
                    all_reduce=link.time(reduced) if schedule.num_pipelines > 1 else 0.0,
                )
                boundary, gradients = boundary_bytes // 4 // ROWS, [gradient_bytes // 4] * num_stages
                simulated, measured = slept(cluster, folder, schedule, times, ROWS, boundary, gradients, repeats)
                found.append((f"{name}, {num_micro_batches} micro-batches", simulated, measured))
                free_s = simulate(schedule, times).makespan / schedule.num_updates
                seconds = f"{free_s:.2f} s", f"{simulated:.2f} s", f"{measured:.2f} s"
                rows.append((name, str(num_micro_batches), *seconds, f"{measured / simulated:.3f}"))
    durations = f"forward {forward_s:g} s, backward {2 * forward_s:g} s, {boundary_bytes / 1e6:.2f} MB a boundary"
    title = f"Schedules of sleeping stages on {num_ranks} ranks ({durations} on a rank), per step: {size.described()}"
    show(title, HEADINGS, rows)
    return found


def slept(
    cluster: EmulatedCluster,
    folder: Path,
    schedule: Schedule,
    times: Times,
    rows: int,
    row_elements: int,
    gradient_elements: Sequence[int],
    repeats: int,
) -> tuple[float, float]:
    """(Simulated, measured) duration of a step of a schedule whose stages sleep [s]; the folder has a ``plan.json``.

    A rank has one communication stream, so the simulation gives it one.

    Args:
        cluster: the hosts, with as many ranks as the schedule.
        folder: for the files of the job.
        schedule: the schedule.
        times: durations of its tasks.
        rows: rows of a micro-batch.
        row_elements: single-precision elements in a row of the tensor between two stages.
        gradient_elements: single-precision elements of each stage's gradients.
        repeats: runs, of which the median counts.
    """
    lowered = lower(schedule, rows, times=times)
    boundaries = [row_elements] * (schedule.num_stages - 1)
    specification = lowered, times, boundaries, list(gradient_elements), repeats
    (folder / "specification").write_bytes(pickle.dumps(specification))
    run(cluster, "launch", "plan.json", str(JOB), *launch_words(cluster), "--", "specification", folder=folder)
    reports = [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(sum(schedule.widths))]
    makespan = statistics.median(combine(schedule, each).timeline.makespan for each in zip(*reports))
    return simulate_one_stream(schedule, times).makespan / schedule.num_updates, makespan / schedule.num_updates
