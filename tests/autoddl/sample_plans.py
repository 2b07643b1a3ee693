"""Small plans to be explained, compared and reported: with a pipeline and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.configuration import Configuration, PipelineSchedule, StageChoice
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.result import Considered, JointOptions, PlanResult, Rival, unpipelined
from autoddl.pipelines.joint.stage_figures import workload_of_stage
from autoddl.planfile import plan_document, save_plan
from autoddl.search import solve
from autoddl.search.planner import Options, make_plan
from autoddl.trusting import trust_of
from autoddl.zoo import Transformer, gpt

__all__ = ["SMALL", "cpu_pipeline", "gpt_plan", "pipeline_plan", "written"]

SMALL = Transformer("small", layers=2, width=64, heads=4, sequence=32, vocabulary=256)


def written(path: Path, document: dict[str, Any]) -> str:
    """The document's file."""
    save_plan(path, document)
    return str(path)


def gpt_plan(
    graph: LayerGraph | None = None, cluster: str = "gcp-a100", nodes: int = 2, devices: int = 2, **options: Any
) -> dict[str, Any]:
    """The document of a plan without a pipeline."""
    asked = Options(**{"batch": 16, **options})
    planned = unpipelined(make_plan(graph or gpt(SMALL), load_cluster(cluster).resized(nodes, devices), asked))
    return plan_document(planned, trust_of(planned))


def pipeline_plan(
    name: str = "1f1b",
    num_micro_batches: int = 4,
    recompute: tuple[str, ...] = ("none", "stage"),
    cluster: Cluster | None = None,
    mesh: StageMesh | None = None,
    precision: str = "mixed",
    **options: Any,
) -> dict[str, Any]:
    """The document of a pipeline of two blocks per stage, both directions where ``name`` is chimera.

    Args:
        recompute: of each stage.
        mesh: of each; by default 4 devices are divided.
    """
    num_stages = len(recompute)
    graph, cluster = gpt(replace(SMALL, layers=2 * num_stages)), cluster or load_cluster("dgx-a100").resized(1, 4)
    chain, mesh = chain_of(graph), mesh or StageMesh(1, 4 // num_stages)
    workload = Workload(4 * num_micro_batches, 4, precision, "adam")
    schedule = PipelineSchedule(
        name, num_stages, num_micro_batches, tuple(options.items()), num_pipelines=2 if name == "chimera" else 1
    )
    stages = []
    for first, how in zip(range(0, chain.num_units, 2), recompute):
        part = chain.stage(first, first + 2).graph
        book = PriceBook(part, mesh.devices(cluster), workload_of_stage(workload, how))
        problem = book.problem(workload.batch, workload.micro_batch)
        choice = solve(problem.table).choice
        assert choice is not None
        stages.append(StageChoice(2, how, problem.strategies(choice)))
    evaluation = evaluate(chain, cluster, Configuration(mesh, schedule, workload, tuple(stages)))
    step_s = evaluation.step_s
    families = (
        Rival("pure SBP", "mesh 1 x 4", None, 1.5 * step_s, step_s, 0.5 * step_s, 0.2 * step_s, 0.0, 1e9, step_s),
        Rival(
            "DAPPLE", "2 stages", None, 1.2 * step_s, step_s, 0.1 * step_s, 0.0, 0.1 * step_s, 2e9, step_s, 1.3 * step_s
        ),
        Rival("WPipe", infeasible="asynchronous; offered with allow_stale=True"),
    )
    considered = Considered("1f1b and chimera on all meshes", 10, 5, 1, 2, 2, 6)
    asked = Options(workload.batch, workload.micro_batch, precision=precision, memory_limit_bytes=70 * 2.0**30)
    found = PlanResult(
        graph, cluster, JointOptions(asked), 70 * 2.0**30, evaluation, 0.9 * step_s, False, considered, families, 0.1
    )
    return plan_document(found)


def cpu_pipeline(path: Path, nodes: int = 1, devices: int = 4, mesh: StageMesh | None = None) -> str:
    """The file of a pipeline of two stages for CPU ranks, of two micro-batches of 4."""
    cluster = load_cluster("local-cpu").resized(nodes, devices)
    return written(path, pipeline_plan(num_micro_batches=2, cluster=cluster, mesh=mesh, precision="float32"))
