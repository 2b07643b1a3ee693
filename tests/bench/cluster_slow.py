"""Experiment "slow": a wire of a tenth of the bandwidth, and a host with a fraction of a core.

Each cluster is calibrated. The plan for the cluster as it was, and the plan for the cluster as it is, then run there in one job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster_common import ClusterSize, Link, calibrated, show, started
from cluster_job import Way
from cluster_ways import CASES, measured, plan_of

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.units import format_seconds

__all__ = ["SLOWED", "slow"]

#: What can be slow.
SLOWED = ("wire", "host")
#: CPU quota of the slow host, which its ranks share.
SLOW_CORES = 0.5
HEADINGS = (
    "cluster",
    "plan",
    "wire found",
    "rate found",
    "layers changed",
    "predicted",
    "measured",
    "measured / predicted",
    "to its own plan",
)


def slow(
    size: ClusterSize, only: str, slowed: Sequence[str], budget_s: float, sizes: str, rounds: int, steps: int
) -> None:
    """Compare plans of the first model whose name holds a text: as the cluster was, and with what is ``slowed``."""
    last = size.hosts[-1]
    slow_wire = Link(size.wire.bandwidth / 10, size.wire.latency_s)
    changed = {
        "wire": (replace(size, other_wires={last: slow_wire}), f"{last} at a tenth"),
        "host": (replace(size, cores={last: SLOW_CORES}), f"{last} with {SLOW_CORES} cores"),
    }
    case = next(each for each in CASES if only in each.name)
    rows, before = [], None
    for cluster_name, now in (("as it was", size), *((f"a slow {what}", changed[what][0]) for what in slowed)):
        with started(now) as (cluster, folder):
            path = calibrated(cluster, folder, budget_s, sizes)
            here = load_cluster(path)
            plan = plan_of(case, path)
            before = before or plan
            both = [Way("plan for it", "autoddl", plan.workload, plan.strategies)]
            if before is not plan:
                both.append(Way("plan for the cluster as it was", "autoddl", before.workload, before.strategies))
            results = measured(cluster, case, plan, both, folder, rounds, steps)
            own = results[both[0].name].median_s
            for way in both:
                price = assess(case.built_in.graph(), here, way.workload, way.strategies).step_s
                seconds = results[way.name].median_s
                rate = here.device.peak("float32") * here.device.efficiency
                rows.append(
                    (
                        cluster_name,
                        way.name,
                        f"{here.levels[0].link.bandwidth / 1e6:.1f} MB/s",
                        f"{rate / 1e9:.1f} GFLOP/s",
                        str(sum(way.strategies[name] != other for name, other in before.strategies.items())),
                        format_seconds(price),
                        format_seconds(seconds),
                        f"{seconds / price:.2f}",
                        f"{seconds / own:.2f}x",
                    )
                )
    how = ", ".join(f"slow {what}: {changed[what][1]}" for what in slowed)
    show(f"{case.name}, batch {case.batch}: {size.described()}; {how}", HEADINGS, rows, 2)
