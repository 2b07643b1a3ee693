"""Models, plans and schedules of the tests of stages with SBP plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoddl.costmodel.graph import Layer, LayerGraph, places_of
from autoddl.costmodel.strategy import Choices, Strategy, enumerate_strategies, transposed
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


#: All divisions of parameters and gathered inputs.
ALL_CHOICES = Choices((0, 1, 2, 3), regathers=True)


def random_plan(
    layers: Sequence[Layer],
    num_ranks: int | tuple[int, ...],
    rows: int,
    rng: random.Random,
    divided_in: LayerGraph | None = None,
    **options: Any,
) -> StagePlan:
    """A random strategy for each layer, among those whose p0 divides ``rows``.

    Args:
        layers: The layers of the stage.
        num_ranks: Number of ranks, or that of each network level.
        rows: Samples.
        rng: Draws.
        divided_in: The whole graph, if parameters are to be divided and inputs gathered again (`ALL_CHOICES`).
        options: Of the plan.
    """
    sizes = num_ranks if isinstance(num_ranks, tuple) else (num_ranks,)
    strategies: dict[str, Strategy] = {}
    for layer in layers:
        if divided_in is None:
            offered = list(enumerate_strategies(layer, sizes))
        else:
            edges = [edge for edge in divided_in.edges if {*edge} <= {one.name for one in layers}]
            places = dict(zip(layers, places_of(layers, edges, divided_in, "none")))
            own = stage_layer(layer, {one.name for one in layers})
            offered = list(enumerate_strategies(own, sizes, choices=ALL_CHOICES, place=places[layer]))
            # Of each division of the layer all ways are equally likely; most of them should divide samples.
            offered = [strategy for strategy in offered if strategy.p0 > 1 or not layer.num_parameters] or offered
        whole = [strategy for strategy in offered if rows % strategy.p0 == 0 and not strategy.positions]
        strategies[layer.name] = rng.choice(whole)
    for layer in layers:
        for parameter in layer.parameters:
            if divided_in is not None and parameter.tied_to in strategies:
                owner = strategies[parameter.tied_to]
                strategies[layer.name] = transposed(owner) if layer.kind == "linear" else owner
    return StagePlan(strategies, **options)


def stage_layer(layer: Layer, inside: set[str]) -> Layer:
    """A layer with its own copies of the weights that it shares with layers outside of its stage, whose layers are ``inside``."""
    own = (p if p.tied_to in inside else replace(p, tied_to=None) for p in layer.parameters)
    return replace(layer, parameters=tuple(own))


def cut_layers(graph: LayerGraph, cuts: Sequence[str]) -> list[tuple[Layer, ...]]:
    """The layers of a graph, cut before the first layer whose name begins with each of ``cuts``."""
    names = [layer.name for layer in graph.layers]
    starts = [0, *(next(i for i, name in enumerate(names) if name.startswith(cut)) for cut in cuts), len(names)]
    return [graph.layers[first:last] for first, last in zip(starts, starts[1:])]
