"""The plan of a stage: consecutive layers of a graph, at strategies on the stage's own ranks.

Exactly one tensor crosses the boundary between two stages: the output of the last layer of the earlier stage. It is sent in the
layout of that layer and received in the *entry* layout of the later stage. If a layer of the later stage reads it in another
layout, it is redistributed there, as between any two layers of a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from autoddl.costmodel.distribution import RowsAndFeatures
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph, Place, places_of
from autoddl.costmodel.layer import zero_of
from autoddl.costmodel.pricing import moved_shape
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

__all__ = [
    "MovedTensor",
    "StagePlan",
    "check_input_shape",
    "check_stages",
    "entry_strategy",
    "is_mirrored",
    "local_shape",
    "moved_tensor",
    "norm_parts",
    "source_layer",
    "stage_plan",
    "stored_rows",
    "strategies_of",
]


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage.

    Attributes:
        strategies: Strategies of the stage's layers, by layer name. All of them use the same number of devices.
        recompute: What the backward pass of the stage recomputes, a way of :mod:`autoddl.costmodel.recomputation`. (A schedule
            can recompute whole stages instead, of which only the input is saved.)
        entry: Layout in which the stage receives the output of the previous stage, given as a strategy. None: the layout of the
            stage's first layer that reads this output.
        attention: How attention is computed, one of :data:`autoddl.costmodel.workload.ATTENTIONS`.
    """

    strategies: Mapping[str, Strategy]
    recompute: str = "none"
    entry: Strategy | None = None
    attention: str = "fused"

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the stage."""
        return next(iter(self.strategies.values())).num_devices

    def layers(self, graph: LayerGraph) -> tuple[Layer, ...]:
        """Return the stage's layers, in graph order."""
        return tuple(layer for layer in graph.layers if layer.name in self.strategies)

    def num_blocks(self, graph: LayerGraph) -> int:
        """Return the number of repeated blocks of the stage."""
        return len({(layer.block, layer.block_index) for layer in self.layers(graph) if layer.block})

    def places(self, graph: LayerGraph) -> dict[str, Place]:
        """Return the place of every layer in the stage, by name; a layer that reads the previous stage does not read data."""
        layers = self.layers(graph)
        edges = [edge for edge in graph.edges if edge[1] in self.strategies]
        return dict(zip((layer.name for layer in layers), places_of(layers, edges, graph, self.recompute)))


def stage_plan(
    graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload, entry: Strategy | None = None
) -> StagePlan:
    """Return the plan of a stage, whose strategies contain what the workload says of all layers.

    Args:
        graph: Layer graph of the model.
        strategies: Strategies of the stage's layers, by layer name.
        workload: Recomputation and attention of the stage, and the stage of ZeRO that all layers have at least.
        entry: See `StagePlan`.
    """
    plan = StagePlan(strategies, workload.recompute, entry, workload.attention)
    if not workload.zero:
        return plan
    places = plan.places(graph)
    divided = {
        name: strategy
        if strategy.summa or strategy.copies == 1 or not _has_weights(graph[name], strategies)
        else dataclasses.replace(strategy, zero=zero_of(graph[name], strategy.zero, places[name], workload.zero))
        for name, strategy in strategies.items()
    }
    return dataclasses.replace(plan, strategies=divided)


def _has_weights(layer: Layer, inside: Container[str]) -> bool:
    """Return whether a layer of a stage has weights that no earlier layer of the stage has; ``inside`` are the stage's layers."""
    return any(parameter.tied_to is None or parameter.tied_to not in inside for parameter in layer.parameters)


def check_stages(graph: LayerGraph, stages: Sequence[StagePlan]) -> None:
    """Check that the stages divide the graph in order, and that one tensor crosses each boundary.

    Raises:
        UserError: A stage is empty, holds layers that are not consecutive, or uses different numbers of ranks; a strategy does not
            divide its layer; or a boundary is crossed by no tensor or by several. The message names the stage and the layer.
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
            raise UserError(
                f"stage {number} is for {stage.num_ranks} ranks, its entry {stage.entry} for {stage.entry.num_devices}"
            )
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
    """Check that only the output of stage ``number``'s last layer crosses to later stages, and that the next stage reads it."""
    before = {name for stage in stages[: number + 1] for name in stage.strategies}
    last = stages[number].layers(graph)[-1].name
    crossing = {source for source, target in graph.edges if source in before and target not in before}
    for name in sorted(crossing - {last}):
        raise UserError(
            f"between stages {number} and {number + 1} pass {last!r} and {name!r}; cut where one tensor passes"
        )
    if not crossing:
        raise UserError(f"no tensor crosses the boundary between stages {number} and {number + 1}")
    sent = stages[number].strategies[last], entry_strategy(graph, stages, number + 1)
    if any(strategy.columns for strategy in sent):
        raise UserError(
            f"{graph[last].describe()}: {' -> '.join(map(str, sent))} has tiles of images, which cross to another stage as rows"
        )
    readers = {target for source, target in graph.edges if source == last}
    if not readers & set(stages[number + 1].strategies):
        raise UserError(f"stage {number + 1} does not read {last!r}, which stage {number} gives")


def source_layer(graph: LayerGraph, stages: Sequence[StagePlan], number: int) -> str | None:
    """Return the layer of the previous stage whose output stage ``number`` receives; None for the first stage."""
    return stages[number - 1].layers(graph)[-1].name if number else None


