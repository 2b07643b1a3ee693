"""A stage of a model on this rank: consecutive layers of a graph, ready to run at their strategies.

    between layers    the redistribution of each edge that changes p0, at the consumer
    inside            gather, compute, scatter, as :mod:`..layers` has them

Every rank of the stage makes the same calls in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.strategy import Strategy

from ..feeding import feeds_of, inputs_of
from ..layers import Body, build_body
from ..moves import move_calls
from ..moving import run_moves
from ..setting import Batch, LayerSetting
from ..statements import Call
from ..stepping import Stepper
from .model import PlannedModel, StageWeights
from .plan import given_layer, strategies_of

__all__ = ["ReadyLayer", "Stage"]

Tensor = Any


@dataclass(frozen=True)
class ReadyLayer:
    """A layer ready to run.

    Attributes:
        layer, strategy: what it is.
        producers: the layers that it reads.
        body: what it does.
        places: of its weights, in the order of its body, among those of the stage.
    """

    layer: Layer
    strategy: Strategy
    producers: tuple[str, ...]
    body: Body
    places: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.layer.name


class Stage:
    """One stage of a model on this rank.

    Args:
        model: of which this is stage ``number``.
        weights: of all stages, see `PlannedModel.weights`.
        stepper: the ranks of the stage.

    Attributes:
        layers: in order.
        weights: what the ranks store.
        given: the layer that the stage before gives; None in the first one.
        feeds: which input each layer that reads the data reads.

    Raises:
        UserError: a layer cannot be run at its strategy; it is named.
    """

    def __init__(self, model: PlannedModel, number: int, weights: Sequence[StageWeights], stepper: Stepper) -> None:
        plan, graph = model.stages[number], model.graph
        self.weights = weights[number]
        self.stepper = stepper
        self.given = given_layer(graph, model.stages, number)
        self.feeds = {name: which for name, which in feeds_of(graph, model.feeds).items() if name in plan.strategies}
        self._model = model
        self._recompute = plan.recompute
        self._strategies = strategies_of(graph, model.stages, number)
        self._known_moves: dict[tuple[str, str, int], tuple[Call, ...]] = {}
        self.layers = tuple(self._ready(layer) for layer in plan.layers(graph))

    def _ready(self, layer: Layer) -> ReadyLayer:
        strategy, graph = self._strategies[layer.name], self._model.graph
        recompute = self._recompute and kind_of(layer.kind).is_recomputed
        setting = LayerSetting(graph, layer, strategy, self.stepper, self._model.module, recompute)
        _check_edges(setting)
        places = self.weights.places[layer.name]
        return ReadyLayer(layer, strategy, graph.inputs(layer.name), build_body(setting), places)

    # ---- Running -----------------------------------------------------------------------------------------------------

    def batch(
        self, inputs: Sequence[np.ndarray], targets: np.ndarray | None, num_samples: int, step: int | None
    ) -> Batch:
        """What the layers are given of a micro-batch; see `Batch`.

        Args:
            inputs: the model's; none where no layer of the stage reads them.
        """
        return Batch(inputs_of(self._model.graph, self.feeds, inputs), targets, num_samples, step)

    def run(self, x: Tensor | None, weights: Sequence[Tensor], batch: Batch) -> Tensor:
        """The last layer's value: a loss, or a rank's part of the output.

        Args:
            x: this rank's part of what the stage before gives; None in the first one.
            weights: the local ones, in the order of ``weights.stored``.
        """
        values = {} if self.given is None else {self.given: x}
        num_readers = Counter(name for ready in self.layers for name in ready.producers)
        for ready in self.layers:
            values[ready.name] = self.run_layer(ready, [values[name] for name in ready.producers], weights, batch)
            for name in ready.producers:
                num_readers[name] -= 1
                if not num_readers[name]:
                    del values[name]
        return values[self.layers[-1].name]

    def run_layer(self, ready: ReadyLayer, inputs: Sequence[Tensor], weights: Sequence[Tensor], batch: Batch) -> Tensor:
        """What a layer makes of its inputs as their producers made them."""
        arrived = []
        for name, x in zip(ready.producers, inputs):
            source = self._strategies[name]
            if source.rows_and_features != ready.strategy.rows_and_features:
                x = run_moves(x, self._moves(name, ready, batch.num_samples, tuple(x.shape)), self.stepper)
            arrived.append(x)
        if len(arrived) == 1:
            arrived[0] = _as_rows(arrived[0], ready.layer)
        return ready.body(arrived, [weights[place] for place in ready.places], batch)

    def _moves(self, name: str, ready: ReadyLayer, samples: int, local: tuple[int, ...]) -> tuple[Call, ...]:
        """The statements that bring a layer's output to a reader."""
        key = (name, ready.name, samples)
        if key not in self._known_moves:
            shape = edge_shape(self._model.graph[name], samples)
            route = redistribute(self._strategies[name].activations, ready.strategy.activations, shape)
            self._known_moves[key] = move_calls(route, local)
        return self._known_moves[key]


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
