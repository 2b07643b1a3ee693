"""The plan, measured against what people would run, on an emulated cluster (tests/cluster).

For each model and cluster: the cluster is calibrated as a real one, each family is tuned on the calibrated cluster, and then all
ways run in one job, in interleaved rounds. All figures are ratios of medians within one job.

    python tests/bench/bench_cluster.py [--only mlp] [--clusters 4x1 2x2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import autoddl
from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import baselines
from autoddl.text.tables import Column, Table
from autoddl.zoo.builtin import BuiltIn, MLPSizes

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: tests/autoddl must not hide the package

from cluster.emulated import ClusterSize, EmulatedCluster, emulated
from cluster.links import parse_link
from cluster_job import Result, Specification, Way

JOB = Path(__file__).with_name("cluster_job.py")
COMMAND = str(Path(sys.executable).with_name("autoddl"))


@dataclass(frozen=True)
class Case:
    """A model with its batch."""

    name: str
    built_in: BuiltIn
    batch: int


CASES = (
    Case("perceptron, small batch", BuiltIn("mlp", MLPSizes((1024, 4096, 4096, 1024))), 64),
    Case("perceptron, large batch", BuiltIn("mlp", MLPSizes((512, 1024, 1024, 512))), 1024),
)


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


def calibrated(cluster: EmulatedCluster, folder: Path, budget_s: float, sizes: str) -> Path:
    """Calibrate the cluster as a real one; returns its file."""
    words = ["--hosts", cluster.slots, "--ssh", cluster.ssh, "--sizes", sizes, "--repetitions", "6", "--quiet"]
    run(cluster, "calibrate", *words, "--budget", str(budget_s), "-o", "cluster.json", folder=folder)
    return folder / "cluster.json"


# ---- Ways ----------------------------------------------------------------------------------------------------------------


def best_of_family(graph: LayerGraph, cluster: Cluster, name: str, batch: int) -> tuple[Assessment, Way] | None:
    """The best member of a family on a cluster, over its meshes and micro-batches; None if none divides the model."""
    best: tuple[float, Assessment, Way] = (inf, None, None)  # type: ignore[assignment]
    for member in baselines(graph, cluster.level_sizes):
        if member.name != name:
            continue
        for micro_batch in (size for size in (batch, batch // 2, batch // 4) if size):
            workload = Workload(batch, micro_batch, "float32", optimizer="sgd")
            try:
                found = assess(graph, cluster, workload, member.strategies)
            except UserError:
                continue
            if found.step_s < best[0]:
                best = found.step_s, found, Way(f"{name} ({member.mesh})", "autoddl", workload, member.strategies)
    return None if best[1] is None else best[1:]


def ways_of(case: Case, path: Path) -> tuple[autoddl.Plan, list[Way], dict[str, Assessment]]:
    """Our plan, all ways, and the price of each that has one."""
    graph, cluster = case.built_in.graph(), load_cluster(path)
    plan = autoddl.plan(graph, cluster=path, batch=case.batch, optimizer="sgd", precision="float32", quiet=True)
    ours = Way("AutoDDL", "autoddl", plan.workload, plan.strategies)
    ways, prices = [ours], {ours.name: assess(graph, cluster, plan.workload, plan.strategies)}
    ways.append(replace(ours, name="AutoDDL, nn.Graph", runtime="graph"))
    for family in ("data parallel", "megatron", "summa"):
        found = best_of_family(graph, cluster, family, case.batch)
        if found is not None:
            price, way = found
            ways += [way, replace(way, name=f"{family}, nn.Graph", runtime="graph")]
            prices[way.name] = price
    ways.append(Way("OneFlow auto-parallel", "auto-parallel", Workload(case.batch, case.batch, "float32")))
    return plan, ways, prices


def measured(
    cluster: EmulatedCluster, case: Case, plan: autoddl.Plan, ways: Sequence[Way], folder: Path, rounds: int, steps: int
) -> dict[str, Result]:
    """Run all ways in one job."""
    plan.save(folder / "plan.json")
    (folder / "specification").write_bytes(pickle.dumps(Specification(case.built_in, tuple(ways), rounds, steps)))
    words = [
        "--ssh",
        cluster.ssh,
        "--hosts",
        ",".join(cluster.size.hosts),
        "--log-dir",
        "logs",
        "--stall-timeout",
        "300",
    ]
    script = [str(JOB), *words, "--force", "--", "specification", "result"]
    run(cluster, "launch", "plan.json", *script, folder=folder)
    results: dict[str, Result] = pickle.loads((folder / "result").read_bytes())
    return results


def rows_of(
    ways: Sequence[Way], prices: Mapping[str, Assessment], results: Mapping[str, Result]
) -> list[tuple[str, ...]]:
    """A row for each way, with its times as multiples of our plan's."""
    own = results["AutoDDL"].median_s
    rows = []
    for way in ways:
        result, price = results[way.name], prices.get(way.name)
        if result.fault:
            rows.append((way.name, "-", "-", "-", "-", "-", result.fault[:60]))
            continue
        seconds = result.median_s
        rows.append(
            (
                way.name,
                format_bytes(price.sent_bytes) if price else "-",
                format_seconds(price.step_s) if price else "-",
                format_seconds(seconds),
                f"{seconds / price.step_s:.2f}" if price else "-",
                f"{seconds / own:.2f}x",
                f"loss {result.losses[-1]:.5f}",
            )
        )
    return rows


HEADINGS = ("way", "sent by a rank", "predicted", "measured", "measured / predicted", "to AutoDDL", "")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name holds it")
    parser.add_argument("--clusters", nargs="+", default=["4x1"], metavar="NxG", help="hosts x ranks")
    parser.add_argument("--wire", default="300Mbit,1ms", help="of each host (%(default)s)")
    parser.add_argument("--inside", default="2Gbit,0.2ms", help="between ranks of a host (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of each way in a round (%(default)s)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of calibration (%(default)s)")
    parser.add_argument("--sizes", default="4KiB:4MiB", help="message sizes of the calibration (%(default)s)")
    parser.add_argument("--calibration", help="a cluster file, in place of a calibration")
    parser.add_argument("--json", metavar="FILE", help="also write all figures here")
    arguments = parser.parse_args()
    figures = []
    for shape in arguments.clusters:
        hosts, ranks = map(int, shape.split("x"))
        size = ClusterSize(hosts, ranks, parse_link(arguments.wire), parse_link(arguments.inside))
        with tempfile.TemporaryDirectory() as text, emulated(Path(text), size) as cluster:
            folder = Path(text, "job")
            folder.mkdir()
            path = Path(
                arguments.calibration or calibrated(cluster, folder, arguments.budget, arguments.sizes)
            ).resolve()
            for case in (case for case in CASES if arguments.only in case.name):
                plan, ways, prices = ways_of(case, path)
                results = measured(cluster, case, plan, ways, folder, arguments.rounds, arguments.steps)
                rows = rows_of(ways, prices, results)
                print(f"\n{case.name} ({case.built_in}), batch {case.batch}: {size.described()}")
                columns = tuple(Column(heading, right=0 < number < 6) for number, heading in enumerate(HEADINGS))
                print("\n".join(Table(columns, tuple(rows)).lines()), flush=True)
                figures.append({"case": case.name, "cluster": size.described(), "rows": rows})
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
