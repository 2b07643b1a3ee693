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
from autoddl.pipelines.joint.evaluation import evaluate, stage_workload
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.result import Considered, FamilyFigures, JointOptions, JointPlan
from autoddl.planfile import joint_document, plan_document, save_plan
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
    planned = make_plan(
        graph or gpt(SMALL), load_cluster(cluster).resized(nodes, devices), Options(**{"batch": 16, **options})
    )
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
    """The document of a pipeline of two stages on two devices each, both directions where ``name`` is chimera."""
    graph, cluster = gpt(replace(SMALL, layers=4)), cluster or load_cluster("dgx-a100").resized(1, 4)
    chain, mesh = chain_of(graph), mesh or StageMesh(1, 2)
    workload = Workload(4 * num_micro_batches, 4, precision, "adam")
    schedule = PipelineSchedule(
        name, 2, num_micro_batches, tuple(options.items()), num_pipelines=2 if name == "chimera" else 1
    )
    stages = []
    for (first, stop), how in zip(((0, 2), (2, 4)), recompute):
        part = chain.stage(first, stop).graph
        book = PriceBook(part, mesh.devices(cluster), stage_workload(workload, how))
        problem = book.problem(workload.batch, workload.micro_batch)
        choice = solve(problem.table).choice
        assert choice is not None
        stages.append(StageChoice(stop - first, how, problem.strategies(choice)))
    evaluation = evaluate(chain, cluster, Configuration(mesh, schedule, workload, tuple(stages)))
    step_s = evaluation.step_s
    families = (
        FamilyFigures(
            "pure SBP", "mesh 1 x 4", None, 1.5 * step_s, step_s, 0.3 * step_s, 0.2 * step_s, 0.0, 1e9, step_s
        ),
        FamilyFigures(
            "DAPPLE", "2 stages", None, 1.2 * step_s, step_s, 0.1 * step_s, 0.0, 0.1 * step_s, 2e9, step_s, 1.3 * step_s
        ),
        FamilyFigures("WPipe", infeasible="asynchronous; offered with --allow-stale"),
    )
    considered = Considered("1f1b and chimera on all meshes", 10, 5, 1, 2, 2, 6)
    asked = Options(workload.batch, workload.micro_batch, precision=precision, memory_limit_bytes=70 * 2.0**30)
    found = JointPlan(
        graph, cluster, JointOptions(asked), 70 * 2.0**30, evaluation, 0.9 * step_s, False, considered, families, 0.1
    )
    return joint_document(found)


def cpu_pipeline(path: Path, nodes: int = 1, devices: int = 4, mesh: StageMesh | None = None) -> str:
    """The file of a pipeline of two stages for CPU ranks, of two micro-batches of 4."""
    cluster = load_cluster("local-cpu").resized(nodes, devices)
    return written(path, pipeline_plan(num_micro_batches=2, cluster=cluster, mesh=mesh, precision="float32"))
