"""Strategies at random, for models whose every layer is to be run at some."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from math import prod

from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.sharing import position_factors
from autoddl.costmodel.strategy import PLAIN, Choices, Strategy, enumerate_strategies, transposed

__all__ = ["random_strategies", "tilings"]


def tilings(layer: Layer, strategy: Strategy, samples: int) -> Iterator[Strategy]:
    """The strategy with every grid of tiles that the images of the layer divide into, if its ranks share so many samples.

    A search is offered the grids with the shortest boundaries only.
    """
    if strategy.columns:
        return
    yield strategy
    if not layer.is_image or strategy.p0 <= samples:
        return
    p0s = tuple(p0 for p0, _, _ in strategy.splits)
    positions = next(one for one in position_factors(p0s) if prod(one) * samples == strategy.p0)
    for columns in position_factors(positions):
        way = strategy.sequence or "tiles"
        tiled = replace(strategy, sequence=way, positions=positions, columns=columns)
        if tiled.divides(layer):
            yield tiled


def random_strategies(
    graph: LayerGraph,
    level_sizes: tuple[int, ...],
    seed: int,
    summa: bool = False,
    role_of: Callable[[Layer], Hashable] = lambda layer: layer.name,
    choices: Choices = PLAIN,
    samples: int = 8,
) -> dict[str, Strategy]:
    """One that divides it for every layer, and the samples; layers of one role have the same, shared weights are transposed.

    Where parameters may be divided, most samples are, so that there is something to divide.
    """
    rng, strategies = random.Random(seed), {}
    chosen: dict[Hashable, Strategy] = {}
    for layer in graph.layers:
        owner = next((p.tied_to for p in layer.parameters if p.tied_to), None)
        if owner is not None:
            strategies[layer.name] = transposed(strategies[owner])
            continue
        users = [other for other in graph.layers if any(p.tied_to == layer.name for p in other.parameters)]
        options = [
            strategy
            for strategy in enumerate_strategies(layer, level_sizes, summa, choices, graph.place(layer.name, "none"))
            if strategy.fits(layer, samples) and all(transposed(strategy).divides(user) for user in users)
        ]
        if choices != PLAIN and layer.parameters:
            options = [strategy for strategy in options if strategy.p0 > 1 or strategy.regathers] or options
        summas = [strategy for strategy in options if strategy.summa]
        choice = rng.choice(summas if summas and rng.random() < 0.7 else options)
        strategies[layer.name] = chosen.setdefault(role_of(layer), choice)
    return strategies
