"""A model cut in stages that have plans of their own, and which weights the ranks of each stage store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph

from ..dropouts import check_dropouts
from ..layouts import ParameterLayout, parameter_layouts
from ..statements import LOSSES
from ..userparameters import check_parameters, find_parameter, first_names
from .plan import StagePlan, check_stages

__all__ = ["PlannedModel", "StageWeights", "Stored"]


@dataclass(frozen=True)
class PlannedModel:
    """A model cut in stages that have plans of their own; a plan without a pipeline is one stage.

    Attributes:
        module: the whole model; it is read, not changed.
        graph: its layers.
        stages: all layers of the graph in their order, each stage at strategies on its own ranks.
        feeds: which input layers read, see `autoddl.apply`.

    Raises:
        UserError: the module is not the graph's, or the stages are not.
    """

    module: Any
    graph: LayerGraph
    stages: tuple[StagePlan, ...]
    feeds: Mapping[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_parameters(self.module, self.graph)
        check_stages(self.graph, self.stages)
        check_dropouts(self.module, self.graph)

    @property
    def has_loss(self) -> bool:
        """Whether the graph ends in a loss, which takes targets."""
        last = self.graph.layers[-1]
        return last.kind == "loss" or bool(LOSSES & set(last.epilogue))

    @cached_property
    def _first_names(self) -> dict[int, str]:
        return first_names(self.module)

    def first_name(self, name: str) -> str:
        """The first one of the names that the module has for a parameter."""
        return self._first_names[id(find_parameter(self.module, name))]

    def is_trained(self, name: str) -> bool:
        """Whether a parameter has gradients: it is not frozen."""
        return bool(find_parameter(self.module, name).requires_grad)

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Per parameter, by its first name in the module, the stages that use it."""
        holders: dict[str, dict[int, None]] = {}
        for number, stage in enumerate(self.stages):
            for layer in stage.layers(self.graph):
                for parameter in layer.parameters:
                    holders.setdefault(self.first_name(parameter.name), {})[number] = None
        return {name: tuple(stages) for name, stages in holders.items()}

    def tied(self) -> set[tuple[int, ...]]:
        """The groups of stages that have trained parameters in common, whose gradients they sum."""
        holders = self.holders().items()
        return {stages for name, stages in holders if len(stages) > 1 and self.is_trained(name)}

    def weights(self) -> tuple[StageWeights, ...]:
        """What the ranks of each stage store.

        Raises:
            UserError: layers that share a weight cannot store it as one.
        """
        holders = self.holders()
        return tuple(StageWeights(self, number, holders) for number in range(len(self.stages)))


@dataclass(frozen=True)
class Stored:
    """A tensor that a rank keeps: a parameter's shard, or one of several side by side.

    Attributes:
        layout: how it lies on the ranks of the stage; its sources are named by their first names in the module.
        layer: the first one of the stage that has it.
        stages: the stages that use it.
        is_trained: whether it has gradients.
    """

    layout: ParameterLayout
    layer: str
    stages: tuple[int, ...]
    is_trained: bool

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def sources(self) -> tuple[tuple[str, int], ...]:
        """(first name in the module, rows) of the parameters that it holds."""
        return self.layout.sources

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

    def __init__(self, model: PlannedModel, number: int, holders: Mapping[str, tuple[int, ...]]) -> None:
        plan = model.stages[number]
        stored: list[Stored] = []
        place_of: dict[str, int] = {}
        self.places: dict[str, tuple[int, ...]] = {}
        for layer in plan.layers(model.graph):
            places = []
            for layout in parameter_layouts(model.graph, layer, plan.strategies[layer.name]):
                sources = tuple((model.first_name(name), rows) for name, rows in layout.sources)
                found = {place_of.setdefault(name, len(stored)) for name, _ in sources}
                place = min(found)
                if place == len(stored):
                    stored.append(_stored(model, layer, replace(layout, sources=sources), holders))
                elif len(found) > 1 or stored[place].sources != sources:
                    raise UserError(f"{layer.describe()}: {layout.name} is stored in parts by the layers that share it")
                else:
                    _check_alike(layer, plan, layout, stored[place].layout)
                places.append(place)
            self.places[layer.name] = tuple(places)
        self.stored = {one.name: one for one in stored}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, by their first names in the module."""
        return {name: (rows, *one.layout.shape[1:]) for one in self.stored.values() for name, rows in one.sources}


def _stored(
    model: PlannedModel, layer: Layer, layout: ParameterLayout, holders: Mapping[str, tuple[int, ...]]
) -> Stored:
    """A weight that the layer is the first one to have."""
    names = [name for name, _ in layout.sources]
    stages = {holders[name] for name in names}
    if len(stages) > 1:
        raise UserError(f"{layer.describe()}: only a part of {layout.name} is shared with other stages")
    frozen = [name for name in names if not model.is_trained(name)]
    if frozen and len(frozen) < len(names):
        raise UserError(
            f"{layer.describe()}: {frozen[0]} is frozen (requires_grad is False), and stored in one tensor with others that are "
            "not; freeze all of them or none"
        )
    return Stored(layout, layer.name, stages.pop(), not frozen)


def _check_alike(layer: Layer, plan: StagePlan, layout: ParameterLayout, known: ParameterLayout) -> None:
    """A weight that layers of a stage share is stored once: it has to lie alike in all of them."""
    for mine, theirs in zip(layout.indices, known.indices):
        if not all(np.array_equal(a, b) for a, b in zip(mine, theirs)):
            raise UserError(
                f"{layer.describe()}: {plan.strategies[layer.name]} puts {layout.name} elsewhere than it is as {known.name}, "
                "whose weight it shares"
            )
