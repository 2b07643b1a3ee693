"""The plan of a stage: consecutive layers of a graph, at strategies on the stage's own ranks.

Between two stages passes one tensor: what the last layer of the one gives. It leaves at that layer's layout, and arrives at the
other stage's *entry*; for readers with another layout it is redistributed there, as it is between any two layers of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy

__all__ = ["StagePlan", "check_stages", "entry_strategy", "given_layer", "strategies_of"]


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        strategies: of its layers, by name; all on the same number of devices, the stage's.
        entry: the layout, as a strategy, at which it takes what the stage before gives; by default that of its first layer that
            reads it.
        recompute: whether every layer keeps no more than its evenly split input, and repeats its forward pass before its backward
            pass. (A schedule can recompute too: whole stages, of which only the input is kept.)
    """

    strategies: Mapping[str, Strategy]
    recompute: bool = False
    entry: Strategy | None = None

    @property
    def num_ranks(self) -> int:
        """How many ranks the stage is for."""
        return next(iter(self.strategies.values())).num_devices

    def layers(self, graph: LayerGraph) -> tuple[Layer, ...]:
        """Its layers, in order."""
        return tuple(layer for layer in graph.layers if layer.name in self.strategies)


def check_stages(graph: LayerGraph, stages: Sequence[StagePlan]) -> None:
    """Whether stages are a graph's, cut where one tensor passes.

    Raises:
        UserError: naming the stage and the layer.
    """
    names = [layer.name for layer in graph.layers]
    first = 0
    for number, stage in enumerate(stages):
        if not stage.strategies:
            raise UserError(f"stage {number} has no layers, should have at least one")
        for name in stage.strategies:
            if name not in names:
                raise UserError(f"stage {number} has layer {name!r}, which the graph {graph.name} has not")
        expected = names[first : first + len(stage.strategies)]
        if set(expected) != set(stage.strategies):
            wrong = next((name for name in expected if name not in stage.strategies), names[-1])
            raise UserError(
                f"stage {number} is {len(stage.strategies)} layers without {wrong!r}; stages should be all layers in their order"
            )
        first += len(expected)
        if stage.entry is not None and stage.entry.num_devices != stage.num_ranks:
            raise UserError(f"stage {number} is for {stage.num_ranks} ranks, its entry {stage.entry} is not")
        for layer in stage.layers(graph):
            strategy = stage.strategies[layer.name]
            if strategy.num_devices != stage.num_ranks:
                raise UserError(
                    f"stage {number} is for {stage.num_ranks} ranks, {layer.describe()} for {strategy.num_devices} ({strategy})"
                )
            if not strategy.divides(layer):
                raise UserError(f"{layer.describe()}: {strategy} does not divide its shape")
    if first != len(names):
        raise UserError(f"layer {names[first]!r} is in no stage")
    for number in range(len(stages) - 1):
        _check_boundary(graph, stages, number)


def _check_boundary(graph: LayerGraph, stages: Sequence[StagePlan], number: int) -> None:
    before = {name for stage in stages[: number + 1] for name in stage.strategies}
    last = stages[number].layers(graph)[-1].name
    crossing = {source for source, target in graph.edges if source in before and target not in before}
    for name in sorted(crossing - {last}):
        raise UserError(
            f"between stages {number} and {number + 1} pass {last!r} and {name!r}; cut where one tensor passes"
        )
    if not crossing:
        raise UserError(f"between stages {number} and {number + 1} passes nothing")
    readers = {target for source, target in graph.edges if source == last}
    if not readers & set(stages[number + 1].strategies):
        raise UserError(f"stage {number + 1} does not read {last!r}, which stage {number} gives")


def given_layer(graph: LayerGraph, stages: Sequence[StagePlan], number: int) -> str | None:
    """The layer whose output the stage before gives to a stage; None for the first one."""
    return stages[number - 1].layers(graph)[-1].name if number else None


def entry_strategy(graph: LayerGraph, stages: Sequence[StagePlan], number: int) -> Strategy:
    """The layout, as a strategy, at which a stage takes what the one before gives."""
    chosen = stages[number].entry
    if chosen is not None:
        return chosen
    given = given_layer(graph, stages, number)
    reader = next(layer for layer in stages[number].layers(graph) if given in graph.inputs(layer.name))
    levels = stages[number].strategies[reader.name].rows_and_features
    return Strategy(tuple((p0, s, 1) for p0, s in levels))


def strategies_of(graph: LayerGraph, stages: Sequence[StagePlan], number: int) -> dict[str, Strategy]:
    """Of all that the layers of a stage read and give: of the layers, and of the one that the stage before gives."""
    given = given_layer(graph, stages, number)
    entry = {} if given is None else {given: entry_strategy(graph, stages, number)}
    return {**stages[number].strategies, **entry}