def entry_strategy(graph: LayerGraph, stages: Sequence[StagePlan], number: int) -> Strategy:
    """Return the layout, as a strategy, in which stage ``number`` receives the output of the previous stage."""
    chosen = stages[number].entry
    if chosen is not None:
        return chosen
    source = source_layer(graph, stages, number)
    reader = next(layer for layer in stages[number].layers(graph) if source in graph.inputs(layer.name))
    levels = stages[number].strategies[reader.name].rows_and_features
    return Strategy(tuple((p0, s, 1) for p0, s, *_ in levels))


def strategies_of(graph: LayerGraph, stages: Sequence[StagePlan], number: int) -> dict[str, Strategy]:
    """Return the strategies of a stage's layers, and the entry strategy under the name of the stage's `source_layer`."""
    source = source_layer(graph, stages, number)
    entry = {} if source is None else {source: entry_strategy(graph, stages, number)}
    return {**stages[number].strategies, **entry}


def is_mirrored(graph: LayerGraph, strategies: Mapping[str, Strategy]) -> bool:
    """Return whether the positions of all samples are in mirrored order: ranks share the samples of causal attention.

    Args:
        graph: The layer graph.
        strategies: Strategies of all layers, of all stages.

    Raises:
        UserError: Another layer needs the positions in their order.
    """
    sharing = (name for name, strategy in strategies.items() if strategy.positions)
    first = next((name for name in sharing if graph[name].attributes.get("causal")), None)
    if first is not None and graph.reads_order:
        raise UserError(f"{graph[first].describe()}: ranks share samples, whose positions other layers need in order")
    return first is not None


def check_input_shape(graph: LayerGraph, layer: Layer, strategy: Strategy) -> None:
    """Check that a layer whose features are split reads its input in the shape in which the producer wrote it.

    A layer with several inputs, or none, is not checked: it reads each of them as it is.

    Raises:
        UserError: The layer reshapes its input, and the strategy splits features.
    """
    producers = graph.inputs(layer.name)
    if len(producers) != 1 or strategy.p1 * strategy.p2 == 1:
        return
    produced, read = graph[producers[0]].output_shape, layer.input_shape
    if len(produced) == 3 and (len(read) != 3 and prod(read[:-1]) > 1):
        raise UserError(
            f"{layer.describe()}: it reads the image {produced} of {producers[0]!r} as rows {read}, "
            "which is not supported if features are split"
        )
    if len(produced) <= 2 and len(read) <= 2 and produced[-1:] != read[-1:]:
        raise UserError(
            f"{layer.describe()}: it reshapes {produced} of {producers[0]!r} to {read}, "
            "which is not supported if features are split"
        )


def stored_rows(shape: Sequence[int]) -> int:
    """Return the rows of a sample of a tensor between layers; an image is stored as one row.

    Args:
        shape: Shape of a sample: (features,), (rows, features) or (channels, height, width).

    >>> stored_rows((16, 64)), stored_rows((3, 32, 32))
    (16, 1)
    """
    return prod(shape[:-1]) if len(shape) <= 2 else 1


class MovedTensor(NamedTuple):
    """How a layer's output is redistributed.

    Attributes:
        shape: Its logical shape (:func:`autoddl.costmodel.pricing.moved_shape`).
        has_rows: Whether the first dimension is rows or pixels, and not samples.
        has_tiles: Whether columns of images are cut at one of the ends.
        dims: Dimension of a rank's tensor for each dimension of the shape. The tensor is (samples or rows, rows, features), or
            (rows of pixels, channels, columns) if there are tiles.
    """

    shape: tuple[int, ...]
    has_rows: bool
    has_tiles: bool
    dims: tuple[int, ...]


def moved_tensor(producer: Layer, ends: Sequence[RowsAndFeatures], samples: int) -> MovedTensor:
    """Return how the output of a layer is redistributed from one layout to another; the arguments are those of `moved_shape`."""
    shape = moved_shape(producer, ends, samples)
    has_tiles = len(shape) > 2
    return MovedTensor(shape, has_tiles or shape[0] != samples, has_tiles, (0, 1, 2) if has_tiles else (0, 2))


def local_shape(rows: int, strategy: Strategy, samples: int) -> tuple[int, int]:
    """Return the (samples, rows) of a rank's part of a tensor of ``samples`` samples of ``rows`` rows.

    >>> local_shape(16, Strategy(((4, 1, 1),)), 8), local_shape(16, Strategy(((4, 1, 1),)), 2)
    ((2, 16), (1, 8))
    """
    p0 = strategy.p0
    # A part of an image is one row, as a whole one is.
    return (samples // p0, rows) if p0 <= samples else (1, max(samples * rows // p0, 1))


def norm_parts(graph: LayerGraph, strategies: Mapping[str, Strategy]) -> dict[str, tuple[int, int]]:
    """Return how ranks divide the samples of batch norms, by path: number of parts, and how many lie side by side in an image."""
    parts = {}
    for layer in graph.layers:
        strategy = strategies[layer.name]
        if layer.kind == "batch_norm":
            parts[layer.modules[0]] = (1, 1) if layer.attributes["synchronised"] else (strategy.p0, strategy.tiles[1])
        calls = () if layer.program is None else layer.program.calls
        for call in calls:
            if call.kind == "normalization":
                parts[call.path] = (1 if call.is_whole or call.is_synchronised else strategy.p0, 1)
    return parts
