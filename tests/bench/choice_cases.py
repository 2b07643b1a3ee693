"""Plans of small models that make one choice besides splits wherever they can, and plans that mix all of them.

Every layer that offers the choice has it, at a split that is drawn at random; all other layers have random splits and no choices.
In a mixture every layer draws from everything that it offers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.graph import Layer, Place
from autoddl.costmodel.strategy import Choices, Strategy, data_parallel, enumerate_strategies
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.configuration import Configuration, PipelineSchedule, StageChoice
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import ENTRY, chain_of
from autoddl.planfile import PlanFile
from autoddl.zoo.builtin import BuiltIn, ResNetSizes, VGGSizes
from autoddl.zoo.mixtures import Mixture
from autoddl.zoo.transformers import Transformer

sys.path.append(str(Path(__file__).parents[2]))

from tests.runtime.random_strategies import tilings

__all__ = ["CHOICES", "MESHES", "NUM_MICRO_BATCHES", "Choice", "Mesh", "plan_of"]

#: All that is offered besides splits.
EVERYTHING = Choices((0, 1, 2, 3), regathers=True)
NUM_MICRO_BATCHES = 2

GPT = BuiltIn("gpt", Transformer("gpt", 2, width=128, heads=8, sequence=64, vocabulary=256, tied=False))
LLAMA = BuiltIn(
    "llama",
    Transformer(
        "llama",
        2,
        width=128,
        heads=8,
        sequence=64,
        vocabulary=256,
        kv_heads=1,
        intermediate=256,
        activation="silu",
        tied=False,
    ),
)
MOE = BuiltIn(
    "moe",
    Mixture(
        "moe",
        2,
        width=128,
        heads=8,
        sequence=64,
        vocabulary=256,
        kv_heads=8,
        intermediate=128,
        activation="silu",
        tied=False,
        experts=8,
        per_token=2,
        expert_width=64,
        shared_width=64,
    ),
)
VGG = BuiltIn("vgg", VGGSizes(11, image=64, classes=16, hidden=64))
RESNET = BuiltIn("resnet", ResNetSizes(18, image=64, classes=16, width=16))
#: Batch norms of few pixels amplify rounding errors, also those of double precision.
LARGE_RESNET = BuiltIn("resnet", ResNetSizes(18, image=128, classes=16, width=8))
TOGETHER = BuiltIn("resnet", ResNetSizes(18, image=64, classes=16, width=16, synchronised=True))

Offers = Callable[[Layer, Strategy], bool]


@dataclass(frozen=True)
class Choice:
    """A choice besides splits.

    Attributes:
        name: what is chosen.
        model: a small model whose layers offer it.
        is_chosen: whether a strategy of a layer makes the choice.
        shares: whether samples are too few to divide over the ranks, which share them.
        num_levels: the least number of network levels.
        is_alone: whether a strategy that makes the choice makes no other one.
        precision: numeric precision of the plan.
    """

    name: str
    model: BuiltIn
    is_chosen: Offers
    shares: bool = False
    num_levels: int = 1
    is_alone: bool = True
    precision: str = "float32"


@dataclass(frozen=True)
class Mesh:
    """Nodes and devices per node of each stage, and the number of stages."""

    nodes: int
    devices: int
    num_stages: int = 1

    def __str__(self) -> str:
        ranks = f"{self.nodes} x {self.devices}" if self.nodes > 1 else str(self.devices)
        return ranks if self.num_stages == 1 else f"{self.num_stages} stages of {ranks}"

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.devices * self.num_stages


#: 2, 4, 2 x 2 and 8 ranks, and the stages of pipelines.
MESHES = (Mesh(1, 2), Mesh(1, 4), Mesh(2, 2), Mesh(2, 4), Mesh(1, 2, 2), Mesh(2, 2, 2))


def _divided(zero: int, hybrid: bool = False) -> Offers:
    return lambda layer, strategy: strategy.zero == zero and strategy.hybrid == hybrid


def _shared(kinds: tuple[str, ...], way: str) -> Offers:
    return lambda layer, strategy: layer.kind in kinds and strategy.sequence == way


def _heads_for_positions(layer: Layer, strategy: Strategy) -> bool:
    is_attention = layer.kind == "attention"
    return (strategy.p1 if is_attention else strategy.p0) == strategy.num_devices and not strategy.key_copies


CHOICES = (
    Choice("states divided (ZeRO 1)", GPT, _divided(1)),
    Choice("gradients too (ZeRO 2)", GPT, _divided(2)),
    Choice("parameters too (ZeRO 3)", GPT, _divided(3)),
    Choice("ZeRO 2 inside nodes", GPT, _divided(2, hybrid=True), num_levels=2),
    Choice("ZeRO 3 inside nodes", GPT, _divided(3, hybrid=True), num_levels=2),
    Choice("inputs gathered again", GPT, lambda layer, strategy: strategy.regathers),
    Choice("keys and values gathered", GPT, _shared(("attention",), "gather"), shares=True),
    Choice("keys and values in a ring", GPT, _shared(("attention",), "ring"), shares=True),
    Choice("heads for positions", GPT, _heads_for_positions, shares=True),
    Choice("copies of key heads", LLAMA, lambda layer, strategy: bool(strategy.key_copies)),
    Choice("experts divided", MOE, lambda layer, strategy: bool(strategy.experts)),
    Choice("experts divided, ZeRO 2", MOE, lambda layer, s: bool(s.experts) and s.zero == 2, is_alone=False),
    Choice("channels of convolutions", VGG, lambda layer, s: layer.kind == "conv2d" and s.p1 * s.p2 > 1),
    Choice("rows of images", VGG, lambda layer, s: s.sequence == "halo" and not s.columns, shares=True),
    Choice("columns and tiles of images", VGG, lambda layer, s: bool(s.columns), shares=True),
    Choice("batch norms of all samples", TOGETHER, lambda layer, s: layer.kind == "batch_norm" and s.p0 > 1),
    Choice("mixture: transformer", LLAMA, lambda layer, strategy: True, is_alone=False),
    Choice("mixture: half precision", LLAMA, lambda layer, strategy: True, is_alone=False, precision="mixed"),
    Choice("mixture: shared samples", LLAMA, lambda layer, strategy: True, shares=True, is_alone=False),
    Choice("mixture: experts", MOE, lambda layer, strategy: True, is_alone=False),
    Choice("mixture: images", RESNET, lambda layer, strategy: True, is_alone=False),
    Choice("mixture: shared images", LARGE_RESNET, lambda layer, strategy: True, shares=True, is_alone=False),
)


def plan_of(choice: Choice, mesh: Mesh, seed: int = 0) -> PlanFile | None:
    """A plan that makes a choice in every layer that offers it; None if no layer does on this mesh.

    The micro-batch has two samples for each rank of a stage, or one sample for all of them.
    """
    graph = choice.model.graph()
    micro_batch = 1 if choice.shares else 2 * mesh.nodes * mesh.devices
    cluster = load_cluster("dgx-a100").resized(mesh.nodes * mesh.num_stages, mesh.devices)
    cluster = replace(cluster, device=replace(cluster.device, peak_flops={choice.precision: 1e12}))
    devices = StageMesh(mesh.nodes, mesh.devices)
    sizes = devices.devices(cluster).level_sizes
    chain, rng = chain_of(graph), random.Random(seed)
    first, stages, num_chosen = 0, [], 0
    for number in range(mesh.num_stages):
        num_units = chain.num_units * (number + 1) // mesh.num_stages - first
        stage = chain.stage(first, first + num_units).graph
        strategies = {}
        for layer in stage.layers:
            offered = _offered(layer, sizes, micro_batch, stage.place(layer.name, "none"))
            offered = [strategy for strategy in offered if stage.offers(layer.name, strategy)]
            chosen = [s for s in offered if choice.is_chosen(layer, s) and layer.name != ENTRY]
            if choice.is_alone:
                fewest = min((len(s.words) for s in chosen), default=0)
                chosen = [s for s in chosen if len(s.words) == fewest]
            num_chosen += bool(chosen)
            strategies[layer.name] = rng.choice(chosen or [s for s in offered if not s.words] or offered)
        stages.append(StageChoice(num_units, "none", strategies))
        first += num_units
    if not num_chosen or len(sizes) < choice.num_levels:
        return None
    workload = Workload(micro_batch * NUM_MICRO_BATCHES, micro_batch, choice.precision, "sgd")
    name, options = ("gpipe", ()) if mesh.num_stages == 1 else ("1f1b", (("policy", "A"),))
    schedule = PipelineSchedule(name, mesh.num_stages, NUM_MICRO_BATCHES, options)
    configuration = Configuration(devices, schedule, workload, tuple(stages))
    evaluation = evaluate(chain, cluster, configuration)
    strategies = {layer.layer.name: layer.strategy for layer in evaluation.layers}
    return PlanFile(graph, cluster, workload, strategies, {}, evaluation)


def _offered(layer: Layer, sizes: tuple[int, ...], micro_batch: int, place: Place) -> list[Strategy]:
    """The strategies of a layer for a micro-batch; what a stage receives is split by samples or by features."""
    if layer.name == ENTRY:
        offered = [data_parallel(sizes), Strategy(tuple((1, size, 1) for size in sizes))]
    else:
        every = enumerate_strategies(layer, sizes, choices=EVERYTHING, place=place)
        fitting = [strategy for strategy in every if strategy.fits(layer, micro_batch)]
        offered = [tiling for strategy in fitting for tiling in tilings(layer, strategy, micro_batch)]
    return [strategy for strategy in offered if strategy.fits(layer, micro_batch)]
