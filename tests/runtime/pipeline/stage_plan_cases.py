"""Models, plans and schedules of the tests of stages with SBP plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy, enumerate_strategies
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.zoo.transformers import Transformer

#: Schedule families with their options.
FAMILIES = [
    ("gpipe", {}),
    ("gpipe", {"recompute": True}),
    ("1f1b", {}),
    ("1f1b", {"policy": "B"}),
    ("gems", {}),
    ("chimera", {}),
    ("chimera", {"concatenation": "doubling"}),
    ("chimera", {"concatenation": "halving"}),
    ("chimera", {"all_reduce": "eager", "recompute": True}),
    ("grouped-gpipe", {}),
    ("interleaved-1f1b", {}),
    ("zero-bubble", {}),
    ("pipedream", {}),
    ("pipedream-2bw", {}),
    ("wpipe", {}),
]
#: Widths of an MLP of 4 layers.
MLP_WIDTHS = (24, 48, 24, 48, 24)
GPT = Transformer("gpt", layers=2, width=16, heads=4, sequence=8, vocabulary=32)


def strategy_of(p0: int, p1: int, p2: int) -> Strategy:
    """A strategy on one network level."""
    return Strategy(((p0, p1, p2),))


def random_plan(layers: Sequence[Layer], num_ranks: int, rows: int, rng: random.Random, **options: Any) -> StagePlan:
    """A random strategy for each layer, among those whose p0 divides ``rows``."""
    strategies = {}
    for layer in layers:
        fitting = [strategy for strategy in enumerate_strategies(layer, (num_ranks,)) if rows % strategy.p0 == 0]
        strategies[layer.name] = rng.choice(fitting)
    return StagePlan(strategies, **options)


def cut_layers(graph: LayerGraph, cuts: Sequence[str]) -> list[tuple[Layer, ...]]:
    """The layers of a graph, cut before the first layer whose name begins with each of ``cuts``."""
    names = [layer.name for layer in graph.layers]
    starts = [0, *(next(i for i, name in enumerate(names) if name.startswith(cut)) for cut in cuts), len(names)]
    return [graph.layers[first:last] for first, last in zip(starts, starts[1:])]
