"""`GlobalModel`: a model of global tensors, made from the layer graph and the strategies of a plan.

It executes the statements of :mod:`layers`. Between layers it says the layout of every tensor and of its gradient.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.graph_meshes import GraphMesh
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layerwork import is_recomputed_alone
from autoddl.costmodel.strategy import Strategy

from .. import facts
from ..backend import Backend
from ..dropouts import check_dropouts, dropout_of
from ..load import load_oneflow
from ..operations import elu, quick_gelu, tanh_gelu
from ..statements import Call, Fact, Name
from . import modules
from .layers import DataInput, GlobalLayer, global_layer
from .meshes import check_graph_plan

flow: Any = load_oneflow()
nn: Any = flow.nn

__all__ = ["GlobalModel", "InputLayout", "global_tensor", "local_slices"]

Tensor = Any

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "": lambda x: x,
    "add": lambda *terms: functools.reduce(operator.add, terms),
    "multiply": operator.mul,
    **{f.__name__: f for f in (modules.gather, modules.mean_difference, elu, quick_gelu, tanh_gelu)},
}


@dataclass(frozen=True)
class InputLayout:
    """The layout of an input of the model, or of the targets.

    Attributes:
        mesh: Mesh of the layer that reads it.
        shape: Shape of a sample.
        sbp: SBP signature.
    """

    mesh: modules.Mesh
    shape: tuple[int, ...]
    sbp: list[Any]


def _function(name: str) -> Callable[..., Any]:
    """Return the function of a statement."""
    owner, _, attribute = name.rpartition(".")
    if owner:
        return getattr({"flow": flow, "functional": nn.functional}[owner], attribute)  # type: ignore[no-any-return]
    return _FUNCTIONS[name]


class _LayerModule(nn.Module):
    """A layer of a `GlobalModel`.

    Args:
        layer: The layer.
        form: Its modules and statements.
        mesh: Its mesh.
    """

    def __init__(self, layer: Layer, form: GlobalLayer, mesh: modules.Mesh):
        super().__init__()
        self.form, self.mesh = form, mesh
        for attribute, call in form.modules.items():
            self.add_module(attribute or "own", self._make(call))

    def _make(self, call: Call) -> Any:
        arguments: list[Any] = [self.mesh if isinstance(value, Name) else value for value in call.arguments]
        if call.function == "":  # a module of the user
            return arguments[0].module
        owner = nn if call.function.startswith("nn.") else modules
        return getattr(owner, call.function.rpartition(".")[2])(*arguments, **call.options)

    def forward(self, *tensors: Tensor) -> Any:
        names = (*self.form.inputs, *(("targets",) if self.form.targets is not None else ()))
        variables = {"mesh": self.mesh, **dict(zip(names, tensors))}
        for call in self.form.statements:
            arguments = (variables[value.text] if isinstance(value, Name) else value for value in call.arguments)
            # Inside nn.Graph, ``self`` is a proxy of this module, and only its own submodules have the graph's parameters.
            owner, _, attribute = call.function.rpartition(".")
            function = getattr(self, attribute or "own") if owner == "self" else _function(call.function)
            (result,) = call.result
            variables[result] = function(*arguments, **call.options)
        results = tuple(variables[name] for name in self.form.results)
        return results if len(results) > 1 else results[0]


class GlobalModel(nn.Module):
    """A model of global tensors at the strategies of a plan. All ranks make it.

    ``model(*inputs)`` takes global tensors of the layouts `input_layouts` and, if the model ends in a loss, `target_layout`. It
    returns the mean loss, or the output.

    Args:
        graph: The layer graph.
        strategies: Strategy of each layer.
        module: The user's model; its facts and modules without parameters are used, not its parameters.
        backend: The devices.

    Raises:
        UserError: The graph executor cannot run a layer of the plan.
    """

    def __init__(self, graph: LayerGraph, strategies: Mapping[str, Strategy], module: Any, backend: Backend):
        super().__init__()
        check_dropouts(module, graph)
        for layer in graph.layers:
            if layer.program is not None and not kind_of(layer.kind).is_opaque:
                raise UserError(
                    f"{layer.describe()}: what it reads is computed from the inputs of the model, which the graph executor "
                    "does not do; use the eager executor"
                )
        self.graph = graph
        self.meshes = check_graph_plan(graph, strategies)
        made = {mesh: _mesh(mesh, backend) for mesh in dict.fromkeys(self.meshes.values())}
        self._meshes = {name: made[mesh] for name, mesh in self.meshes.items()}
        self._layers = nn.ModuleList([])
        self._by_name: dict[str, Any] = {}
        self._parameters_by_name: dict[str, list[tuple[Tensor, int, int, int]]] = {}
        for layer in graph.layers:
            try:
                form = global_layer(graph, layer, strategies[layer.name], self.meshes[layer.name], _reader(module))
            except UserError as error:
                raise UserError(str(error) if layer.name in str(error) else f"{layer.describe()}: {error}") from error
            made_layer = _LayerModule(layer, form, self._meshes[layer.name])
            self._share_weights(layer, form, made_layer)
            self._by_name[layer.name] = made_layer
            self._layers.append(made_layer)

    # ---- Running -------------------------------------------------------------------------------------------------------------

    def recomputed_layers(self, recompute: str) -> list[int]:
        """Return the numbers of the layers that a way of recomputation runs again, each from its own input."""
        places = [self.graph.place(layer.name, recompute) for layer in self.graph.layers]
        layers = enumerate(zip(self.graph.layers, places))
        return [i for i, (layer, place) in layers if is_recomputed_alone(kind_of(layer.kind), place, recompute)]

    @property
    def input_layouts(self) -> dict[str, InputLayout]:
        """The layout of the input of each layer that reads data."""
        forms = {name: layer.form for name, layer in self._by_name.items()}
        return {name: self._data_layout(name, form.data) for name, form in forms.items() if form.data is not None}

    @property
    def target_layout(self) -> InputLayout | None:
        """The layout of the targets; None if the model has no loss."""
        for name, layer in self._by_name.items():
            if layer.form.targets is not None:
                return self._data_layout(name, layer.form.targets)
        return None

    def _data_layout(self, name: str, data: DataInput) -> InputLayout:
        mesh = self._meshes[name]
        split = flow.sbp.split(len(data.shape)) if data.is_split else flow.sbp.broadcast
        return InputLayout(mesh, data.shape, mesh.sbp(flow.sbp.split(0), split))

    def forward(self, *tensors: Tensor) -> Tensor:
        data = dict(zip(self.input_layouts, tensors))
        outputs: dict[str, tuple[Tensor, ...]] = {}
        result: Tensor = None
        for number, layer in enumerate(self.graph.layers):
            made = self._layers[number]  # inside nn.Graph, a proxy
            inputs = [data[layer.name]] if layer.name in data else []
            for producer in self.graph.inputs(layer.name):
                inputs += [self._moved(x, producer, layer) for x in outputs[producer]]
            if made.form.targets is not None:
                inputs.append(tensors[-1])
            result = made(*inputs)
            outputs[layer.name] = result if isinstance(result, tuple) else (result,)
        return result

    def _moved(self, x: Tensor, producer: str, layer: Layer) -> Tensor:
        """Bring a tensor from its producer's layout to that of the layer that reads it."""
        source, target = self._meshes[producer], self._meshes[layer.name]
        if x.ndim == 4 and len(layer.input_shape) != 3:  # images, of which only samples are split
            x = x.reshape(x.shape[0], 1, -1)
        if source is target:
            return x
        samples = flow.sbp.broadcast if self._by_name[producer].form.is_shared else flow.sbp.split(0)
        return modules.move(x, source, target, samples)

    # ---- Parameters ----------------------------------------------------------------------------------------------------------

    def _share_weights(self, layer: Layer, form: GlobalLayer, made: Any) -> None:
        """Record where the values of the user's parameters are, and let tied layers use one tensor."""
        ties = {p.name: p.tied_to for p in layer.parameters if p.tied_to is not None}
        for parameter in form.parameters:
            owner, name = _owner(made, parameter.path)
            tied = [ties[source] for source, _, _ in parameter.sources if source in ties]
            if tied:
                first = self._by_name[tied[0]]
                (path,) = [p.path for p in first.form.parameters if p.path.endswith("weight")]
                first_owner, first_name = _owner(first, path)
                owner.register_parameter(name, getattr(first_owner, first_name))
                continue
            offset = 0
            for source, first_row, last_row in parameter.sources:
                rows = (getattr(owner, name), offset, first_row, last_row)
                self._parameters_by_name.setdefault(source, []).append(rows)
                offset += last_row - first_row

    @property
    def parameter_names(self) -> list[str]:
        """Names of the user's parameters, without those tied to another one."""
        return list(self._parameters_by_name)

    def load_values(self, values: Mapping[str, np.ndarray]) -> None:
        """Set parameters to the values of the user's, without communication."""
        _wait()
        for name, value in values.items():
            for tensor, offset, first, last in self._parameters_by_name[name]:
                _write_rows(tensor, offset, value[first:last])
        _wait()

    def values(self) -> dict[str, np.ndarray]:
        """Return the values of all parameters, by the user's names, on every rank. All ranks call."""
        _wait()
        result = {}
        whole: dict[int, np.ndarray] = {}
        for name, parts in self._parameters_by_name.items():
            pieces = []
            for tensor, offset, first, last in sorted(parts, key=lambda part: part[2]):
                if id(tensor) not in whole:
                    whole[id(tensor)] = _whole(tensor)
                pieces.append(whole[id(tensor)][offset : offset + last - first])
            result[name] = np.concatenate(pieces)
        return result


