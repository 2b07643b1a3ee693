"""Models and plans for the tests of exports."""

from __future__ import annotations

from dataclasses import replace

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.configuration import Configuration, PipelineSchedule, StageChoice
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.planfile import PlanFile
from autoddl.search import solve
from autoddl.zoo import resolve_model

__all__ = ["MODELS", "renamed", "staged_plan"]

MODELS = {
    "gpt": ("gpt:2x64", {"heads": 8, "sequence": 16, "vocabulary": 256}),
    "bert": ("bert:2x64", {"heads": 4, "sequence": 16, "vocabulary": 256}),
    "llama": ("llama:2x64", {"heads": 4, "sequence": 16, "vocabulary": 256}),
    "mlp": ("mlp:64,128,32", {}),
    "vgg": ("vgg11", {}),
}


def staged_plan(
    cuts: list[tuple[int, int, str]],
    devices: int,
    model: str = "gpt:4x512",
    nodes: int = 1,
    num: int = 4,
    schedule: PipelineSchedule | None = None,
) -> PlanFile:
    """Make a plan with a pipeline, on nodes of 4 devices.

    Args:
        cuts: for each stage its first unit, the unit after its last one, and its recomputation.
        devices: number of devices of a stage.
        model: name of the model.
        nodes: number of nodes.
        num: number of micro-batches.
        schedule: 1F1B by default.
    """
    graph, cluster = resolve_model(model), load_cluster("dgx-a100").resized(nodes, 4)
    chain, mesh, workload = chain_of(graph), StageMesh(1, devices), Workload(4 * num, 4, "mixed", "adam")
    stages = []
    for first, stop, recompute in cuts:
        problem = PriceBook(chain.stage(first, stop).graph, mesh.devices(cluster), workload).problem(16, 4)
        choice = solve(problem.table, memory_limit=70 * 2**30).choice
        stages.append(StageChoice(stop - first, recompute, problem.strategies(choice)))
    schedule = schedule or PipelineSchedule("1f1b", len(cuts), num, (("policy", "A"),))
    evaluation = evaluate(chain, cluster, Configuration(mesh, schedule, workload, tuple(stages)))
    strategies = {layer.layer.name: layer.strategy for layer in evaluation.layers}
    figures = ("step_s", "compute_s", "communication_s", "sent_bytes", "memory_bytes")
    document = {name: getattr(evaluation, name) for name in figures}
    return PlanFile(graph, cluster, workload, strategies, document, evaluation)


def renamed(plan: PlanFile, name: str, notes: tuple[str, ...] = ()) -> PlanFile:
    """Return the plan with another name and other notes of its model."""
    return replace(plan, graph=replace(plan.graph, name=name, notes=notes))
