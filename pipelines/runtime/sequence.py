"""Consecutive layers of a graph, ready to run at their strategies: a whole model, or a stage of one.

    between layers    the redistribution of each edge that changes p0, at the consumer
    inside            gather, compute, scatter, as :mod:`layers` has them

Every rank of the stepper makes the same calls in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.strategy import Strategy

from .layers import Body, build_body
from .load import load_oneflow
from .moves import move_calls
from .moving import moved
from .setting import Batch, LayerSetting
from .statements import Call
from .stepping import Stepper

flow = load_oneflow()

__all__ = ["LayerSequence", "ReadyLayer"]

Tensor = Any


@dataclass(frozen=True)
class ReadyLayer:
    """A layer ready to run.

    Attributes:
        layer, strategy: what it is.
        producers: the layers that it reads.
        body: what it does.
    """

    layer: Layer
    strategy: Strategy
    producers: tuple[str, ...]
    body: Body

    @property
    def name(self) -> str:
        return self.layer.name


Ready = TypeVar("Ready", bound=ReadyLayer)


class LayerSequence:
    """Makes layers ready, and runs them.

    Args:
        module: the user's model.
        graph: all of its layers.
        strategies: of the layers to run, and of those that they read.
        stepper: the ranks.
        recompute: whether only evenly split inputs are kept for the backward pass.
    """

    def __init__(
        self, module: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], stepper: Stepper, recompute: bool
    ):
        self.graph = graph
        self.strategies = dict(strategies)
        self.stepper = stepper
        self._module = module
        self._recompute = recompute
        self._known_moves: dict[tuple[str, str, int], tuple[Call, ...]] = {}

    def ready(self, layer: Layer) -> ReadyLayer:
        """A layer made ready.

        Raises:
            UserError: it cannot be run at its strategy; it is named.
        """
        strategy = self.strategies[layer.name]
        if not strategy.divides(layer):
            raise UserError(f"{layer.describe()}: {strategy} does not divide its shape")
        recompute = self._recompute and kind_of(layer.kind).is_recomputed
        setting = LayerSetting(self.graph, layer, strategy, self.stepper, self._module, recompute)
        _check_edges(setting)
        return ReadyLayer(layer, strategy, self.graph.inputs(layer.name), build_body(setting))

    def run(
        self,
        layers: Sequence[Ready],
        values: Mapping[str, Tensor],
        weights_of: Callable[[Ready], Sequence[Tensor]],
        batch: Batch,
    ) -> Tensor:
        """The last layer's value: a loss, or a rank's part of the output.

        Args:
            layers: in order.
            values: this rank's parts of what they read from layers that are not among them.
            weights_of: the local weights of a layer, in the order of its body.
        """
        known = dict(values)
        left = _num_readers(layers)
        for ready in layers:
            inputs = self.arriving(ready, [known[name] for name in ready.producers], batch.num_samples)
            known[ready.name] = ready.body(inputs, weights_of(ready), batch)
            for name in ready.producers:
                left[name] -= 1
                if not left[name]:
                    del known[name]
        return known[layers[-1].name]

    def arriving(self, ready: ReadyLayer, inputs: Sequence[Tensor], samples: int) -> list[Tensor]:
        """Inputs, as their producers made them, at the layouts and in the shapes that a layer wants."""
        arrived = []
        for name, x in zip(ready.producers, inputs):
            source = self.strategies[name]
            if source.rows_and_features != ready.strategy.rows_and_features:
                x = moved(x, self._moves(name, ready, samples, tuple(x.shape)), self.stepper)
            arrived.append(x)
        if len(arrived) == 1:
            arrived[0] = _as_rows(arrived[0], ready.layer)
        return arrived

    def _moves(self, name: str, ready: ReadyLayer, samples: int, local: tuple[int, ...]) -> tuple[Call, ...]:
        """The statements that bring a layer's output to a reader."""
        key = (name, ready.name, samples)
        if key not in self._known_moves:
            shape = edge_shape(self.graph[name], samples)
            route = redistribute(self.strategies[name].activations, ready.strategy.activations, shape)
            self._known_moves[key] = move_calls(route, local)
        return self._known_moves[key]


def _num_readers(layers: Iterable[ReadyLayer]) -> Counter[str]:
    return Counter(name for ready in layers for name in ready.producers)


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
