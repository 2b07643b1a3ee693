"""Search methods on the paper's perceptron: cost relative to the optimum against time relative to exhaustive search.

AutoDDL's figure: an MLP 32768-16384-4096-2048-512 on 128 and on 4,096 devices, ten runs of every random method, 90 % interval.
Every method gets its budget as a fraction of the space; all ratios are measured in this one run, on one core.

    python tests/bench/bench_search.py [--picture search.svg] [--runs 10]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.table import CostTable
from autoddl.costmodel.workload import Workload
from autoddl.search import solve
from autoddl.zoo import resolve_model

MODEL = "mlp:32768,16384,4096,2048,512"
HEURISTICS = ("coordinate-descent", "metropolis-hastings", "random")
#: Budgets of the random methods, as fractions of the space.
BUDGETS = (1e-5, 1e-4, 1e-3)


@dataclass(frozen=True)
class Point:
    """One method at one budget: cost over the optimum and time over exhaustive search's, one entry per run."""

    method: str
    budget: int
    cost: np.ndarray
    time: np.ndarray


def paper_table(devices: int) -> CostTable:
    """Communication costs of the paper's perceptron on single-GPU nodes, eight rows per device."""
    cluster = load_cluster("piz-daint").resized(devices)
    batch = 8 * devices
    return PriceBook(resolve_model(MODEL), cluster, Workload(batch, batch)).problem(batch, batch, "communication").table


def measure(devices: int, runs: int) -> tuple[CostTable, float, float, list[Point]]:
    """(table, seconds of exhaustive search, its optimum, points of the others)."""
    table = paper_table(devices)
    start = time.perf_counter()
    optimum = solve(table, method="exhaustive")
    exhaustive_s = time.perf_counter() - start
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        exact = solve(table, method="exact")
        seconds.append(time.perf_counter() - start)
    assert exact.cost <= optimum.cost * (1 + 1e-12) and optimum.cost <= exact.cost * (1 + 1e-12)
    points = [
        Point("exact", exact.evaluations, np.array([exact.cost / optimum.cost]), np.array(seconds) / exhaustive_s)
    ]
    for method in HEURISTICS:
        for fraction in BUDGETS:
            budget = int(fraction * table.space_size)
            if budget < 50:
                continue
            costs, times = [], []
            for seed in range(runs):
                start = time.perf_counter()
                result = solve(table, method=method, seed=seed, evaluations=budget)
                times.append((time.perf_counter() - start) / exhaustive_s)
                assert result.evaluations <= budget
                costs.append(result.cost / optimum.cost)
            points.append(Point(method, budget, np.array(costs), np.array(times)))
    return table, exhaustive_s, optimum.cost, points


def interval(values: np.ndarray, form: str) -> str:
    """Median and 90 % interval."""
    low, middle, high = np.percentile(values, (5, 50, 95))
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def report(devices: int, runs: int) -> list[Point]:
    table, exhaustive_s, optimum, points = measure(devices, runs)
    rate = table.space_size / exhaustive_s
    print(
        f"\n{MODEL} on {devices} devices: {table.space_size:,} assignments, optimum {optimum * 1e3:.4g} ms of communication"
    )
    print(f"exhaustive: {exhaustive_s:.3g} s, {rate / 1e6:,.0f} million assignments/s on one core")
    print(f"{'method':20}  {'evaluations':>11}  {'cost / optimum [90 %]':28}  time / exhaustive [90 %]")
    for point in points:
        cost, relative = interval(point.cost, ".4f"), interval(point.time, ".2e")
        print(f"{point.method:20}  {point.budget:11,}  {cost:28}  {relative}")
    exact = points[0]
    print(f"exact is {1 / np.median(exact.time):,.0f} times faster than exhaustive search")
    return points


def draw(path: Path, results: dict[int, list[Point]]) -> None:
    """The paper's figure: relative cost against relative time, medians with 90 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 4), squeeze=False)
    for axis, (devices, points) in zip(axes[0], results.items()):
        for method in dict.fromkeys(point.method for point in points):
            mine = [point for point in points if point.method == method]
            x = [np.median(point.time) for point in mine]
            y = [np.median(point.cost) for point in mine]
            spread = [
                [m - np.percentile(p.cost, 5) for m, p in zip(y, mine)],
                [np.percentile(p.cost, 95) - m for m, p in zip(y, mine)],
            ]
            axis.errorbar(x, y, yerr=np.maximum(spread, 0), marker="o", capsize=3, label=method)
        axis.plot([1], [1], "k*", markersize=10, label="exhaustive")
        axis.set(xscale="log", title=f"{devices:,} devices", xlabel="time / exhaustive search")
        axis.set_ylabel("communication time / optimum")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--picture", default="build/search.svg", help="where the figure goes (%(default)s; needs matplotlib)"
    )
    parser.add_argument("--runs", type=int, default=10)
    arguments = parser.parse_args()
    results = {devices: report(devices, arguments.runs) for devices in (128, 4096)}
    try:
        draw(Path(arguments.picture), results)
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main()
