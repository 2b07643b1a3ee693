"""Compare the duration of a training step by the runtime and by the exported file of the same plan, measured in one run.

Both run on the same local CPU ranks and take turns, step by step.  A step takes as long as on its slowest rank.  The table has the
shortest step, which other processes disturbed least, and the median.

    python tests/bench/bench_export.py [--repeats 20]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.export.oneflow import oneflow_text
from autoddl.pipelines.joint.configuration import Configuration, PipelineSchedule, StageChoice
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.planfile import PlanFile, unpipelined_plan
from autoddl.text.tables import Column, Table
from autoddl.zoo import Transformer
from autoddl.zoo.builtin import BuiltIn
from autoddl.zoo.layers import GraphBuilder, linear, loss, norm

JOBS = Path(__file__).with_name("export_jobs.py")
GPT = BuiltIn("gpt", Transformer("gpt", layers=2, width=128, heads=8, sequence=64, vocabulary=512))


@dataclass(frozen=True)
class Case:
    """One plan.

    Attributes:
        job: of `export_jobs`.
        origin: the built-in model, or the name of the function there that makes it.
    """

    name: str
    job: str
    origin: BuiltIn | str
    plan: PlanFile


def cases() -> Iterator[Case]:
    """A layer norm (of samples, and of features over two ranks), and a GPT without a pipeline and in one."""
    for name, split in (("layer norm (8, 256, 256)", (1, 1, 1)), ("layer norm, features on 2 ranks", (1, 2, 1))):
        builder = GraphBuilder("norms", "sequence")
        layers = [norm(f"norms.{i}", 256, 256) for i in range(4)]
        builder.chain(builder.add(layers[0]), [*layers[1:], linear("head", 256, 256, 8), loss("loss", 256, 8)])
        graph = builder.build()
        strategies = {layer.name: Strategy((split,)) for layer in graph.layers}
        yield Case(name, "run_users", "norms", plan_of(graph, strategies, 8))
    mixed = {"linear": (1, 2, 1), "norm": (2, 1, 1)}
    graph = GPT.graph()
    strategies = {layer.name: Strategy((mixed.get(layer.kind, (2, 1, 1)),)) for layer in graph.layers}
    for layer in graph.layers:  # tied weights lie alike
        if layer.name in ("wte", "lm_head"):
            strategies[layer.name] = Strategy(((2, 1, 1),))
    yield Case("GPT on 2 ranks", "run_built_in", GPT, plan_of(graph, strategies, 16, micro_batch=8))
    yield Case("GPT in a pipeline of 2 stages", "run_pipeline", GPT, pipelined())


def plan_of(graph, strategies: Mapping[str, Strategy], batch: int, micro_batch: int = 8) -> PlanFile:
    ranks = next(iter(strategies.values())).num_devices
    workload = Workload(batch, micro_batch, "float32", "sgd")
    return unpipelined_plan(graph, cluster(ranks), workload, strategies)


def cluster(ranks: int):
    return load_cluster("dgx-a100").resized(1, ranks)


def pipelined() -> PlanFile:
    """One rank a stage, four micro-batches of four."""
    graph, mesh = GPT.graph(), StageMesh(1, 1)
    schedule, workload = PipelineSchedule("1f1b", 2, 4, (("policy", "A"),)), Workload(16, 4, "float32", "sgd")
    chain, whole = chain_of(graph), Strategy(((1, 1, 1),))
    cuts = ((0, 1), (1, 2))
    stages = [
        StageChoice(stop - first, "none", {layer.name: whole for layer in chain.stage(first, stop).graph.layers})
        for first, stop in cuts
    ]
    evaluation = evaluate(chain, cluster(2), Configuration(mesh, schedule, workload, tuple(stages)))
    return PlanFile(graph, cluster(2), workload, {f.layer.name: f.strategy for f in evaluation.layers}, {}, evaluation)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="steps of each that are timed (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="plans whose name holds it")
    parser.add_argument(
        "--processor", action="store_true", help="time of the processor, not of the clock: where others use the machine"
    )
    arguments = parser.parse_args()
    clock = "process_time" if arguments.processor else "perf_counter"
    rows = [("plan", "ranks", "applied", "exported", "ratio", "medians", "ratio")]
    for case in (case for case in cases() if arguments.only in case.name):
        num_ranks = case.plan.cluster.num_devices
        with tempfile.TemporaryDirectory() as folder, RankPool(num_ranks) as pool:
            path = Path(folder) / "exported.py"
            users = f"{JOBS}:{case.origin}" if isinstance(case.origin, str) else ""
            path.write_text(oneflow_text(case.plan, users))
            job = case.origin, case.plan, str(path), arguments.repeats, clock
            found = pool.run(f"{JOBS}:{case.job}", *job, timeout_s=580)
        # A step takes as long as on the slowest rank.
        applied, exported = ([max(times) for times in zip(*(rank[which] for rank in found))] for which in (0, 1))
        middle = statistics.median(applied), statistics.median(exported)
        rows.append(
            (
                case.name,
                str(num_ranks),
                f"{1e3 * min(applied):.1f} ms",
                f"{1e3 * min(exported):.1f} ms",
                f"{min(exported) / min(applied):.2f}",
                f"{1e3 * middle[0]:.1f}, {1e3 * middle[1]:.1f} ms",
                f"{middle[1] / middle[0]:.2f}",
            )
        )
    print("A training step by the runtime and by the exported file of the same plan: the shortest of all repetitions")
    columns = tuple(Column(heading, right=i > 0) for i, heading in enumerate(rows[0]))
    print("\n".join(Table(columns, tuple(rows[1:])).lines()))


if __name__ == "__main__":
    main()
