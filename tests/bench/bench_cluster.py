"""The plan, measured against what people would run, on an emulated cluster (tests/cluster).

===========  =====================================================================================================================
experiment   what it shows
===========  =====================================================================================================================
calibration  what ``autoddl calibrate`` finds on links of set latency and bandwidth
exchanges    exchanges of two ranks that begin apart, without and with handshakes
ways         our plan, OneFlow's auto-parallel, Megatron, data parallel and Summa, for several models
plans        the plan of the joint search, the best plan of each family of pipelines, and plans without a pipeline
pipelines    schedules of sleeping stages on slow wires, beside the simulation with calibrated transfers
slow         a slow wire and a slow host: what calibration finds, how the plan changes, what it gains
faults       a wire that is cut and a rank that is killed: time to notice and to resume, steps lost
===========  =====================================================================================================================

Clusters are calibrated as real ones. All ways of a table run in one job, in interleaved rounds, and all verdicts are ratios within
one run.

    python tests/bench/bench_cluster.py ways --cluster 2x2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster_calibration import calibration
from cluster_common import ClusterSize, cluster_available, parse_link
from cluster_exchanges import exchanges
from cluster_faults import faults
from cluster_pipelines import pipelines
from cluster_plans import plans
from cluster_slow import SLOWED, slow
from cluster_ways import ways

EXPERIMENTS = ("calibration", "exchanges", "ways", "plans", "pipelines", "slow", "faults")


def main() -> None:
    """Run one experiment or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", choices=EXPERIMENTS, help="(all of them, one after the other)")
    parser.add_argument("--cluster", default="4x1", metavar="NxG", help="hosts x ranks (%(default)s)")
    parser.add_argument("--wire", default="100Mbit,1ms", help="of each host (%(default)s)")
    parser.add_argument("--inside", default="1Gbit,0.2ms", help="between ranks of a host (%(default)s)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a calibration (%(default)s)")
    parser.add_argument("--sizes", default="4KiB:4MiB", help="message sizes of a calibration (%(default)s)")
    parser.add_argument("--calibration", type=Path, help="ways, plans: a cluster file, in place of a calibration")
    parser.add_argument("--only", default="", metavar="TEXT", help="ways, slow, faults: models whose name holds it")
    parser.add_argument("--slowed", choices=SLOWED, help="slow: what is slow (first a wire, then a host)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="ways: draw the times to this file")
    parser.add_argument("--rounds", type=int, default=5, help="ways, plans, slow: interleaved rounds (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=2, help="ways, slow: least steps of a way in a round (%(default)s)"
    )
    parser.add_argument("--forward", type=float, default=0.2, help="pipelines: seconds of a forward pass (%(default)s)")
    parser.add_argument("--boundary", type=int, default=1 << 20, help="pipelines: bytes between stages (%(default)s)")
    parser.add_argument("--gradients", type=int, default=1 << 22, help="pipelines: bytes of gradients (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="plans, pipelines: runs of each schedule (%(default)s)")
    parser.add_argument("--cut", type=float, default=30.0, help="faults: seconds without a wire (%(default)s)")
    arguments = parser.parse_args()
    hosts, ranks = map(int, arguments.cluster.split("x"))
    size = ClusterSize(hosts, ranks, parse_link(arguments.wire), parse_link(arguments.inside))
    if not (available := cluster_available()):
        print(f"left out: {available.reason}")
        return
    for experiment in EXPERIMENTS if arguments.experiment is None else (arguments.experiment,):
        run_experiment(experiment, size, arguments)


def run_experiment(experiment: str, size: ClusterSize, arguments: argparse.Namespace) -> None:
    """Run an experiment and print its tables."""
    if experiment == "calibration":
        calibration(arguments.budget, arguments.sizes)
    elif experiment == "exchanges":
        exchanges(size)
    elif experiment == "ways":
        found = arguments.calibration, arguments.budget, arguments.sizes
        ways(size, arguments.only, *found, arguments.rounds, arguments.steps, arguments.svg)
    elif experiment == "plans":
        plans(size, arguments.calibration, arguments.budget, arguments.sizes, arguments.rounds, arguments.repeats)
    elif experiment == "pipelines":
        numbers = arguments.forward, arguments.boundary, arguments.gradients, arguments.repeats
        pipelines(size, arguments.budget, *numbers)
    elif experiment == "slow":
        slowed = SLOWED if arguments.slowed is None else (arguments.slowed,)
        slow(size, arguments.only, slowed, arguments.budget, arguments.sizes, arguments.rounds, arguments.steps)
    else:
        faults(size, arguments.only, arguments.budget, arguments.sizes, arguments.cut)


if __name__ == "__main__":
    main()
