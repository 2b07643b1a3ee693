"""Layouts of planned stages at their boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.pricing import edge_shape, moved_shape
from autoddl.costmodel.strategy import Strategy

from ..stage.plan import StagePlan, check_stages, entry_strategy
from .holding import StageLayout

__all__ = ["stage_layouts"]


def stage_layouts(
    graph: LayerGraph, stages: Sequence[StagePlan], samples: int | None = None
) -> tuple[StageLayout, ...]:
    """Return the layout of each stage's input and output over the ranks of the stage.

    Args:
        graph: The layer graph.
        stages: Plans of the stages.
        samples: Samples of a slot; None if no ranks share a sample.

    Raises:
        UserError: As for `check_stages`.
    """
    check_stages(graph, stages)
    result = []
    for number, stage in enumerate(stages):
        layers = stage.layers(graph)
        leaving = stage.strategies[layers[-1].name]
        columns = edge_shape(layers[-1], 1)[1]
        entry = [entry_strategy(graph, stages, number)] if number else []
        arriving = entry[0].activations if entry else leaving.activations
        # Every layer splits the rows of a slot evenly, by its own p0, unless its ranks share samples.
        splitting = [(graph[name], strategy) for name, strategy in stage.strategies.items()]
        splitting += [(stages[number - 1].layers(graph)[-1], strategy) for strategy in entry]
        row_multiple = lcm(*(s.p0 for layer, s in splitting if not _shares_samples(layer, s, samples)))
        rows_per_sample = 1
        if samples is not None and number + 1 < len(stages):
            ends = leaving, entry_strategy(graph, stages, number + 1)
            rows, features = moved_shape(layers[-1], [end.rows_and_features for end in ends], samples)
            rows_per_sample, columns = rows // samples, features
        is_joint = _is_joint(graph, stage, entry)
        result.append(StageLayout(arriving, leaving.activations, columns, row_multiple, is_joint, rows_per_sample))
    return tuple(result)


def _is_joint(graph: LayerGraph, stage: StagePlan, entry: Sequence[Strategy]) -> bool:
    """Return whether the ranks of a stage communicate with each other in forward or backward passes.

    They do not if all layers are split along the samples only, except in the last stage, which sums the loss over its ranks.
    """
    if stage.num_ranks == 1:
        return False
    ends_in_loss = graph.layers[-1].name in stage.strategies
    every = [*stage.strategies.values(), *entry]
    return ends_in_loss or any(strategy.p0 != stage.num_ranks or strategy.positions for strategy in every)


def _shares_samples(layer: Layer, strategy: Strategy, samples: int | None) -> bool:
    return samples is not None and strategy.p0 > samples and strategy.fits(layer, samples)
