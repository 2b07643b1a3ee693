"""The partition of a model: the units between which it can be cut, and the stages as layer graphs.

**Units.**  The layers, in graph order, can be cut where exactly one layer's output crosses the cut; in a model of repeated blocks,
only where a block begins.  (Not in a ResNet: there blocks that change the shape of the image, which repeat no other, lie between or
behind those that do.)  The layers between two neighbouring cuts are a *unit*.  The layers before the first block (embedding)
belong to the first unit, those behind the last block (head) to the last unit.  A *stage* is a run of consecutive units.

**The graph of a stage** has the stage's layers and, except for the first stage, a layer :data:`ENTRY` in front of them.  The entry
stands for the tensor from the previous stage.  It is a sum without inputs, which costs the same in every layout and keeps nothing,
so it does not change any decision.  Its strategy is the layout in which the stage needs the tensor.  A weight that is shared with
a layer of another stage is copied to both stages, and both copies are trained with the sum of their gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from autoddl.costmodel.graph import Layer, LayerGraph

__all__ = ["ENTRY", "Chain", "StageGraph", "chain_of"]

#: Name of the layer that stands for the tensor from the previous stage.
ENTRY = "(entry)"
#: Stages of a chain whose graphs are kept: those of one configuration are evaluated again and again.
_MOST_KEPT_STAGES = 64


@dataclass(frozen=True)
class StageGraph:
    """A stage as a layer graph.

    Attributes:
        graph: Layers of the stage, with the entry in front unless it is the first stage.
        has_entry: Whether the graph has an entry, that is, whether it is not the first stage.
        shared: (layer of this stage, layer of another stage) for each weight that the two share.
    """

    graph: LayerGraph
    has_entry: bool
    shared: tuple[tuple[str, str], ...]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the stage, without the entry."""
        return self.graph.layers[1:] if self.has_entry else self.graph.layers

    @property
    def exit(self) -> Layer:
        """The last layer, whose output is the input of the next stage."""
        return self.graph.layers[-1]

    @property
    def entry(self) -> Layer | None:
        """The layer that stands for the tensor from the previous stage; None for the first stage."""
        return self.graph.layers[0] if self.has_entry else None


