"""A layer graph that runs on the ranks: its layers at their strategies, and their parameters.

    between layers    the redistribution of each edge that changes p0, at the consumer
    inside            gather, compute, scatter, as :mod:`layers` has them
    parameters        :mod:`parameters`: gradients are summed once all uses of a layer's weights have sent theirs back

Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis, Distribution
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.sbp import Broadcast
from autoddl.costmodel.strategy import Strategy

from .layers import Body, build_body
from .layouts import ParameterLayout, parameter_layouts
from .load import load_oneflow
from .moving import move_tensor
from .parameters import ParameterGroup, StoredParameter, common_mesh
from .setting import Batch, LayerSetting
from .stepping import Stepper
from .userparameters import find_parameter, values_of

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["LocalWeights", "Program", "RunLayer"]

Tensor = Any


@dataclass(frozen=True)
class RunLayer:
    """A layer ready to run.

    Attributes:
        layer, strategy: what it is.
        producers: the layers that it reads.
        body: what it does.
        groups: its own parameters, by the ranks that their gradients are summed over.
        weights: for each weight of the body the group that has it, and its place there.
    """

    layer: Layer
    strategy: Strategy
    producers: tuple[str, ...]
    body: Body
    groups: tuple[ParameterGroup, ...]
    weights: tuple[tuple[ParameterGroup, int], ...]

    @property
    def name(self) -> str:
        return self.layer.name


class Program:
    """A layer graph at its strategies.

    Args:
        module: the user's model; its parameters' values are copied.
        graph, strategies: what is to be run.
        stepper: the ranks.
        recompute: whether only evenly split inputs are kept for the backward pass.

    Attributes:
        layers: in order.
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
        self._strategies = dict(strategies)
        self._mesh = common_mesh(self._strategies.values(), stepper.num_ranks)
        self._values = values_of(module, stepper)
        self._places: dict[int, tuple[ParameterGroup, int]] = {}
        self._owned: dict[str, list[StoredParameter]] = {}
        self._by_tensor: dict[tuple[int, ...], StoredParameter] = {}
        self.layers = tuple(self._ready(module, layer, recompute) for layer in graph.layers)
        self._values.clear()  # the user's module has them
        self._num_readers: dict[str, int] = {}
        for source, _ in graph.edges:
            self._num_readers[source] = self._num_readers.get(source, 0) + 1

    # ---- Making ------------------------------------------------------------------------------------------------------

    def _ready(self, module: Any, layer: Layer, recompute: bool) -> RunLayer:
        strategy = self._strategies[layer.name]
        if not strategy.divides(layer):
            raise UserError(f"{layer.describe()}: {strategy} does not divide its shape")
        setting = LayerSetting(self.graph, layer, strategy, self.stepper, module, recompute and layer.kind != "loss")
        _check_edges(setting)
        places = self._parameters(module, layer, parameter_layouts(self.graph, layer, strategy))
        by_axes: dict[tuple[Axis, ...], list[StoredParameter]] = {}
        for stored in self._owned[layer.name]:
            by_axes.setdefault(stored.layout.reduced, []).append(stored)
        groups = tuple(ParameterGroup(members, axes, self.stepper) for axes, members in by_axes.items())
        for group in groups:
            self._places.update({id(stored): (group, i) for i, stored in enumerate(group.parameters)})
        weights = tuple(self._places[id(stored)] for stored in places)
        return RunLayer(layer, strategy, self.graph.inputs(layer.name), build_body(setting), groups, weights)

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
                stored = StoredParameter(layout, logical, self._mesh, self.stepper, trained)
                self.stored[layout.name] = self._by_tensor[key] = stored
                own.append(stored)
            places.append(stored)
        return places

    def _check_alike(self, layer: Layer, layout: ParameterLayout, stored: StoredParameter) -> None:
        """A weight that layers share is stored once: it has to lie alike in all of them."""
        for mine, theirs in zip(layout.indices, stored.layout.indices):
            if not all(np.array_equal(a, b) for a, b in zip(mine, theirs)):
                raise UserError(
                    f"{layer.describe()}: {self._strategies[layer.name]} puts {layout.name} elsewhere than it is as "
                    f"{stored.layout.name}, whose weight it shares"
                )

    # ---- Running -----------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, is_summing: bool) -> Tensor:
        """The last layer's value: a loss, or a rank's part of the output.

        Args:
            is_summing: whether gradients are to be summed over the ranks, or collected by each of them.
        """
        weights = LocalWeights(is_summing)
        values: dict[str, Tensor] = {}
        left = dict(self._num_readers)
        for ready in self.layers:
            inputs = self.arriving(ready, [values[name] for name in ready.producers], batch.num_samples)
            values[ready.name] = ready.body(inputs, weights.of(ready), batch)
            for name in ready.producers:
                left[name] -= 1
                if not left[name]:
                    del values[name]
        return values[self.layers[-1].name]

    def arriving(self, ready: RunLayer, inputs: Sequence[Tensor], samples: int) -> list[Tensor]:
        """Inputs, as their producers made them, at the layouts and in the shapes that a layer wants."""
        arrived = []
        for name, x in zip(ready.producers, inputs):
            source = self._strategies[name]
            if source.rows_and_features != ready.strategy.rows_and_features:
                shape = edge_shape(self.graph[name], samples)
                route = redistribute(source.activations, ready.strategy.activations, shape)
                x = move_tensor(x, route, self.stepper, (0, 2))
            arrived.append(x)
        if len(arrived) == 1:
            arrived[0] = _as_rows(arrived[0], ready.layer)
        return arrived

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


def _check_edges(setting: LayerSetting) -> None:
    layer, graph = setting.layer, setting.graph
    producers = graph.inputs(layer.name)
    if len(producers) != 1 or setting.num_parts == 1:
        return
    given = graph[producers[0]].output_shape
    if len(given) <= 2 and len(layer.input_shape) <= 2 and given[-1:] != layer.input_shape[-1:]:
        raise UserError(
            f"{layer.describe()}: it reads {producers[0]!r} in another shape, {layer.input_shape} in place of {given}; "
            "that works where features are not split only"
        )


def _as_rows(x: Tensor, layer: Layer) -> Tensor:
    """(samples, rows, features) with the rows that the layer wants."""
    shape = layer.input_shape
    rows = int(np.prod(shape[:-1])) if len(shape) <= 2 else 1
    return x if x.shape[1] == rows else x.reshape(x.shape[0], rows, -1)
