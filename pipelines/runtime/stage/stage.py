"""One stage of a model on this rank: consecutive layers of a graph, ready to run at their strategies.

    between two layers    the redistribution of the edge, if the layouts differ; the consumer runs it
    inside a layer        gather, compute, scatter (:mod:`..layers`)

Every rank of the stage makes the same calls in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layerwork import is_in_recomputed_block, is_recomputed_alone
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.strategy import Strategy

from ..comm.layouts import Layout
from ..comm.moves import move_calls
from ..comm.moving import run_moves
from ..feeding import feeds_of, inputs_of
from ..images import images_of, images_of_tiles, pixel_rows, tile_rows
from ..layers import Body, build_body, build_feed
from ..load import load_oneflow
from ..operations import checkpoint
from ..recording import LayerRanks
from ..runningstats import RunningStatistics
from ..setting import Batch, LayerSetting
from ..shards import attach_weights
from ..statements import Call
from ..stepping import Stepper
from .model import PlannedModel, StageWeights
from .plan import check_input_shape, is_mirrored, local_shape, moved_tensor, source_layer, stored_rows, strategies_of

flow: Any = load_oneflow()

__all__ = ["ReadyLayer", "Stage", "rows_of", "samples_of"]

Tensor = Any


@dataclass(frozen=True)
class ReadyLayer:
    """A layer ready to run.

    Attributes:
        layer: The layer.
        strategy: Its strategy.
        producers: Names of the layers whose outputs it reads.
        body: Function that computes the layer's output from its inputs, its weights and the batch.
        weight_positions: Positions of the layer's weights in `StageWeights.stored`, in the order in which the body takes them.
    """

    layer: Layer
    strategy: Strategy
    producers: tuple[str, ...]
    body: Body
    weight_positions: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.layer.name


@dataclass(frozen=True)
class _Section:
    """Consecutive layers of a stage that are run together.

    Attributes:
        layers: The layers: those of a block that is recomputed as a whole, or a single one.
        inputs: Names of the layers outside of the section whose outputs it reads.
        output: Name of the layer whose output is read outside of the section.
        is_recomputed: Whether the section keeps only its inputs and weights, and its backward pass runs it again.
    """

    layers: tuple[ReadyLayer, ...]
    inputs: tuple[str, ...]
    output: str
    is_recomputed: bool


class Stage:
    """One stage of a model on this rank.

    Args:
        model: The whole model.
        number: Number of the stage.
        weights: Weights of all stages; see `PlannedModel.weights`.
        stepper: The ranks of the stage.

    Attributes:
        layers: Layers of the stage, in graph order.
        weights: Weights that the ranks of the stage store.
        stepper: The ranks of the stage.
        source: Name of the previous stage's layer whose output this stage receives; None in the first stage.
        feeds: For each layer that reads the data, the index of the model's input that it reads.
        statistics: Running statistics of batch norms with their layouts, by the path of the module.

    Raises:
        UserError: A layer cannot be run at its strategy. The message names the layer.
    """

    def __init__(self, model: PlannedModel, number: int, weights: Sequence[StageWeights], stepper: Stepper) -> None:
        plan, graph = model.stages[number], model.graph
        self.weights = weights[number]
        self.stepper = stepper
        self.source = source_layer(graph, model.stages, number)
        self.feeds = {name: index for name, index in feeds_of(graph, model.feeds).items() if name in plan.strategies}
        self._model = model
        self._recompute, self._attention = plan.recompute, plan.attention
        self._places = plan.places(graph)
        self._strategies = strategies_of(graph, model.stages, number)
        everything = {name: strategy for stage in model.stages for name, strategy in stage.strategies.items()}
        #: Whether the positions of all samples are in mirrored order.
        self.is_mirrored = is_mirrored(graph, everything)
        self.statistics: dict[str, tuple[RunningStatistics, Layout]] = {}
        self._known_moves: dict[tuple[str, str, int], tuple[Call, ...]] = {}
        self.layers = tuple(self._ready(layer) for layer in plan.layers(graph))
        #: What computes the data of layers from the arguments of the model.
        self._programs = {
            ready.name: build_feed(ready.layer, stepper, model.module)
            for ready in self.layers
            if ready.layer.program is not None and not kind_of(ready.layer.kind).is_opaque
        }
        self._sections = self._divided()
        # The mesh axes that divide the gradients of each layer's held weights.
        self._held_axes = {weight.layer: weight.layout.inner for weight in self.weights.stored.values()}

    def _divided(self) -> tuple[_Section, ...]:
        """Divide the layers into sections: each block that is recomputed is one, and so is every other layer.

        Raises:
            UserError: Several tensors leave a block that is recomputed.
        """

        def block_of(ready: ReadyLayer) -> object:
            layer = ready.layer
            return (layer.block, layer.block_index) if self._is_in_recomputed_block(layer) else ready.name

        sections = []
        for _, members in groupby(self.layers, key=block_of):
            layers = tuple(members)
            inside = {ready.name for ready in layers}
            inputs = tuple(dict.fromkeys(n for ready in layers for n in ready.producers if n not in inside))
            outside = [name for ready in self.layers if ready.name not in inside for name in ready.producers]
            outputs = [ready.name for ready in layers if ready.name in outside] or [layers[-1].name]
            if len(outputs) > 1:
                block = f"{layers[0].layer.block}.{layers[0].layer.block_index}"
                raise UserError(
                    f"block {block} cannot be recomputed: {' and '.join(outputs)} leave it, should be one tensor; "
                    "plan with recompute='layers'"
                )
            sections.append(_Section(layers, inputs, outputs[0], self._is_in_recomputed_block(layers[0].layer)))
        return tuple(sections)

    def _ready(self, layer: Layer) -> ReadyLayer:
        strategy, graph = self._strategies[layer.name], self._model.graph
        stored = list(self.weights.stored.values())
        if not all(stored[position].is_trained for position in self.weights.positions[layer.name]):
            strategy = replace(strategy, zero=0, hybrid=False)  # frozen weights are not divided
        recompute = is_recomputed_alone(kind_of(layer.kind), self._places[layer.name], self._recompute)
        options = recompute, self._attention, self._is_in_recomputed_block(layer), self.is_mirrored
        setting = LayerSetting(graph, layer, strategy, self.stepper, self._model.module, *options, self.statistics)
        check_input_shape(graph, layer, strategy)
        positions = self.weights.positions[layer.name]
        return ReadyLayer(layer, strategy, graph.inputs(layer.name), build_body(setting), positions)

    # ---- Running -----------------------------------------------------------------------------------------------------

    @property
    def reads_arguments(self) -> bool:
        """Whether a layer of the stage reads an argument of the model."""
        programs = (program for ready in self.layers for program in ready.layer.programs)
        return bool(self.feeds) or self._reads_targets or any(program.reads_data for program in programs)

    @property
    def _reads_targets(self) -> bool:
        graph = self._model.graph
        return graph.reads_targets and graph.layers[-1].name == self.layers[-1].name

    def batch(self, arguments: Sequence[np.ndarray], num_samples: int, step: int | None) -> Batch:
        """Return the part of a micro-batch that the layers of the stage read, as a `Batch`.

        Args:
            arguments: All arguments of the model: inputs and targets. May be empty if no layer of the stage reads them.
            num_samples: Samples of the micro-batch, over all ranks.
            step: Number of the training pass, by which dropout draws its masks; None outside of training.
        """
        graph = self._model.graph
        inputs = arguments[:-1] if graph.reads_targets else arguments
        targets = arguments[-1] if self._reads_targets and arguments else None
        read = inputs_of(graph, self.feeds, inputs)
        for name, array in read.items():
            check_samples(graph[name], array, "input", num_samples, graph[name].input_shape)
        if targets is not None and graph.layers[-1].program is None:
            last = graph.layers[-1]
            rows = last.input_shape[:-1] if kind_of(last.kind).is_loss else last.output_shape
            check_samples(last, targets, "targets", num_samples, rows)
        read.update((name, feed(arguments, num_samples, step)) for name, feed in self._programs.items())
        return Batch(read, targets, num_samples, step, tuple(arguments))

    def run(self, x: Tensor | None, weights: Sequence[Tensor], batch: Batch) -> Tensor:
        """Run the stage forward and return the last layer's value: the loss, or this rank's part of the output.

        Args:
            x: This rank's part of the previous stage's output; None in the first stage.
            weights: What this rank computes with of each weight, in the order of `StageWeights.stored`: its part, its shard of the
                part, or a `HeldWeight`.
            batch: The micro-batch; see `batch`.
        """
        values = {} if self.source is None else {self.source: self.arrived(x, batch.num_samples)}
        num_readers = Counter(name for section in self._sections for name in section.inputs)
        for section in self._sections:
            inputs = [values[name] for name in section.inputs]
            values[section.output] = self._run_section(section, inputs, weights, batch)
            for name in section.inputs:
                num_readers[name] -= 1
                if not num_readers[name]:  # no later section reads it
                    del values[name]
        return values[self.layers[-1].name]

    def arrived(self, x: Tensor, samples: int) -> Tensor:
        """Return the previous stage's output, which may have a dimension for all rows, as (samples, rows, features)."""
        assert self.source is not None
        rows = stored_rows(self._model.graph[self.source].output_shape)
        shape = local_shape(rows, self._strategies[self.source], samples)
        return x if tuple(x.shape[:2]) == shape else samples_of(x, self._model.graph[self.source], shape)

    def run_layer(self, ready: ReadyLayer, inputs: Sequence[Tensor], weights: Sequence[Tensor], batch: Batch) -> Tensor:
        """Redistribute a layer's inputs from their producers' layouts, and return the layer's output.

        A layer of a block that is recomputed repeats both in its backward pass.
        """
        section = _Section((ready,), ready.producers, ready.name, self._is_in_recomputed_block(ready.layer))
        return self._run_section(section, inputs, weights, batch)

    def _is_in_recomputed_block(self, layer: Layer) -> bool:
        return is_in_recomputed_block(self._places[layer.name], self._recompute)

    def _run_section(
        self, section: _Section, inputs: Sequence[Tensor], weights: Sequence[Tensor], batch: Batch
    ) -> Tensor:
        """Run a section, and keep only its inputs if it is recomputed."""
        positions = tuple(dict.fromkeys(p for ready in section.layers for p in ready.weight_positions))

        def compute(*tensors: Tensor) -> Tensor:
            values = dict(zip(section.inputs, tensors))
            own = dict(zip(positions, tensors[len(section.inputs) :]))
            for ready in section.layers:
                arriving = [values[name] for name in ready.producers]
                values[ready.name] = self._run_alone(ready, arriving, own, batch)
            return values[section.output]

        tensors = (*inputs, *self._attached(section, weights, positions))
        return checkpoint(compute, *tensors) if section.is_recomputed else compute(*tensors)

    def _attached(self, section: _Section, weights: Sequence[Any], positions: Sequence[int]) -> list[Tensor]:
        """Return the weights of a section at the given positions, as tensors to compute with."""
        tensors: dict[int, Tensor] = {}
        for ready in section.layers:
            own = [position for position in ready.weight_positions if position not in tensors]
            axes = self._held_axes.get(ready.name, ())
            recorder = self.stepper.recorder
            ranks: Any = self.stepper if recorder is None else LayerRanks(self.stepper, recorder, ready.name)
            tensors.update(zip(own, attach_weights([weights[position] for position in own], axes, ranks)))
        return [tensors[position] for position in positions]

    def _run_alone(
        self, ready: ReadyLayer, inputs: Sequence[Tensor], weights: Mapping[int, Tensor], batch: Batch
    ) -> Tensor:
        """Redistribute a layer's inputs, and run the layer; ``weights`` are those of its section, by position."""
        recorder = self.stepper.recorder
        if recorder is not None:
            inputs = recorder.begin_layer(ready.name, inputs)
        arrived = []
        for name, x in zip(ready.producers, inputs):
            source = self._strategies[name]
            if source.rows_and_features != ready.strategy.rows_and_features:
                x = self._redistributed(x, name, ready, batch.num_samples)
            arrived.append(x)
        if len(arrived) == 1:
            shape = local_shape(stored_rows(ready.layer.input_shape), ready.strategy, batch.num_samples)
            arrived[0] = arrived[0] if tuple(arrived[0].shape[:2]) == shape else arrived[0].reshape(*shape, -1)
        y = ready.body(arrived, [weights[position] for position in ready.weight_positions], batch)
        if flow.is_grad_enabled() and not y.requires_grad and y.is_floating_point():
            # All parameters so far are frozen. The backward pass of what follows is priced, and run, as if they were not.
            y.requires_grad_(True)
        return y if recorder is None else recorder.end_layer(ready.name, y)

    def _redistributed(self, x: Tensor, producer: str, reader: ReadyLayer, samples: int) -> Tensor:
        """Redistribute a producer's output for a reader."""
        source, layer = self._strategies[producer], self._model.graph[producer]
        ends = source.rows_and_features, reader.strategy.rows_and_features
        shape, has_rows, has_tiles, dims = moved_tensor(layer, ends, samples)
        if has_rows:
            x = rows_of(x, layer, source, has_tiles)
        key = (producer, reader.name, samples)
        if key not in self._known_moves:
            route = redistribute(source.activations, reader.strategy.activations, shape)
            self._known_moves[key] = move_calls(route, tuple(x.shape), dims)
        x = run_moves(x, self._known_moves[key], self.stepper, dims)
        if not has_rows:
            return x
        return samples_of(x, layer, local_shape(stored_rows(layer.output_shape), reader.strategy, samples), has_tiles)


