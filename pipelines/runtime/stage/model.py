"""A model divided into planned stages, and the weights that the ranks of each stage store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph

from ..comm.parameter_layouts import ParameterLayout
from ..dropouts import check_dropouts
from ..kinds.registry import parameter_layouts
from ..userparameters import check_parameters, find_parameter, first_names
from .plan import StagePlan, check_stages

__all__ = ["PlannedModel", "StageWeights", "StoredWeight"]


@dataclass(frozen=True)
class PlannedModel:
    """A model divided into stages, each with a plan of its own; a plan without a pipeline is one stage.

    Attributes:
        module: The whole model. It is read, not changed.
        graph: The layers of the model.
        stages: Plans of the stages, which hold all layers of the graph in graph order.
        feeds: Index of the model's input that each input layer reads; see :func:`autoddl.apply`.

    Raises:
        UserError: The module's parameters or dropouts, or the stages, do not fit the graph.
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
        """Whether the graph ends in a loss."""
        return self.graph.has_loss

    @cached_property
    def _first_names(self) -> dict[int, str]:
        return first_names(self.module)

    def first_name(self, name: str) -> str:
        """Return the first of the names that the module has for a parameter; tied parameters have several."""
        return self._first_names[id(find_parameter(self.module, name))]

    def is_trained(self, name: str) -> bool:
        """Return whether a parameter is trained, that is, not frozen."""
        return bool(find_parameter(self.module, name).requires_grad)

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that use each parameter, by the parameter's first name in the module."""
        holders: dict[str, dict[int, None]] = {}
        for number, stage in enumerate(self.stages):
            for layer in stage.layers(self.graph):
                for parameter in layer.parameters:
                    holders.setdefault(self.first_name(parameter.name), {})[number] = None
        return {name: tuple(stages) for name, stages in holders.items()}

    def tied(self) -> set[tuple[int, ...]]:
        """Return the groups of stages that share trained parameters, whose gradients have to be summed over the group."""
        holders = self.holders().items()
        return {stages for name, stages in holders if len(stages) > 1 and self.is_trained(name)}

    def weights(self) -> tuple[StageWeights, ...]:
        """Return the weights that the ranks of each stage store, in stage order.

        Raises:
            UserError: Layers that share a weight cannot store it as one tensor.
        """
        holders = self.holders()
        return tuple(StageWeights(self, number, holders) for number in range(len(self.stages)))


@dataclass(frozen=True)
class StoredWeight:
    """A weight that the ranks of a stage store, in shards: one parameter of the module, or several concatenated.

    Attributes:
        layout: Distribution of the weight over the ranks of the stage. Its sources are first names in the module.
        layer: Name of the first layer of the stage that uses the weight.
        stages: Numbers of the stages that use the weight.
        is_trained: Whether the weight is trained, that is, not frozen.
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
        """(first name in the module, number of rows) of each parameter in the weight."""
        return self.layout.sources

    @property
    def size(self) -> int:
        """Number of elements of one rank's shard."""
        return prod(self.layout.local_shape())


class StageWeights:
    """The weights that the ranks of one stage store.

    Args:
        model: The whole model.
        number: Number of the stage.
        holders: Stages that use each parameter; see `PlannedModel.holders`.

    Attributes:
        stored: Weights of the stage, by name. A weight that several layers share is stored once.
        positions: For each layer, the positions of its weights in ``stored``.
    """

    def __init__(self, model: PlannedModel, number: int, holders: Mapping[str, tuple[int, ...]]) -> None:
        plan = model.stages[number]
        stored: list[StoredWeight] = []
        position_of: dict[str, int] = {}  # by the first name of each parameter
        self.positions: dict[str, tuple[int, ...]] = {}
        for layer in plan.layers(model.graph):
            positions = []
            for layout in parameter_layouts(model.graph, layer, plan.strategies[layer.name]):
                sources = tuple((model.first_name(name), rows) for name, rows in layout.sources)
                known = {position_of.setdefault(name, len(stored)) for name, _ in sources}
                position = min(known)
                if position == len(stored):
                    stored.append(_new_weight(model, layer, replace(layout, sources=sources), holders))
                elif len(known) > 1 or stored[position].sources != sources:
                    raise UserError(
                        f"{layer.describe()}: {layout.name} is not stored as one tensor by all layers that share its parameters"
                    )
                else:
                    _check_same_layout(layer, plan, layout, stored[position].layout)
                positions.append(position)
            self.positions[layer.name] = tuple(positions)
        self.stored = {weight.name: weight for weight in stored}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the stage's parameters, whole, by their first names in the module."""
        return {
            name: weight.layout.source_shape(rows) for weight in self.stored.values() for name, rows in weight.sources
        }


def _new_weight(
    model: PlannedModel, layer: Layer, layout: ParameterLayout, holders: Mapping[str, tuple[int, ...]]
) -> StoredWeight:
    """Return the stored form of a weight that ``layer`` is the first layer of its stage to use."""
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
    if frozen:
        layout = replace(layout, zero=0)
    return StoredWeight(layout, layer.name, stages.pop(), not frozen)


def _check_same_layout(layer: Layer, plan: StagePlan, layout: ParameterLayout, known: ParameterLayout) -> None:
    """Check that a layer needs the same shards of a shared weight as the layer that stores it: it is stored once per stage."""
    for mine, theirs in zip(layout.indices, known.indices):
        if not all(np.array_equal(a, b) for a, b in zip(mine, theirs)):
            raise UserError(
                f"{layer.describe()}: {plan.strategies[layer.name]} needs other shards of {layout.name} than the ranks store for "
                f"{known.name}, to which it is tied; give both layers strategies with the same shards"
            )
