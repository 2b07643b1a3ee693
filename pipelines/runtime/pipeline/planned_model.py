"""A model cut in stages that have plans of their own, and what the ranks of each stage keep of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph

from ..dropouts import check_dropouts
from ..layouts import ParameterLayout, parameter_layouts
from ..statements import LOSSES
from ..userparameters import check_parameters, find_parameter
from .chain import first_names
from .stage_plans import StagePlan

__all__ = ["PlannedModel", "StageWeights", "Stored"]


@dataclass(frozen=True)
class PlannedModel:
    """A model cut in stages that have plans of their own.

    Attributes:
        module: the whole model, with the same values on every rank; it is read, not changed.
        graph: its layers; they end in a loss.
        stages: all layers of the graph in their order, each stage at strategies on its own ranks.
        feeds: which input layers read, see `autoddl.apply`.
    """

    module: Any
    graph: LayerGraph
    stages: tuple[StagePlan, ...]
    feeds: Mapping[str, int | None] = field(default_factory=dict)

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Per parameter, by its first name in the module, the stages that use it.

        Raises:
            UserError: the module is not the graph's, has no loss, or is not trained as a whole.
        """
        strategies = {name: strategy for stage in self.stages for name, strategy in stage.strategies.items()}
        check_parameters(self.module, self.graph, strategies, self.stages[0].num_ranks)
        check_dropouts(self.module, self.graph)
        last = self.graph.layers[-1]
        if last.kind != "loss" and not LOSSES & set(last.epilogue):
            raise UserError(
                f"{last.describe()}: the model ends in it, should end in a loss to be trained in a pipeline"
            )
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                raise UserError(
                    f"{name} is frozen (requires_grad is False), which pipelines cannot keep; they train everything"
                )
        names = first_names(self.module)
        holders: dict[str, list[int]] = {}
        for number, stage in enumerate(self.stages):
            for layer in stage.layers(self.graph):
                for parameter in layer.parameters:
                    stages = holders.setdefault(names[id(find_parameter(self.module, parameter.name))], [])
                    if number not in stages:
                        stages.append(number)
        return {name: tuple(stages) for name, stages in holders.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor that a rank keeps: a parameter's shard, or one of several side by side.

    Attributes:
        layout: how it lies on the ranks of the stage.
        sources: (first name in the module, rows) of the parameters that it holds.
        stages: the stages that use it.
    """

    layout: ParameterLayout
    sources: tuple[tuple[str, int], ...]
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def size(self) -> int:
        """Elements of a shard."""
        return prod(self.layout.local_shape())


class StageWeights:
    """What the ranks of one stage store.

    Attributes:
        stored: by name.
        places: per layer the places of its weights among all of them.
    """

    def __init__(self, model: PlannedModel, holders: Mapping[str, tuple[int, ...]], number: int) -> None:
        self.stored: dict[str, Stored] = {}
        self.places: dict[str, tuple[int, ...]] = {}
        plan, names = model.stages[number], first_names(model.module)
        by_sources: dict[tuple[tuple[str, int], ...], Stored] = {}
        for layer in plan.layers(model.graph):
            places = []
            for layout in parameter_layouts(model.graph, layer, plan.strategies[layer.name]):
                sources = tuple((names[id(find_parameter(model.module, name))], rows) for name, rows in layout.sources)
                if sources not in by_sources:
                    stages = {holders[name] for name, _ in sources}
                    if len(stages) > 1:
                        raise UserError(f"{layer.describe()}: only a part of {layout.name} is shared with other stages")
                    by_sources[sources] = self.stored[layout.name] = Stored(layout, sources, stages.pop())
                known = by_sources[sources]
                _check_alike(layer, layout, known.layout)
                places.append(list(self.stored).index(known.name))
            self.places[layer.name] = tuple(places)


def _check_alike(layer: Layer, layout: ParameterLayout, known: ParameterLayout) -> None:
    """A weight that layers of a stage share is stored once: it has to lie alike in all of them."""
    for mine, theirs in zip(layout.indices, known.indices):
        if not all(np.array_equal(a, b) for a, b in zip(mine, theirs)):
            raise UserError(
                f"{layer.describe()}: its strategy puts {layout.name} elsewhere than it is as {known.name}, whose weight it shares"
            )