def check_samples(layer: Layer, array: np.ndarray, what: str, samples: int, shape: Sequence[int]) -> None:
    """Check that an array has as many elements as a layer reads.

    Raises:
        UserError: It has another number.
    """
    if array.size != samples * prod(shape):
        each = " x ".join(map(str, shape)) or "1"
        raise UserError(
            f"{layer.describe()}: {what} of shape {array.shape}, should have {samples} samples of {each} elements"
        )


def rows_of(x: Tensor, layer: Layer, strategy: Strategy, has_tiles: bool = False) -> Tensor:
    """Return this rank's part of a layer's output (samples, rows, features) as rows, or as pixels: (rows, 1, features).

    If columns of images are cut at one of the ends of a redistribution (``has_tiles``): (rows of pixels, channels, columns).
    """
    if len(layer.output_shape) < 3:
        return x.reshape(x.shape[0] * x.shape[1], 1, x.shape[2])
    channels = layer.output_shape[0] // (strategy.p1 * strategy.p2)
    return tile_rows(x, channels, layer.output_shape[2] // strategy.tiles[1]) if has_tiles else pixel_rows(x, channels)


def samples_of(x: Tensor, layer: Layer, shape: tuple[int, int], has_tiles: bool = False) -> Tensor:
    """Return the result of `rows_of`, in another layout, as (samples, rows, features); ``shape`` is that of samples and rows."""
    if len(layer.output_shape) < 3:
        return x.reshape(*shape, x.shape[2])
    return images_of_tiles(x, shape[0]) if has_tiles else images_of(x, shape[0])
