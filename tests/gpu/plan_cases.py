"""Models with a strategy for every layer, as a verification runs them. Needs no OneFlow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.workload import Workload
from autoddl.pipelines import generate
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.verification.fitting import FittedPlan
from autoddl.verification.scaling import ScaledModel
from autoddl.zoo.builtin import BuiltIn, MLPSizes, VGGSizes
from autoddl.zoo.transformers import Transformer

from ..runtime.pipeline.stage_plan_cases import cut_layers, random_plan
from ..runtime.random_strategies import random_strategies

__all__ = ["MESHES", "MODELS", "plan_like", "planned", "planned_pipeline"]

_GPT = Transformer("gpt", layers=2, width=32, heads=4, sequence=8, vocabulary=64)
#: Small models of all families, by the layers that they have in common with large ones.
MODELS = {
    "gpt": BuiltIn("gpt", _GPT),
    "bert": BuiltIn("bert", replace(_GPT, name="bert")),
    "llama": BuiltIn("llama", replace(_GPT, name="llama", kv_heads=2, intermediate=64, activation="silu", tied=False)),
    "mlp": BuiltIn("mlp", MLPSizes((32, 64, 64, 32))),
    "vgg": BuiltIn("vgg", VGGSizes(11, image=32, classes=16, hidden=32)),
}
#: Devices on one network level or two.
MESHES = {"2": (2,), "4": (4,), "2 x 2": (2, 2)}
_BATCH, _MICRO_BATCH = 16, 8


def planned(family: str, level_sizes: tuple[int, ...], precision: str, seed: int = 1) -> FittedPlan:
    """A model without a pipeline: random strategies on a mesh of devices."""
    built_in = MODELS[family]
    graph = built_in.graph()
    stage = StagePlan(random_strategies(graph, level_sizes, seed))
    schedule = generate("gpipe", num_stages=1, num_micro_batches=_BATCH // _MICRO_BATCH, width=stage.num_ranks)
    return _fitted(built_in, [stage], schedule, precision)


def planned_pipeline(name: str, num_ranks: int, precision: str) -> FittedPlan:
    """A GPT in two stages."""
    built_in = BuiltIn("gpt", replace(_GPT, tied=False))
    rng, width = random.Random(4), num_ranks // 2
    layers = cut_layers(built_in.graph(), ["h.1"])
    stages = [random_plan(part, width, _MICRO_BATCH // 2, rng) for part in layers]
    schedule = generate(name, num_stages=2, num_micro_batches=_BATCH // _MICRO_BATCH, width=width)
    return _fitted(built_in, stages, schedule, precision)


def _fitted(built_in: BuiltIn, stages: Sequence[StagePlan], schedule: Any, precision: str) -> FittedPlan:
    strategies = {name: strategy for stage in stages for name, strategy in stage.strategies.items()}
    workload = Workload(_BATCH, _MICRO_BATCH, precision)
    return FittedPlan(ScaledModel(built_in.graph(), strategies, workload, built_in), tuple(stages), schedule)


def plan_like(fitted: FittedPlan) -> Any:
    """What a comparison reads from a plan's file."""
    return SimpleNamespace(
        graph=fitted.scaled.graph, workload=fitted.scaled.workload, cluster=load_cluster("local-cpu")
    )