@dataclass(frozen=True)
class Shape:
    """The properties that determine the cost of a stage: stages of equal shape cost the same.

    Attributes:
        is_first: Whether the stage begins with the first unit of the model.
        is_last: Whether the stage ends with the last unit of the model.
        runs: Kinds of the units, as runs of (kind, number of units).
        shared: Positions of the pairs of layers that share a weight across the stage's ends.
    """

    is_first: bool
    is_last: bool
    runs: tuple[tuple[int, int], ...]
    shared: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chain:
    """A model as a chain of units.

    Attributes:
        graph: The model.
        starts: Position of the first layer of each unit, and at the end the number of layers; shape (units + 1,).
    """

    graph: LayerGraph
    starts: tuple[int, ...]

    @property
    def num_units(self) -> int:
        return len(self.starts) - 1

    def layers(self, first: int, stop: int) -> tuple[Layer, ...]:
        """The layers of units ``first`` to ``stop - 1``."""
        return self.graph.layers[self.starts[first] : self.starts[stop]]

    @cached_property
    def entering_elements(self) -> np.ndarray:
        """Elements per sample of the tensor that enters each unit from the previous one; 0 before the first unit and behind the
        last one; shape (units + 1,)."""
        inner = [self.graph.layers[start - 1].output_elements for start in self.starts[1:-1]]
        return np.array([0, *inner, 0], dtype=float)

    @cached_property
    def signatures(self) -> tuple[Hashable, ...]:
        """Per unit, the properties that determine its costs: units of equal signatures cost the same."""
        position = {layer.name: i for i, layer in enumerate(self.graph.layers)}
        signatures = []
        for unit, start in enumerate(self.starts[:-1]):
            rows = []
            for layer in self.layers(unit, unit + 1):
                inputs = tuple(max(-1, position[name] - start) for name in self.graph.inputs(layer.name))
                is_recomputed = self.graph.place(layer.name, "none").is_recomputed
                rows.append((layer.signature(), layer.block, layer.role, inputs, is_recomputed))
            signatures.append(tuple(rows))
        return tuple(signatures)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Per unit, the number of its kind: units of equal signatures are of one kind, numbered in order of appearance."""
        numbers: dict[Hashable, int] = {}
        return tuple(numbers.setdefault(signature, len(numbers)) for signature in self.signatures)

    def shape(self, first: int, stop: int) -> Shape:
        """The shape of the stage of units ``first`` to ``stop - 1``."""
        if (first, stop) not in self._shapes:
            runs = tuple((kind, len(list(units))) for kind, units in groupby(self.kinds[first:stop]))
            inside = range(self.starts[first], self.starts[stop])
            ties = tuple(pair for pair in self._tied_positions if (pair[0] in inside) != (pair[1] in inside))
            self._shapes[first, stop] = Shape(first == 0, stop == self.num_units, runs, ties)
        return self._shapes[first, stop]

    @cached_property
    def _shapes(self) -> dict[tuple[int, int], Shape]:
        return {}

    @cached_property
    def _tied_positions(self) -> tuple[tuple[int, int], ...]:
        position = {layer.name: i for i, layer in enumerate(self.graph.layers)}
        return tuple((position[owner], position[user]) for owner, user in self._ties)

    @cached_property
    def _ties(self) -> tuple[tuple[str, str], ...]:
        """(layer that owns the weight, layer that shares it) for every shared weight."""
        return tuple(
            (parameter.tied_to, layer.name)
            for layer in self.graph.layers
            for parameter in layer.parameters
            if parameter.tied_to is not None
        )

    @property
    def shares_weights(self) -> bool:
        """Whether any layers share a weight."""
        return bool(self._ties)

    def ends_of_ties(self) -> tuple[tuple[int, int], ...]:
        """For every shared weight, the two units that hold it, in ascending order."""
        unit_of = np.searchsorted(np.array(self.starts), np.arange(len(self.graph.layers)), side="right") - 1
        pairs = ((int(unit_of[owner]), int(unit_of[user])) for owner, user in self._tied_positions)
        return tuple((min(pair), max(pair)) for pair in pairs)

    @cached_property
    def without_inner_ties(self) -> Chain:
        """The chain without the weights that two units of a stage may share: the layers that own them keep them to themselves.

        So a layer costs at most what it costs in a stage of a pipeline, with the other layer or without it.  No such stage has both
        the first and the last unit.
        """
        ends = zip(self._ties, self.ends_of_ties())
        inner = {tie for tie, (a, b) in ends if a != b and (a, b) != (0, self.num_units - 1)}
        if not inner:
            return self
        layers = tuple(
            replace(layer, parameters=tuple(p for p in layer.parameters if (p.tied_to, layer.name) not in inner))
            for layer in self.graph.layers
        )
        return Chain(replace(self.graph, layers=layers), self.starts)

    def stage(self, first: int, stop: int) -> StageGraph:
        """Return the graph of the stage of units ``first`` to ``stop - 1``; the latest ones are kept."""
        if (first, stop) not in self._stages:
            if len(self._stages) == _MOST_KEPT_STAGES:
                self._stages.clear()
            self._stages[first, stop] = self._make_stage(first, stop)
        return self._stages[first, stop]

    @cached_property
    def _stages(self) -> dict[tuple[int, int], StageGraph]:
        return {}

    def _make_stage(self, first: int, stop: int) -> StageGraph:
        names = {layer.name for layer in self.layers(first, stop)}
        layers = tuple(_untied(layer, names) for layer in self.layers(first, stop))
        edges = [edge for edge in self.graph.edges if edge[1] in names]
        has_entry = first > 0
        if has_entry:
            producer = self.graph[next(source for source, _ in edges if source not in names)]
            entry = Layer(ENTRY, "add", input_shape=producer.output_shape, output_shape=producer.output_shape)
            layers = (entry, *layers)
            edges = [(source if source in names else ENTRY, target) for source, target in edges]
        shared = []
        for owner, user in self._ties:
            if (owner in names) != (user in names):
                shared.append((owner, user) if owner in names else (user, owner))
        name = f"{self.graph.name}[{first}:{stop}]"
        graph = LayerGraph(name, self.graph.sample, layers, tuple(edges), part_of=self.graph)
        return StageGraph(graph, has_entry, tuple(shared))


def _untied(layer: Layer, inside: set[str]) -> Layer:
    """A layer of a stage with its own copies of the weights that layers of other stages own."""
    if all(p.tied_to is None or p.tied_to in inside for p in layer.parameters):
        return layer
    parameters = tuple(
        p if p.tied_to is None or p.tied_to in inside else replace(p, tied_to=None) for p in layer.parameters
    )
    return replace(layer, parameters=parameters)


def _changes_shape(graph: LayerGraph) -> bool:
    """Whether convolutions that belong to no repeated block come after one, as those that change the shape of the image do."""
    first = next(number for number, layer in enumerate(graph.layers) if layer.block)
    return any(layer.kind == "conv2d" and not layer.block for layer in graph.layers[first:])


def chain_of(graph: LayerGraph) -> Chain:
    """Divide a model into a chain of units (see the module's docstring).  A model that cannot be cut is one unit.

    >>> from autoddl.zoo import resolve_model
    >>> chain = chain_of(resolve_model("gpt:4x256", heads=4, sequence=64, vocabulary=512))
    >>> chain.num_units, chain.kinds
    (4, (0, 1, 1, 2))
    """
    layers = graph.layers
    position = {layer.name: i for i, layer in enumerate(layers)}
    last_use = list(range(len(layers)))
    for source, target in graph.edges:
        last_use[position[source]] = max(last_use[position[source]], position[target])
    ends = Counter(last_use)
    cuts_at_blocks = any(layer.block and layer.block_index > 0 for layer in layers) and not _changes_shape(graph)
    starts, num_crossing = [0], 0
    for cut in range(1, len(layers)):
        # Outputs that cross the cut: that of the layer before it is new, those whose last use is this layer no longer cross.
        num_crossing += 1 - ends[cut - 1]
        if num_crossing != 1:
            continue
        before, after = layers[cut - 1], layers[cut]
        begins_block = after.block != "" and (after.block, after.block_index) != (before.block, before.block_index)
        if cuts_at_blocks and not (begins_block and before.block):
            continue
        starts.append(cut)
    return Chain(graph, (*starts, len(layers)))
