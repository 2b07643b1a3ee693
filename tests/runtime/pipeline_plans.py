"""Plans with pipelines of small models, at strategies that vary from stage to stage."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import PLAIN, Choices, Strategy, enumerate_strategies
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.configuration import Configuration, PipelineSchedule, StageChoice
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.meshes import Meshes
from autoddl.pipelines.joint.partition import ENTRY, chain_of
from autoddl.planfile import PlanFile
from autoddl.zoo.builtin import BuiltIn

from .random_strategies import tilings

__all__ = ["pipelined"]


def pipelined(
    model: BuiltIn | LayerGraph,
    schedule: PipelineSchedule,
    units: Sequence[int],
    mesh: Meshes,
    *,
    micro_batch: int = 4,
    shape: tuple[int, int] = (1, 4),
    recompute: Sequence[str] = (),
    seed: int = 1,
    choices: Choices = PLAIN,
    shares: bool = False,
    tiles: bool = False,
) -> PlanFile:
    """A plan of stages of so many units; a random strategy for every role of a block, another one in the next stage.

    With ``shares``, ranks may share samples, and do so in attention; with ``tiles`` images in tiles side by side.
    """
    graph = model if isinstance(model, LayerGraph) else model.graph()
    rng = random.Random(seed)
    cluster = load_cluster("dgx-a100").resized(*shape)
    cluster = replace(cluster, device=replace(cluster.device, peak_flops={"float32": 1e12}))
    workload = Workload(micro_batch * schedule.num_micro_batches, micro_batch, "float32", "sgd")
    chain, stages, first = chain_of(graph), [], 0
    for number, num_units in enumerate(units):
        devices = mesh.mesh_of(schedule.worker_of(number)).devices(cluster)
        sizes = tuple(level.size for level in devices.levels)
        chosen: dict[object, Strategy] = {}
        strategies = {}
        graph_of_stage = chain.stage(first, first + num_units).graph
        for layer in graph_of_stage.layers:
            if layer.name == ENTRY:
                options = [Strategy(tuple((s, 1, 1) for s in sizes)), Strategy(tuple((1, s, 1) for s in sizes))]
            else:
                place = graph_of_stage.place(layer.name, "none")
                options = [*enumerate_strategies(layer, sizes, choices=choices, place=place)]
            if shares:
                options = [strategy for strategy in options if strategy.fits(layer, micro_batch)]
                if tiles:
                    options = [tiling for strategy in options for tiling in tilings(layer, strategy, micro_batch)]
                options = [strategy for strategy in options if graph_of_stage.offers(layer.name, strategy)]
                options = [strategy for strategy in options if strategy.positions] or options
                options = [strategy for strategy in options if strategy.columns or not tiles] or options
            else:
                options = [s for s in options if micro_batch // 2 % s.p0 == 0 and not s.positions]
            if choices != PLAIN and layer.parameters:
                options = [strategy for strategy in options if strategy.zero or strategy.regathers] or options
            role = (layer.block, layer.role) if layer.block else layer.name
            strategies[layer.name] = chosen.setdefault(role, rng.choice(options))
        stages.append(StageChoice(num_units, recompute[number] if recompute else "none", strategies))
        first += num_units
    evaluation = evaluate(chain, cluster, Configuration(mesh, schedule, workload, tuple(stages)))
    found = {layer.layer.name: layer.strategy for layer in evaluation.layers}
    return PlanFile(graph, cluster, workload, found, {}, evaluation)
