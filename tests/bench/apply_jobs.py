"""What the ranks do in `bench_apply`: a plan by our layouts, and the same plan by plain ``to_global``.

By plain ``to_global`` a plan is what its table says, written down in OneFlow: every layer's input, weight and output are global
tensors with the nd-SBP of the paper's table on the mesh of its strategy (axes of length 1 left out), and OneFlow brings each from
one to the next.  What has no product runs where the table puts it too: samples over p0, features over the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Distribution
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.sbp import PartialSum, Split
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import initialize
from autoddl.pipelines.runtime.ranks.wire import measure, measure_baseline, synchronize
from autoddl.zoo.builtin import BuiltIn
from autoddl.zoo.modules import build_module, make_batch

flow: Any = load_oneflow()
functional: Any = flow.nn.functional
Tensor = Any


def run_ours(built_in: BuiltIn, graph: LayerGraph, strategies: Mapping[str, Strategy], samples: int, repeats: int):
    applied = AppliedModule(initialize(build_module(built_in), 0), graph, strategies, Workload(samples, samples))
    data = make_batch(built_in, samples, np.random.default_rng(0))

    def step() -> float:
        for parameter in applied.parameters():
            parameter.grad = None
        return applied.train_step(*data)

    return _measured(step, repeats)


def run_plain(built_in: BuiltIn, graph: LayerGraph, strategies: Mapping[str, Strategy], samples: int, repeats: int):
    model = PlainGlobal(built_in, graph, strategies)
    data = make_batch(built_in, samples, np.random.default_rng(0))

    def step() -> float:
        for weight in model.weights.values():
            weight.grad = None
        loss = model.loss(*data)
        loss.backward()
        return float(loss.to_local().numpy())

    return _measured(step, repeats)


def _measured(step: Callable[[], float], repeats: int) -> dict[str, Any]:
    """The loss, the bytes that all ranks send in a step, and the seconds of each repetition."""
    loss = step()
    _, traffic = measure(step, measure_baseline())
    seconds = []
    for _ in range(repeats):
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return {"loss": loss, "bytes": traffic.payload_bytes, "seconds": seconds}


class PlainGlobal:
    """A perceptron or a GPT on global tensors."""

    def __init__(self, built_in: BuiltIn, graph: LayerGraph, strategies: Mapping[str, Strategy]):
        self.graph, self.strategies = graph, strategies
        module = initialize(build_module(built_in), 0)
        values = dict(module.named_parameters())
        self.weights: dict[str, Tensor] = {}
        for layer in graph.layers:
            for parameter in layer.parameters:
                if parameter.tied_to is None:
                    weight = self._placed(values[parameter.name], *self._weight_layout(layer, parameter.name))
                    self.weights[parameter.name] = weight.detach().requires_grad_(True)
        self.owners = {layer.name: layer.parameters[0].name for layer in graph.layers if layer.parameters}

    def loss(self, inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        values: dict[str, Tensor] = {}
        for layer in self.graph.layers:
            arguments = [values[name] for name in self.graph.inputs(layer.name)]
            values[layer.name] = getattr(self, f"_{layer.kind}")(layer, arguments, inputs, targets)
        last = values[self.graph.layers[-1].name]
        return last.to_global(sbp=[flow.sbp.broadcast] * len(last.sbp))

    # ---- Layouts ---------------------------------------------------------------------------------------------------------

    def _mesh(self, distribution: Distribution) -> tuple[Any, list[Any]]:
        """Placement and SBP of a distribution in rank order."""
        axes = [(axis.size, state) for axis, state in zip(distribution.axes, distribution.states) if axis.size > 1]
        ranks = np.arange(distribution.num_ranks).reshape([size for size, _ in axes] or [1])
        states = [
            flow.sbp.split(state.dim)
            if isinstance(state, Split)
            else flow.sbp.partial_sum
            if isinstance(state, PartialSum)
            else flow.sbp.broadcast
            for _, state in axes
        ]
        return flow.placement("cpu", ranks.tolist()), states or [flow.sbp.broadcast]

    def _activation_layout(self, layer: Layer, which: str) -> tuple[Any, list[Any]]:
        """The table's, features being the last of three dimensions; "between": after the reduction over p2."""
        layouts = self.strategies[layer.name].sbp(layer)
        distribution = layouts["output" if which == "between" else which]
        assert distribution is not None
        placement, states = self._mesh(distribution)
        moved = []
        for state in states:
            if which == "between" and state == flow.sbp.partial_sum:
                state = flow.sbp.split(1)
            moved.append(flow.sbp.split(2) if state == flow.sbp.split(1) else state)
        return placement, moved

    def _weight_layout(self, layer: Layer, name: str) -> tuple[Any, list[Any]]:
        distribution = self.strategies[layer.name].sbp(layer)["weight"]
        assert distribution is not None
        placement, states = self._mesh(distribution)
        if layer.kind == "linear":  # OneFlow keeps weights as (out, in); a bias lies like the rows
            swapped = {flow.sbp.split(0): flow.sbp.split(1), flow.sbp.split(1): flow.sbp.split(0)}
            states = [swapped.get(state, state) for state in states]
            if name.endswith("bias"):
                states = [flow.sbp.broadcast if state == flow.sbp.split(1) else state for state in states]
        elif layer.kind == "position":
            states = [flow.sbp.split(1) if state == flow.sbp.split(1) else state for state in states]
        return placement, states

    def _placed(self, value: Tensor, placement: Any, states: list[Any]) -> Tensor:
        """A value that every rank has."""
        everywhere = [flow.sbp.broadcast] * len(states)
        return value.detach().to_global(placement=placement, sbp=everywhere).to_global(sbp=states)

    def _moved(self, x: Tensor, layer: Layer, which: str) -> Tensor:
        placement, states = self._activation_layout(layer, which)
        return x.to_global(placement=placement, sbp=states)

    def _data(self, value: np.ndarray, layer: Layer, which: str = "input") -> Tensor:
        placement, states = self._activation_layout(layer, which)
        states = [state if state == flow.sbp.split(0) else flow.sbp.broadcast for state in states]
        return self._placed(flow.tensor(value), placement, states)

    # ---- Layers --------------------------------------------------------------------------------------------------------------

    def _linear(self, layer: Layer, arguments: list[Tensor], inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        if arguments:
            x = self._moved(arguments[0], layer, "input")
        else:
            placement, states = self._activation_layout(layer, "input")
            x = self._placed(flow.tensor(inputs[:, None, :]), placement, states)
        parameter = layer.parameters[0]
        weight = self.weights[self.owners[parameter.tied_to] if parameter.tied_to else parameter.name]
        if parameter.tied_to:
            weight = weight.to_global(*self._weight_layout(layer, "weight"))
        y = self._moved(flow.matmul(x, weight, transpose_b=True), layer, "between")
        if len(layer.parameters) > 1:
            y = y + self.weights[layer.parameters[1].name]
        for operation in layer.epilogue:
            if operation == "mse_loss":
                target = self._moved(self._data(targets[:, None, :], layer, "between"), layer, "between")
                return functional.mse_loss(y, target)
            y = getattr(functional, operation)(y)
        return y

    def _embedding(self, layer: Layer, arguments: list[Tensor], inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        tokens = self._data(inputs, layer)
        x = functional.embedding(tokens, self.weights[layer.parameters[0].name])
        return self._moved(x, layer, "between")

    def _position(self, layer: Layer, arguments: list[Tensor], inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        return self.weights[layer.parameters[0].name][: layer.rows].unsqueeze(0)

    def _add(self, layer: Layer, arguments: list[Tensor], inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        first, second = arguments
        if second.shape[0] == 1:  # positions, the same for every sample
            placement, states = self._activation_layout(layer, "between")
            first = self._moved(first, layer, "between")
            states = [flow.sbp.broadcast if state == flow.sbp.split(0) else state for state in states]
            return first + second.to_global(placement=placement, sbp=states)
        return self._moved(first, layer, "between") + self._moved(second, layer, "between")

    def _norm(self, layer: Layer, arguments: list[Tensor], inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        x = self._moved(arguments[0], layer, "input")
        weight, bias = (self.weights[parameter.name] for parameter in layer.parameters)
        mean = x.mean(dim=-1, keepdim=True)
        centred = x - mean
        variance = (centred * centred).mean(dim=-1, keepdim=True)
        return self._moved(centred * flow.rsqrt(variance + 1e-5) * weight + bias, layer, "between")

    def _attention(self, layer: Layer, arguments: list[Tensor], inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        heads, head_dim = layer.attributes["heads"], layer.attributes["head_dim"]
        x = self._moved(arguments[0], layer, "input")
        query, key, value = (self._heads(part, layer, heads, head_dim) for part in x.chunk(3, dim=-1))
        scores = flow.matmul(query, key.transpose(-2, -1)) * (1.0 / math.sqrt(head_dim))
        mask = flow.tril(flow.ones(layer.rows, layer.rows))
        mask = self._placed(mask, scores.placement, [flow.sbp.broadcast] * len(scores.sbp))
        scores = scores.masked_fill(mask == 0, float("-inf"))
        y = flow.matmul(functional.softmax(scores, dim=-1), value).transpose(1, 2)
        return self._moved(y.reshape(y.shape[0], layer.rows, heads * head_dim), layer, "between")

    def _heads(self, part: Tensor, layer: Layer, heads: int, head_dim: int) -> Tensor:
        part = self._moved(part, layer, "between")
        return part.reshape(part.shape[0], layer.rows, heads, head_dim).transpose(1, 2)

    def _loss(self, layer: Layer, arguments: list[Tensor], inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        x = self._moved(arguments[0], layer, "input")
        wanted = self._data(targets, layer)
        # Whole logits: on a split vocabulary OneFlow's cross entropy sends more (122 MiB a step in place of 105, GPT by Megatron).
        whole = [flow.sbp.broadcast if state == flow.sbp.split(2) else state for state in x.sbp]
        return functional.cross_entropy(x.to_global(sbp=whole).reshape(-1, x.shape[-1]), wanted.reshape(-1))