# ---- Helpers -------------------------------------------------------------------------------------------------------------------


def _wait() -> None:
    """Wait until pending updates have finished: the losses of a graph are there before its optimizer has run."""
    flow._oneflow_internal.eager.Sync()


def _mesh(mesh: GraphMesh, backend: Backend) -> modules.Mesh:
    placement = backend.placement(np.arange(mesh.num_ranks).reshape(mesh.shape).tolist())
    return modules.Mesh(placement, *mesh.roles)


def _reader(module: Any) -> Callable[[Fact], Any]:
    def read(fact: Fact) -> Any:
        function = dropout_of if fact.function == "dropout_of" else getattr(facts, fact.function)
        return function(module, fact.path, *fact.arguments)

    return read


def _owner(layer: Any, path: str) -> tuple[Any, str]:
    """Return the module that has a parameter of a layer, and the parameter's name there."""
    attribute, _, name = path.rpartition(".")
    return layer._modules[attribute or "own"], name


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the part of a global tensor that this rank holds.

    Args:
        tensor: A global tensor of evenly split and broadcast axes.
    """
    ranks = np.array(tensor.placement.ranks)
    coordinates = [int(index[0]) for index in np.nonzero(ranks == flow.env.get_rank())]
    slices = [(0, length) for length in tensor.shape]
    for state, size, coordinate in zip(tensor.sbp, ranks.shape, coordinates):
        dim = _split_dim(state)
        if dim is not None:
            start, stop = slices[dim]
            width = (stop - start) // size
            slices[dim] = (start + coordinate * width, start + (coordinate + 1) * width)
    return tuple(slice(start, stop) for start, stop in slices)


def _split_dim(state: Any) -> int | None:
    """Return the dimension that an SBP state splits; None if it splits none."""
    return next((dim for dim in range(6) if state == flow.sbp.split(dim)), None)


def global_tensor(values: np.ndarray, placement: Any, sbp: Any, dtype: Any) -> Tensor:
    """Return a global tensor of an array that every rank has, without communication."""
    tensor = flow.empty(*values.shape, dtype=dtype, placement=placement, sbp=sbp)
    own = np.ascontiguousarray(values[local_slices(tensor)])
    tensor.to_local().copy_(flow.tensor(own, dtype=dtype, device=placement.type))
    return tensor


def _write_rows(tensor: Tensor, offset: int, value: np.ndarray) -> None:
    """Write some rows of a parameter, as far as this rank holds them."""
    rows, *others = local_slices(tensor)
    first, last = max(rows.start, offset), min(rows.stop, offset + len(value))
    if first >= last:
        return
    part = (slice(first - offset, last - offset), *others)
    own = np.ascontiguousarray(value[part])
    local = tensor.detach().to_local()
    local[first - rows.start : last - rows.start].copy_(
        flow.tensor(own, dtype=tensor.dtype, device=tensor.placement.type)
    )


def _whole(tensor: Tensor) -> np.ndarray:
    """Return the values of a parameter on every rank."""
    everywhere = [flow.sbp.broadcast] * len(tensor.sbp)
    return tensor.detach().to_global(sbp=everywhere).to_local().numpy()  # type: ignore[no-any-return]
