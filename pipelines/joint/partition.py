"""Where a model can be cut, and what a stage of it is as a layer graph of its own.

**Units.**  The layers, in the order of the graph, are cut where the tensor of a single layer crosses; in a model of repeated blocks
at the beginnings of the repetitions alone.  What stands before the first cut and behind the last one (embedding and head) belongs
to the first and the last unit.  A stage is a run of units.

**A stage's graph** has its layers and, in front, a layer :data:`ENTRY` that stands for the tensor that arrives: a sum without
inputs, which costs the same in every layout and keeps nothing, so that it changes no decision; its strategy is the layout in which
the tensor is wanted.  A weight that is shared with a layer of another stage is a copy here, trained with the gradients of both.
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

#: The name of the layer that stands for the tensor from the stage before.
ENTRY = "(entry)"


@dataclass(frozen=True)
class StageGraph:
    """A run of units as a layer graph.

    Attributes:
        graph: its layers, and the entry in front where it is not the first stage.
        has_entry: whether it is not the first stage.
        shared: for each layer here that shares a weight with another stage: (layer here, layer there).
    """

    graph: LayerGraph
    has_entry: bool
    shared: tuple[tuple[str, str], ...]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Without the entry."""
        return self.graph.layers[1:] if self.has_entry else self.graph.layers

    @property
    def exit(self) -> Layer:
        """The layer whose output the next stage takes."""
        return self.graph.layers[-1]

    @property
    def entry(self) -> Layer | None:
        """What stands for the tensor from the stage before."""
        return self.graph.layers[0] if self.has_entry else None


@dataclass(frozen=True)
class Shape:
    """What equal stages have in common.

    Attributes:
        is_first, is_last: whether it begins, or ends, the model.
        runs: the kinds of its units, as runs of (kind, how many).
        shared: positions of the layers whose weights it shares with other stages.
    """

    is_first: bool
    is_last: bool
    runs: tuple[tuple[int, int], ...]
    shared: tuple[tuple[int, int], ...]

    def pattern(self) -> tuple[Hashable, int] | None:
        """What it has in common with stages that repeat one kind of unit more or less often, and how often it does.

        None where there is no such unit, or several different ones.
        """
        inner = self.runs[int(self.is_first) : len(self.runs) - int(self.is_last)]
        if len(inner) != 1:
            return None
        kind, count = inner[0]
        return (self.is_first, self.is_last, self.runs[0][0], self.runs[-1][0], kind, self.shared), count


@dataclass(frozen=True)
class Chain:
    """A model as a chain of units.

    Attributes:
        graph: the model.
        starts: the position of each unit's first layer, and the number of layers at the end.
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
    def entering(self) -> np.ndarray:
        """Elements of one sample of the tensor that crosses before each unit, 0 before the first and behind the last one; shape
        (units + 1,)."""
        inner = [self.graph.layers[start - 1].output_elements for start in self.starts[1:-1]]
        return np.array([0, *inner, 0], dtype=float)

    @cached_property
    def signatures(self) -> tuple[Hashable, ...]:
        """Per unit what decides on its costs: equal units are alike."""
        position = {layer.name: i for i, layer in enumerate(self.graph.layers)}
        found = []
        for unit, start in enumerate(self.starts[:-1]):
            rows = []
            for layer in self.layers(unit, unit + 1):
                inputs = tuple(max(-1, position[name] - start) for name in self.graph.inputs(layer.name))
                rows.append((layer.signature(), layer.block, layer.role, inputs))
            found.append(tuple(rows))
        return tuple(found)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Per unit a number that equal units share, counted from 0 in the order of their first."""
        numbers: dict[Hashable, int] = {}
        return tuple(numbers.setdefault(signature, len(numbers)) for signature in self.signatures)

    def shape(self, first: int, stop: int) -> Shape:
        """What two stages have in common that cost the same."""
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
        """(owner, user) of every shared weight."""
        return tuple(
            (parameter.tied_to, layer.name)
            for layer in self.graph.layers
            for parameter in layer.parameters
            if parameter.tied_to is not None
        )

    @property
    def shares_weights(self) -> bool:
        """Whether layers share a weight (which may then come into different stages)."""
        return bool(self._ties)

    def ends_of_ties(self) -> tuple[tuple[int, int], ...]:
        """Of every shared weight the first and the last unit that hold it."""
        unit_of = np.searchsorted(np.array(self.starts), np.arange(len(self.graph.layers)), side="right") - 1
        return tuple(tuple(sorted(int(unit_of[place]) for place in pair)) for pair in self._tied_positions)  # type: ignore[misc]

    def stage(self, first: int, stop: int) -> StageGraph:
        """Units ``first`` to ``stop - 1`` as a graph of their own."""
        layers = self.layers(first, stop)
        inside = {layer.name for layer in layers}
        own = tuple(_untied(layer, inside) for layer in layers)
        edges = [edge for edge in self.graph.edges if edge[1] in inside]
        has_entry = first > 0
        if has_entry:
            producer = next(source for source, _ in edges if source not in inside)
            made = self.graph[producer]
            entry = Layer(ENTRY, "add", input_shape=made.output_shape, output_shape=made.output_shape)
            own = (entry, *own)
            edges = [(source if source in inside else ENTRY, target) for source, target in edges]
        shared = []
        for owner, user in self._ties:
            if (owner in inside) != (user in inside):
                shared.append((owner, user) if owner in inside else (user, owner))
        graph = LayerGraph(f"{self.graph.name}[{first}:{stop}]", self.graph.sample, own, tuple(edges))
        return StageGraph(graph, has_entry, tuple(shared))


def _untied(layer: Layer, inside: set[str]) -> Layer:
    if all(p.tied_to is None or p.tied_to in inside for p in layer.parameters):
        return layer
    parameters = tuple(
        p if p.tied_to is None or p.tied_to in inside else replace(p, tied_to=None) for p in layer.parameters
    )
    return replace(layer, parameters=parameters)


def chain_of(graph: LayerGraph) -> Chain:
    """The model as a chain of units (see the module's docstring); a model that cannot be cut is one unit."""
    layers = graph.layers
    position = {layer.name: i for i, layer in enumerate(layers)}
    last_use = list(range(len(layers)))
    for source, target in graph.edges:
        last_use[position[source]] = max(last_use[position[source]], position[target])
    ends = Counter(last_use)
    has_blocks = any(layer.block and layer.block_index > 0 for layer in layers)
    starts, alive = [0], 0
    for cut in range(1, len(layers)):
        # Alive across the cut: the layer before it, if it is used, and what was alive before and is used from here on.
        alive += 1 - ends[cut - 1]
        if alive != 1:
            continue
        before, after = layers[cut - 1], layers[cut]
        begins = after.block != "" and (after.block, after.block_index) != (before.block, before.block_index)
        if has_blocks and not (begins and before.block):
            continue
        starts.append(cut)
    return Chain(graph, (*starts, len(layers)))
