"""Experiment "calibration": what `autoddl calibrate` finds on links of set latency and bandwidth.

The latency of a message is not that of the link: OneFlow's transport sends a notice, a request, the data and an acknowledgement,
one after the other, so a message takes four trips; and ranks need some time of their own, which is measured on links without
limits (the floor). Ranks of a host share its wire, so each has its part of the bandwidth.
"""

from __future__ import annotations

from cluster_common import ClusterSize, Link, calibrated, show, started

from autoddl.calib.clusterfile import Fit, fit_samples
from autoddl.calib.measurements import read_samples
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.units import format_seconds

__all__ = ["calibration"]

TRIPS = 4
#: Products say nothing of links.
OPTIONS = ("--communication-only", "--collectives", "all-gather,reduce-scatter,all-reduce,point-to-point")
HEADINGS = (
    "hosts x ranks",
    "level",
    "latency set",
    "floor",
    "found",
    "found / (4 set + floor)",
    "bandwidth set",
    "found",
    "found / set",
    "held-out error",
)
#: Clusters with links of different kinds: hosts, ranks, (bandwidth [bytes/s], latency [s]) of wires and inside hosts.
CLUSTERS = (
    ClusterSize(2, 1, Link(37.5e6, 5e-3)),
    ClusterSize(4, 1, Link(37.5e6, 5e-3)),
    ClusterSize(2, 2, Link(37.5e6, 5e-3), Link(125e6, 2e-3)),
)


def calibration(budget_s: float, sizes: str) -> None:
    """Calibrate each cluster, and the same without limits."""
    rows = []
    for size in CLUSTERS:
        free = ClusterSize(
            size.num_hosts, size.ranks_per_host, Link(latency_s=1e-9), size.loopback and Link(latency_s=1e-9)
        )
        with started(free) as (cluster, folder):
            floors = load_cluster(calibrated(cluster, folder, budget_s / 2, "4KiB,16KiB,64KiB", *OPTIONS)).levels
        with started(size) as (cluster, folder):
            path = calibrated(cluster, folder, budget_s, sizes, *OPTIONS)
            found, fit = load_cluster(path).levels, fit_samples(read_samples(path.with_suffix(".csv")))
        for level, floor in zip(found, floors):
            if level.size == 1:
                continue
            link = size.wire if level.name == "inter-node" else size.loopback
            bandwidth = link.bandwidth / (size.ranks_per_host if level.name == "inter-node" else 1)
            expected = TRIPS * link.latency_s + floor.link.latency_s
            rows.append(
                (
                    f"{size.num_hosts} x {size.ranks_per_host}",
                    level.name,
                    format_seconds(link.latency_s),
                    format_seconds(floor.link.latency_s),
                    format_seconds(level.link.latency_s),
                    f"{level.link.latency_s / expected:.2f}",
                    f"{bandwidth / 1e6:.1f} MB/s",
                    f"{level.link.bandwidth / 1e6:.1f} MB/s",
                    f"{level.link.bandwidth / bandwidth:.2f}",
                    f"{_held_out_error(fit, level.name):.1%}",
                )
            )
    title = "What calibrate finds: latency of a message, bandwidth of a rank, both of point-to-point transfers"
    show(title, HEADINGS, rows, 2)


def _held_out_error(fit: Fit, name: str) -> float:
    """Median error of collectives whose message size was left out of the fit."""
    import numpy as np

    (level,) = (one for one in fit.levels if one.level == name)
    return float(np.median([one.error for one in level.held_out]))
