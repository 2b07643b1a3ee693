"""What the executor ``graph`` costs: the best plan on meshes of at most two axes against the best plan of all strategies.

python tests/bench/bench_graph_space.py

The executor leaves out meshes of more than two axes, and Summa meshes.  The last column compares with a search that leaves out
only Summa meshes.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.search.planner import InfeasibleError, Options, Planned, make_plan
from autoddl.zoo import resolve_model


class Case(NamedTuple):
    """A search: model, cluster, number of nodes, batch, and the memory limit [GiB]; None for 9/10 of the device's memory."""

    model: str
    cluster: str
    nodes: int
    batch: int
    limit: float | None = None


CASES = (
    Case("gpt2", "dgx-a100", 2, 128),
    Case("gpt2-xl", "dgx-a100", 4, 256),
    Case("gpt2-xl", "dgx-a100", 4, 256, 3),
    Case("bert-large", "gcp-a100", 4, 512),
    Case("bert-large", "piz-daint", 64, 256),
    Case("llama3-8b", "dgx-h100", 8, 256),
    Case("llama3-8b", "dgx-h100", 8, 256, 8),
    Case("llama3-70b", "dgx-a100", 32, 512),
    Case("gpt3-13b", "dgx-a100", 16, 512),
    Case("gpt3-13b", "gcp-a100", 8, 512, 12),
    Case("gpt3-175b", "dgx-a100", 128, 1536),
    Case("gpt3-175b", "dgx-a100", 128, 1536, 40),
    Case("vgg16", "v100-a", 4, 256),
    Case("vgg13", "piz-daint", 128, 1024),
    Case("mlp:32768,16384,4096,2048,512", "piz-daint", 128, 1024),
    Case("mlp:8192,8192,8192,8192", "gcp-a100", 4, 4096),
    Case("mlp:8192,8192,8192,8192", "v100-a", 4, 4096, 0.5),
)


def planned(case: Case, **options: Any) -> Planned:
    """The exact plan of a case, with these options."""
    limit = None if case.limit is None else case.limit * 2**30
    asked = Options(batch=case.batch, memory_limit_bytes=limit, **options)
    return make_plan(resolve_model(case.model), load_cluster(case.cluster).resized(case.nodes), asked)


def percent(cost: float, other: float) -> str:
    """By how much a cost exceeds another one."""
    return f"{max(0.0, cost / other - 1):.2%}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(
        f"{'step of the best plan':62} {'limit':>8} {'graph':>9} {'all':>9} {'costs':>8} {'no Summa':>9} {'costs':>8}"
    )
    for case in CASES:
        cluster = load_cluster(case.cluster).resized(case.nodes)
        name = f"{case.model} on {case.cluster} {cluster.num_nodes} x {cluster.devices_per_node}, batch {case.batch}"
        try:
            plan, without_summa = planned(case, executor="graph"), planned(case, summa=False)
        except InfeasibleError as error:
            limit = format_bytes(cluster.device.memory_bytes * 0.9 if case.limit is None else case.limit * 2**30)
            print(f"{name:62} {limit:>8} does not fit: {format_bytes(error.least_bytes)} would do")
            continue
        best = plan.all_strategies
        assert best is not None
        print(
            f"{name:62} {format_bytes(plan.memory_limit_bytes):>8} {format_seconds(plan.cost):>9} "
            f"{format_seconds(best.cost):>9} {percent(plan.cost, best.cost):>8} "
            f"{format_seconds(without_summa.cost):>9} {percent(plan.cost, without_summa.cost):>8}"
            + ("" if plan.optimal and best.optimal and without_summa.optimal else " (not proven)")
        )


if __name__ == "__main__":
    main()
