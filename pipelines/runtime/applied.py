"""A model that runs at a plan: its layer graph, executed layer by layer at the plan's strategies.

The user's module is read, not changed: its parameters' values, and what the graph does not say (a norm's eps).  Its ``forward``
is not called, since views with sizes in them would not fit local tensors; what the graph holds is run by the runtime's own
layers, and opaque layers by a copy of the submodule.  Every rank makes the same calls in the same order.

    between layers    the redistribution of each edge that changes p0, at the consumer
    inside            gather, compute, scatter, as :mod:`layers` has them
    parameters        :mod:`parameters`: gradients are summed once all uses of a layer's weights have sent theirs back

Collectives go through local tensors and eager autograd, so the module does not run inside ``nn.Graph``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from .layers import Body, build_body
from .layouts import parameter_layouts
from .load import load_oneflow
from .moving import move_tensor
from .parameters import ParameterGroup, StoredParameter
from .setting import Batch, LayerSetting
from .stepping import Stepper
from .userparameters import check_parameters, values_of
from .wire import Traffic

flow = load_oneflow()

__all__ = ["AppliedModule", "TracedSection"]

Tensor = Any
#: Runs a function and counts what all ranks send meanwhile, such as ``wire.measure`` with its baseline.
Measure = Callable[[Callable[[], Any]], "tuple[Any, Traffic]"]


@dataclass(frozen=True)
class TracedSection:
    """One phase of one layer, run by itself.

    Attributes:
        layer: its name.
        phase: ``forward``, ``backward`` (both with the redistributions of the layer's inputs) or ``gradient``.
        steps: the communication of this rank.
        traffic: what all ranks sent; None where it was not measured.
    """

    layer: str
    phase: str
    steps: tuple[Step, ...]
    traffic: Traffic | None


@dataclass(frozen=True)
class _RunLayer:
    """A layer ready to run: what it reads, its parameters' groups and where each weight is found in them."""

    layer: Layer
    strategy: Strategy
    producers: tuple[str, ...]
    body: Body
    weights: tuple[tuple[ParameterGroup, int], ...]


class AppliedModule(flow.nn.Module):
    """A model at a plan's strategies; made by :func:`autoddl.apply`, on every rank.

    ``module(*batch)`` takes the whole micro-batch, the same on every rank (OneFlow tensors on the host, or numpy arrays): the
    inputs and, where the graph ends in a loss, the targets.  It returns the mean loss of the micro-batch on every rank; without
    a loss the whole output, of which every rank should compute the same loss.  After ``loss.backward()`` gradients are right.
    """

    def __init__(
        self,
        module: Any,
        graph: LayerGraph,
        strategies: Mapping[str, Strategy],
        workload: Workload,
        feeds: Mapping[str, int | None] | None = None,
    ):
        super().__init__()
        world = flow.env.get_world_size()
        check_parameters(module, graph, strategies, world)
        self._graph = graph
        self._strategies = dict(strategies)
        self._workload = workload
        self._stepper = Stepper(world)
        self._is_summing = True
        self._num_passes = 0
        self._feeds = _feeds(graph, feeds or {})
        self._names = tuple(module.state_dict().keys())
        self._buffers_of_module = _buffers(module)
        self._stored: dict[str, StoredParameter] = {}
        self._aliases: dict[str, str] = {}
        self._groups: dict[str, tuple[ParameterGroup, ...]] = {}
        self._layers = tuple(self._ready(module, layer) for layer in graph.layers)
        self._readers: dict[str, int] = {}
        for source, _ in graph.edges:
            self._readers[source] = self._readers.get(source, 0) + 1
        self.train(module.training)

    # ---- Making ------------------------------------------------------------------------------------------------------

    def _ready(self, module: Any, layer: Layer) -> _RunLayer:
        strategy = self._strategies[layer.name]
        setting = LayerSetting(
            self._graph, layer, strategy, self._stepper, module, self._workload.recompute and layer.kind != "loss"
        )
        _check_edges(setting)
        layouts = parameter_layouts(self._graph, layer, strategy)
        values = values_of(module, self._stepper, [name for layout in layouts for name, _ in layout.sources])
        tied = {p.name: p.tied_to for p in layer.parameters if p.tied_to is not None}
        own: list[StoredParameter] = []
        places: list[StoredParameter] = []
        for layout in layouts:
            if layout.name in tied:
                places.append(self._tied(layer, layout, tied[layout.name]))
                continue
            logical = np.concatenate([values[name].value for name, _ in layout.sources])
            trained = all(values[name].requires_grad for name, _ in layout.sources)
            stored = StoredParameter(layout, logical, self._stepper, trained)
            self._stored[layout.name] = stored
            _register(self, layout.name, stored.tensor)
            own.append(stored)
            places.append(stored)
        by_axes: dict[tuple[Axis, ...], list[StoredParameter]] = {}
        for stored in own:
            by_axes.setdefault(stored.layout.reduced, []).append(stored)
        self._groups[layer.name] = tuple(
            ParameterGroup(members, axes, self._stepper) for axes, members in by_axes.items()
        )
        owners = {
            id(p): (group, i)
            for groups in self._groups.values()
            for group in groups
            for i, p in enumerate(group.parameters)
        }
        weights = tuple(owners[id(stored)] for stored in places)
        return _RunLayer(layer, strategy, self._graph.inputs(layer.name), build_body(setting), weights)

    def _tied(self, layer: Layer, layout: Any, owner: str) -> StoredParameter:
        """The parameter of another layer that this one uses; both have to lie alike."""
        for group in self._groups.get(owner, ()):
            for stored in group.parameters:
                if stored.layout.shape == layout.shape:
                    for mine, theirs in zip(layout.indices, stored.layout.indices):
                        if not all(np.array_equal(a, b) for a, b in zip(mine, theirs)):
                            raise UserError(
                                f"{layer.describe()}: {self._strategies[layer.name]} puts {layout.name} elsewhere than "
                                f"{self._strategies[owner]} of {owner}, whose weight it shares"
                            )
                    self._aliases[layout.name] = stored.layout.name
                    return stored
        raise UserError(
            f"{layer.describe()}: {owner} has no parameter of shape {layout.shape} to share as {layout.name}"
        )

    # ---- Running -----------------------------------------------------------------------------------------------------

    def forward(self, *batch: Any) -> Tensor:
        """The mean loss of a micro-batch (see the class)."""
        moment = self._batch(batch)
        weights = _Weights(self._is_summing)
        values: dict[str, Tensor] = {}
        left = dict(self._readers)
        for ready in self._layers:
            inputs = self._arriving(ready, [values[name] for name in ready.producers], moment.num_samples)
            values[ready.layer.name] = ready.body(inputs, weights.of(ready), moment)
            for name in ready.producers:
                left[name] -= 1
                if not left[name]:
                    del values[name]
        return self._result(values[self._layers[-1].layer.name], moment)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches whose forward pass runs inside only add to this rank's gradients; the first backward pass of one that
        ran outside sums them over the ranks, once."""
        before, self._is_summing = self._is_summing, False
        try:
            yield
        finally:
            self._is_summing = before

    def train_step(self, *batch: Any) -> float:
        """Forward and backward passes of a whole batch in the plan's micro-batches; gradients are those of the batch's mean
        loss, which is returned."""
        samples = len(batch[0])
        num = self._workload.num_micro_batches
        if samples % num:
            raise UserError(f"a batch of {samples} does not divide into the plan's {num} micro-batches")
        width, total = samples // num, 0.0
        for i in range(num):
            part = [argument[i * width : (i + 1) * width] for argument in batch]
            with contextlib.nullcontext() if i == num - 1 else self.no_sync():
                loss = self(*part) / num
                loss.backward()
            total += float(loss.numpy())
        return total

    def _arriving(self, ready: _RunLayer, inputs: Sequence[Tensor], samples: int) -> list[Tensor]:
        """Inputs at the layouts that a layer wants, in the shapes that it wants."""
        arrived = []
        for name, x in zip(ready.producers, inputs):
            source = self._strategies[name]
            if source.rows_and_features != ready.strategy.rows_and_features:
                shape = edge_shape(self._graph[name], samples)
                route = redistribute(source.activations, ready.strategy.activations, shape)
                x = move_tensor(x, route, self._stepper, (0, 2))
            arrived.append(x)
        if len(arrived) == 1:
            arrived[0] = _as_rows(arrived[0], ready.layer)
        return arrived

    def _result(self, value: Tensor, moment: Batch) -> Tensor:
        return value

    def _batch(self, batch: Sequence[Any]) -> Batch:
        if flow._oneflow_internal.lazy_mode.is_enabled():
            raise UserError("an applied module runs in eager mode only, not inside nn.Graph: its collectives are eager")
        arrays = [_to_numpy(argument) for argument in batch]
        num_inputs = len(arrays) - (1 if _has_loss(self._graph) else 0)
        if num_inputs < 1:
            raise UserError(f"{len(arrays)} arguments are too few, should be the inputs and then the targets")
        samples = len(arrays[0])
        for ready in self._layers:
            if samples % ready.strategy.p0:
                raise UserError(
                    f"{ready.layer.describe()}: {samples} samples do not divide over the {ready.strategy.p0} of {ready.strategy}"
                )
        inputs = {}
        for name, which in self._feeds.items():
            if which is None:
                inputs[name] = np.zeros((samples, *self._graph[name].input_shape), dtype=np.int64)
            elif which >= num_inputs:
                raise UserError(f"{self._graph[name].describe()}: reads input {which}, but there are {num_inputs}")
            else:
                inputs[name] = arrays[which]
        self._num_passes += 1
        targets = arrays[-1] if len(arrays) > num_inputs else None
        return Batch(inputs, targets, samples, self._num_passes if self.training else None)

    # ---- Looking inside ----------------------------------------------------------------------------------------------

    def trace(self, *batch: Any, measure: Measure | None = None) -> tuple[Tensor, list[TracedSection]]:
        """The loss, and one forward and backward pass run layer by layer, so that each phase of each layer can be measured.

        Gradients are added to the parameters' as ``backward`` would.

        Args:
            measure: called with every section to run, on all ranks in the same order.
        """
        return _Tracer(self, measure).run(self._batch(batch))

    @property
    def stepper(self) -> Stepper:
        """The ranks, and the log of steps."""
        return self._stepper

    # ---- Parameters --------------------------------------------------------------------------------------------------

    def logical_gradients(self) -> dict[str, np.ndarray]:
        """The gradients by the model's own names and shapes, on every rank; all ranks call."""
        return self._logical(lambda stored: stored.tensor.grad)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The plain model's: its names, shapes and values, as local tensors on every rank; all ranks call."""
        values = self._logical(lambda stored: stored.tensor)
        values.update({name: buffer for name, buffer in self._buffers_of_module.items() if name not in values})
        return {name: flow.tensor(values[name]) for name in self._names if name in values}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        """Take the values of a plain model's ``state_dict`` (local tensors or numpy arrays), the same on every rank.

        Raises:
            UserError: (if strict) a name is missing or unknown, or a shape differs.
        """
        known = {name: rows for stored in self._stored.values() for name, rows in stored.layout.sources}
        names = set(known) | set(self._aliases) | set(self._buffers_of_module)
        missing = [name for name in known if name not in state_dict]
        unknown = [name for name in state_dict if name not in names]
        if strict and (missing or unknown):
            what = f"lacks {missing[0]!r}" if missing else f"holds {unknown[0]!r}, which the model has not"
            raise UserError(f"the state_dict {what}")
        for stored in self._stored.values():
            parts = [_to_numpy(state_dict[name]) if name in state_dict else None for name, _ in stored.layout.sources]
            if any(part is None for part in parts):
                current = dict(stored.parts(stored.logical()))
                parts = [
                    current[name] if part is None else part for part, (name, _) in zip(parts, stored.layout.sources)
                ]
            for part, (name, rows) in zip(parts, stored.layout.sources):
                if part.shape != (rows, *stored.layout.shape[1:]):
                    raise UserError(
                        f"the state_dict's {name} has shape {part.shape}, should have {(rows, *stored.layout.shape[1:])}"
                    )
            stored.assign(np.concatenate(parts))
        for name in self._buffers_of_module:
            if name in state_dict:
                self._buffers_of_module[name] = _to_numpy(state_dict[name])

    def _logical(self, tensor_of: Callable[[StoredParameter], Tensor | None]) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        for stored in self._stored.values():
            tensor = tensor_of(stored)
            if tensor is not None:
                values.update(stored.parts(stored.logical(tensor)))
        values.update({alias: values[name] for alias, name in self._aliases.items() if name in values})
        return values


class _Weights:
    """The local weights of one forward pass: a group's are made once, however many layers use them."""

    def __init__(self, is_summing: bool):
        self._is_summing = is_summing
        self._made: dict[int, tuple[Tensor, ...]] = {}

    def of(self, ready: _RunLayer) -> tuple[Tensor, ...]:
        found = []
        for group, index in ready.weights:
            if id(group) not in self._made:
                self._made[id(group)] = group.summed() if self._is_summing else group.unsummed()
            found.append(self._made[id(group)][index])
        return tuple(found)


class _Tracer:
    """Runs a pass in sections: between layers the graph of autograd is cut."""

    def __init__(self, applied: AppliedModule, measure: Measure | None):
        self._applied = applied
        self._measure = measure
        self._sections: list[TracedSection] = []

    def run(self, moment: Batch) -> tuple[Tensor, list[TracedSection]]:
        applied = self._applied
        weights = _Weights(is_summing=False)
        leaves: dict[str, list[Tensor]] = {}
        values: dict[str, Tensor] = {}
        for ready in applied._layers:
            name = ready.layer.name
            own = [values[producer].detach() for producer in ready.producers]
            leaves[name] = [x.requires_grad_(x.is_floating_point()) for x in own]

            def forward(ready: _RunLayer = ready, own: list[Tensor] = own) -> Tensor:
                inputs = applied._arriving(ready, own, moment.num_samples)
                return ready.body(inputs, weights.of(ready), moment)

            values[name] = self._section(name, "forward", forward)
        loss = values[applied._layers[-1].layer.name]
        gradients: dict[str, Tensor] = {applied._layers[-1].layer.name: flow.ones_like(loss)}
        for ready in reversed(applied._layers):
            name = ready.layer.name
            gradient = gradients.pop(name, None)
            if gradient is None or not values[name].requires_grad:
                continue
            value = values.pop(name)
            self._section(
                name, "backward", lambda value=value, gradient=gradient: flow.autograd.backward([value], [gradient])
            )
            for producer, leaf in zip(ready.producers, leaves[name]):
                if leaf.grad is not None:
                    before = gradients.get(producer)
                    gradients[producer] = leaf.grad if before is None else before + leaf.grad
        for ready in applied._layers:
            for group in applied._groups[ready.layer.name]:
                self._section(ready.layer.name, "gradient", group.sum_leaves)
        return loss.detach(), self._sections

    def _section(self, layer: str, phase: str, run: Callable[[], Any]) -> Any:
        with self._applied.stepper.logging() as steps:
            result, traffic = (run(), None) if self._measure is None else self._measure(run)
        self._sections.append(TracedSection(layer, phase, tuple(steps), traffic))
        return result


# ---- Helpers -----------------------------------------------------------------------------------------------------------------


def _has_loss(graph: LayerGraph) -> bool:
    last = graph.layers[-1]
    return last.kind == "loss" or "mse_loss" in last.epilogue


def _feeds(graph: LayerGraph, given: Mapping[str, int | None]) -> dict[str, int | None]:
    """Which input each layer that reads the data itself reads: what the user says, else in order.

    Tables that are looked up after the first one without an input of their own (token types) read zeros, as models do.
    """
    readers = [layer for layer in graph.layers if not graph.inputs(layer.name) and layer.kind != "position"]
    for name in given:
        if name not in {layer.name for layer in readers}:
            names = ", ".join(layer.name for layer in readers)
            raise UserError(f"layer {name!r} reads no input of the model; these do: {names}")
    feeds: dict[str, int | None] = {}
    for number, layer in enumerate(readers):
        feeds[layer.name] = given.get(layer.name, 0 if number == 0 else None)
        if number and layer.name not in given and layer.kind != "embedding":
            raise UserError(
                f"{layer.describe()}: it is not clear which input it reads; give feeds={{{layer.name!r}: NUMBER}}"
            )
    return feeds


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


def _register(module: Any, path: str, tensor: Tensor) -> None:
    """Make ``tensor`` the parameter at a path, in plain modules on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, flow.nn.Module())
        module = module._modules[parent]
    module.register_parameter(name, tensor)


def _buffers(module: Any) -> dict[str, np.ndarray]:
    trained = {name for name, _ in module.named_parameters()}
    return {name: _to_numpy(value) for name, value in module.named_buffers() if name not in trained}


def _to_numpy(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.detach().numpy()
