"""Layouts of planned stages at their boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.strategy import Strategy

from ..stage.plan import StagePlan, check_stages, entry_strategy
from .holding import StageLayout

__all__ = ["stage_layouts"]


def stage_layouts(graph: LayerGraph, stages: Sequence[StagePlan]) -> tuple[StageLayout, ...]:
    """Return the layout of each stage's input and output over the ranks of the stage.

    Raises:
        UserError: As for `check_stages`.
    """
    check_stages(graph, stages)
    result = []
    for number, stage in enumerate(stages):
        layers = stage.layers(graph)
        leaving = stage.strategies[layers[-1].name].activations
        columns = edge_shape(layers[-1], 1)[1]
        entry = [entry_strategy(graph, stages, number)] if number else []
        arriving = entry[0].activations if entry else leaving
        # Every layer splits the rows of a slot evenly, by its own p0.
        row_multiple = lcm(*(strategy.p0 for strategy in [*stage.strategies.values(), *entry]))
        result.append(StageLayout(arriving, leaving, columns, row_multiple, _is_joint(graph, stage, entry)))
    return tuple(result)


def _is_joint(graph: LayerGraph, stage: StagePlan, entry: Sequence[Strategy]) -> bool:
    """Return whether the ranks of a stage communicate with each other in forward or backward passes.

    They do not if all layers are split along the samples only, except in the last stage, which sums the loss over its ranks.
    """
    if stage.num_ranks == 1:
        return False
    ends_in_loss = graph.layers[-1].name in stage.strategies
    return ends_in_loss or any(strategy.p0 != stage.num_ranks for strategy in [*stage.strategies.values(), *entry])
