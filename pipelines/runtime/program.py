"""A layer graph that runs on the ranks: its layers at their strategies (:mod:`sequence`), and their parameters
(:mod:`parameters`), whose gradients are summed once all uses of a layer's weights have sent theirs back.

Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Distribution
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.sbp import Broadcast
from autoddl.costmodel.strategy import Strategy

from .layouts import ParameterLayout, common_mesh, mesh_between, parameter_layouts, split_dims
from .load import load_oneflow
from .moving import move_tensor
from .parameters import ParameterGroup, StoredParameter, parameter_groups
from .sequence import LayerSequence, ReadyLayer
from .setting import Batch
from .stepping import Stepper
from .userparameters import find_parameter, values_of

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["LocalWeights", "Program", "RunLayer"]

Tensor = Any


@dataclass(frozen=True)
class RunLayer(ReadyLayer):
    """A layer ready to run, with its weights.

    Attributes:
        groups: its own parameters, by the ranks that their gradients are summed over.
        weights: for each weight of the body the group that has it, and its place there.
    """

    groups: tuple[ParameterGroup, ...]
    weights: tuple[tuple[ParameterGroup, int], ...]


class Program:
    """A layer graph at its strategies.

    Args:
        module: the user's model; its parameters' values are copied.
        graph, strategies: what is to be run.
        stepper: the ranks.
        recompute: whether only evenly split inputs are kept for the backward pass.

    Attributes:
        layers: in order.
        sequence: what runs them.
        stored: the parameters, by the name under which they are stored.
        aliases: names of parameters that are another one.

    Raises:
        UserError: a layer cannot be run; it is named.
    """

    def __init__(
        self, module: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], stepper: Stepper, recompute: bool
    ):
        self.graph = graph
        self.stepper = stepper
        self.stored: dict[str, StoredParameter] = {}
        self.aliases: dict[str, str] = {}
        self.sequence = LayerSequence(module, graph, strategies, stepper, recompute)
        self._mesh = common_mesh(strategies.values(), stepper.num_ranks)
        self._values = values_of(module, stepper)
        self._places: dict[int, tuple[ParameterGroup, int]] = {}
        self._owned: dict[str, list[StoredParameter]] = {}
        self._by_tensor: dict[tuple[int, ...], StoredParameter] = {}
        self.layers = tuple(self._ready(module, layer) for layer in graph.layers)
        self._values.clear()  # the user's module has them

    # ---- Making ------------------------------------------------------------------------------------------------------

    def _ready(self, module: Any, layer: Layer) -> RunLayer:
        ready = self.sequence.ready(layer)
        places = self._parameters(module, layer, parameter_layouts(self.graph, layer, ready.strategy))
        groups = parameter_groups(self._owned[layer.name], self.stepper)
        for group in groups:
            self._places.update({id(stored): (group, i) for i, stored in enumerate(group.parameters)})
        weights = tuple(self._places[id(stored)] for stored in places)
        return RunLayer(layer, ready.strategy, ready.producers, ready.body, groups, weights)

    def _parameters(self, module: Any, layer: Layer, layouts: Sequence[ParameterLayout]) -> list[StoredParameter]:
        """The layer's parameters, in the order of ``layouts``; those that no layer before it has are stored now, as its own."""
        own = self._owned[layer.name] = []
        places = []
        for layout in layouts:
            key = tuple(id(find_parameter(module, name)) for name, _ in layout.sources)
            if key in self._by_tensor:
                stored = self._by_tensor[key]
                self._check_alike(layer, layout, stored)
                for (mine, _), (theirs, _) in zip(layout.sources, stored.layout.sources):
                    self.aliases[mine] = theirs
            else:
                if any(name not in self._values for name, _ in layout.sources):
                    raise UserError(f"{layer.describe()}: {layout.name} is stored in parts by the layers that share it")
                logical = np.concatenate([self._values[name].value for name, _ in layout.sources])
                trained = all(self._values[name].requires_grad for name, _ in layout.sources)
                stored = self._stored(layout, flow.tensor(logical[:0]).dtype, trained)
                stored.assign(logical)
                self.stored[layout.name] = self._by_tensor[key] = stored
                own.append(stored)
            places.append(stored)
        return places

    def _stored(self, layout: ParameterLayout, dtype: Any, trained: bool) -> StoredParameter:
        """On the mesh of all parameters or, where they have none in common, on as few axes as it needs."""
        mesh = self._mesh
        if mesh is None:
            mesh = mesh_between((axis for axes in layout.axes for axis in axes), self.stepper.num_ranks)
            assert mesh is not None, "the axes of one parameter are a mesh"
        sbp = [flow.sbp.broadcast if dim is None else flow.sbp.split(dim) for dim in split_dims(layout.axes, mesh)]
        placement = self.stepper.mesh(*(axis.size for axis in mesh))
        return StoredParameter(layout, self.stepper, placement, sbp or [flow.sbp.broadcast], dtype, trained)

    def _check_alike(self, layer: Layer, layout: ParameterLayout, stored: StoredParameter) -> None:
        """A weight that layers share is stored once: it has to lie alike in all of them."""
        for mine, theirs in zip(layout.indices, stored.layout.indices):
            if not all(np.array_equal(a, b) for a, b in zip(mine, theirs)):
                raise UserError(
                    f"{layer.describe()}: {self.sequence.strategies[layer.name]} puts {layout.name} elsewhere than it is as "
                    f"{stored.layout.name}, whose weight it shares"
                )

    # ---- Running -----------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, is_summing: bool) -> Tensor:
        """The last layer's value: a loss, or a rank's part of the output.

        Args:
            is_summing: whether gradients are to be summed over the ranks, or collected by each of them.
        """
        return self.sequence.run(self.layers, {}, LocalWeights(is_summing).of, batch)

    def whole(self, value: Tensor, samples: int) -> Tensor:
        """The model's output, gathered on every rank; of its gradient, the same on every rank, each takes its part."""
        last = self.layers[-1]
        lying = last.strategy.activations
        shape = edge_shape(last.layer, samples)
        everywhere = Distribution(lying.axes, (Broadcast(),) * len(lying.axes))
        route = redistribute(lying, everywhere, shape)
        part = lying.slices(self.stepper.rank, shape)

        def forward(ctx: Any, x: Tensor) -> Tensor:
            return move_tensor(x, route, self.stepper, (0, 2)).clone()

        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy[part[0], :, part[1]].contiguous()

        whole = _Function.apply("whole", forward, backward, value)
        per_sample = last.layer.output_shape
        # Outside of sequences the one row of a sample is the sample itself.
        return whole.reshape(
            samples, *(per_sample[1:] if len(per_sample) == 2 and last.layer.rows == 1 else per_sample)
        )


class LocalWeights:
    """The local weights of one forward pass: a group's are made once, however many layers use them."""

    def __init__(self, is_summing: bool):
        self._is_summing = is_summing
        self._made: dict[int, tuple[Tensor, ...]] = {}

    def of(self, ready: RunLayer) -> tuple[Tensor, ...]:
        """Those of a layer, in the order of its body."""
        found = []
        for group, index in ready.weights:
            if id(group) not in self._made:
                self._made[id(group)] = group.summed() if self._is_summing else group.unsummed()
            found.append(self._made[id(group)][index])
        return tuple(found)
