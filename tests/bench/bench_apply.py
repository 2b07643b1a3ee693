"""The same plans by AutoDDL's layouts and by plain ``to_global``: what they send, and how long a step takes.

Local CPU ranks in a network of their own; bytes are counted on the wire, times are medians over repeated steps, the two taking
turns.  "to price" is what was sent over what the cost model predicts, less one.

    python tests/bench/bench_apply.py [--repeats 20]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.ranks.failures import RankError
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.search.baselines import baselines
from autoddl.search.planner import Options, make_plan
from autoddl.text.tables import Column, Table
from autoddl.zoo import Transformer
from autoddl.zoo.builtin import BuiltIn, MLPSizes

JOBS = Path(__file__).with_name("apply_jobs.py")
WIDE = BuiltIn("mlp", MLPSizes((512, 1024, 768, 512)))
GPT = BuiltIn("gpt", Transformer("gpt", layers=2, width=256, heads=8, sequence=64, vocabulary=1024))
ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """One plan."""

    name: str
    model: BuiltIn
    level_sizes: tuple[int, ...]
    strategies: Mapping[str, Strategy]
    samples: int

    def predicted_bytes(self) -> float:
        """By all ranks in a step."""
        workload = Workload(self.samples, self.samples, "float32")
        on = cluster(self.level_sizes)
        on = replace(on, device=replace(on.device, peak_flops={"float32": 1e12}))
        return prod(self.level_sizes) * assess(self.model.graph(), on, workload, self.strategies).sent_bytes


def cluster(level_sizes: tuple[int, ...]):
    return load_cluster("dgx-a100").resized(*((1, *level_sizes) if len(level_sizes) == 1 else level_sizes))


def of_layers(name: str, *splits: tuple[tuple[int, int, int], ...]) -> Case:
    strategies = {f"fc{i + 1}": Strategy(split) for i, split in enumerate(splits)}
    return Case(name, WIDE, tuple(prod(split) for split in splits[0]), strategies, 256)


def optimal(level_sizes: tuple[int, ...], graph: LayerGraph) -> Mapping[str, Strategy]:
    options = Options(batch=8, micro_batch=8, precision="float32", recompute=False, objective="communication")
    return make_plan(graph, cluster(level_sizes), options).strategies


def megatron(level_sizes: tuple[int, ...], graph: LayerGraph) -> Mapping[str, Strategy]:
    members = (b.strategies for b in baselines(graph, level_sizes) if b.name == "megatron")
    return next(strategies for strategies in members if {s.p0 for s in strategies.values()} == {2})


def cases() -> list[Case]:
    graph = GPT.graph()
    return [
        of_layers("MLP, (4,1,1) (1,2,2) (2,1,2)", ((4, 1, 1),), ((1, 2, 2),), ((2, 1, 2),)),
        of_layers("MLP, (2,2,1) (2,1,2) (2,2,1)", ((2, 2, 1),), ((2, 1, 2),), ((2, 2, 1),)),
        of_layers("MLP, (2,2,2) thrice", *(((2, 2, 2),),) * 3),
        Case("GPT, optimal", GPT, (4,), optimal((4,), graph), 8),
        Case("GPT, Megatron 2 x 2", GPT, (4,), megatron((4,), graph), 8),
        Case("GPT, optimal on 2 nodes of 2", GPT, (2, 2), optimal((2, 2), graph), 8),
        Case("GPT, optimal", GPT, (8,), optimal((8,), graph), 8),
    ]


def measured(pool: RankPool, case: Case, repeats: int) -> tuple[dict, dict]:
    """(ours, plain), each with the seconds of all rounds."""
    results: list[dict] = [{}, {}]
    for _ in range(ROUNDS):
        for which, job in enumerate(("run_ours", "run_plain")):
            arguments = (case.model, case.model.graph(), case.strategies, case.samples, repeats // ROUNDS)
            found = pool.run(f"{JOBS}:{job}", *arguments, timeout_s=300)
            # A step takes as long as on the slowest rank.
            seconds = [max(times) for times in zip(*(rank["seconds"] for rank in found))]
            results[which] = {**found[0], "seconds": results[which].get("seconds", []) + seconds}
    assert abs(results[0]["loss"] / results[1]["loss"] - 1) < 1e-4, (case.name, results[0]["loss"], results[1]["loss"])
    return results[0], results[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="steps that are timed (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="plans whose name holds it")
    arguments = parser.parse_args()
    rows = [("plan", "ranks", "price", "layouts", "to price", "to_global", "factor", "layouts", "to_global", "factor")]
    pools: dict[int, RankPool] = {}
    try:
        for case in (case for case in cases() if arguments.only in case.name):
            num_ranks = prod(case.level_sizes)
            if num_ranks not in pools or not pools[num_ranks].is_open:
                pools[num_ranks] = RankPool(num_ranks, private_network=True, stall_timeout_s=30)
            try:
                ours, plain = measured(pools[num_ranks], case, arguments.repeats)
            except RankError as error:
                print(f"{case.name} on {num_ranks} ranks: {error}")
                continue
            price = case.predicted_bytes()
            mine, theirs = (statistics.median(found["seconds"]) for found in (ours, plain))
            rows.append(
                (
                    case.name,
                    str(num_ranks),
                    format_bytes(price),
                    format_bytes(ours["bytes"]),
                    f"{ours['bytes'] / price - 1:+.1%}",
                    format_bytes(plain["bytes"]),
                    f"{plain['bytes'] / ours['bytes']:.2f}x",
                    format_seconds(mine),
                    format_seconds(theirs),
                    f"{theirs / mine:.2f}x",
                )
            )
    finally:
        for pool in pools.values():
            pool.close()
    print("Bytes that all ranks send in a training step, and its median time")
    columns = tuple(Column(heading, right=number > 0) for number, heading in enumerate(rows[0]))
    print("\n".join(Table(columns, tuple(rows[1:])).lines()))


if __name__ == "__main__":
    main()
