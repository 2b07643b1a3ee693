"""What the graph executor does for each kind of layer: its modules (:mod:`modules`) and statements.

This is the one definition of a layer in global tensors: :mod:`model` executes it, :mod:`autoddl.export.globaltensors` writes it as
text. Needs no OneFlow.

A linear layer that attention reads, with its weight split by columns:

    modules         query = Linear(mesh, 64, 64, "columns"), key = ..., value = ...
    statements      x = gather(x, mesh)
                    query = self.query(x)
                    key = self.key(x)
                    value = self.value(x)
    results         query, key, value

The sections of a fused weight (q, k and v; gate and factor) are modules of their own, so that each is split evenly along its
features. A split of the product itself would cut the sections elsewhere than a split of the fused weight, and would send data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.graph_meshes import FEATURES, GraphMesh
from autoddl.costmodel.kinds.attention import head_sections
from autoddl.costmodel.kinds.epilogue import GATES, LOSSES
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy

from ..comm.parameter_layouts import product_order
from ..kinds.attention import check_attention
from ..statements import TARGETS, Call, Fact, LayerContext, Name, X, epilogue_function
from .meshes import COLUMNS, weight_split

__all__ = ["MESH", "DataInput", "GlobalLayer", "GlobalParameter", "global_layer"]

#: The mesh of the layer, as an argument of calls.
MESH = Name("mesh")
#: Names of the sections of a product, by their number.
_SECTIONS: Mapping[int, tuple[str, ...]] = {1: ("",), 2: ("gate", "factor"), 3: ("query", "key", "value")}
#: Reads a property of the user's model.
Read = Callable[[Fact], Any]


@dataclass(frozen=True)
class DataInput:
    """The model's input that a layer reads, or the targets.

    Attributes:
        shape: Shape of a sample.
        is_split: Whether the last dimension is split over the axis of the features.
    """

    shape: tuple[int, ...]
    is_split: bool = False


@dataclass(frozen=True)
class GlobalParameter:
    """A parameter of a module, and the rows of the user's parameters that it consists of.

    Attributes:
        path: Path in the layer, such as ``query.weight``.
        sources: (name in the user's model, first row, row after the last) of its parts, in order.
    """

    path: str
    sources: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class GlobalLayer:
    """A layer in global tensors.

    Attributes:
        modules: Calls that make its modules, by attribute; "" is the only module of a layer.
        statements: Calls in order, as in :mod:`autoddl.pipelines.runtime.statements`. ``self.NAME`` calls a module.
        inputs: Names of the inputs.
        results: Names of the results.
        parameters: Parameters of its modules.
        data: The model's input that it reads; None if it reads other layers.
        targets: The targets that it reads; None without.
        is_shared: Whether the result has one sample, which belongs to every sample of the batch (learned positions).
    """

    modules: Mapping[str, Call]
    statements: tuple[Call, ...]
    inputs: tuple[str, ...] = ("x",)
    results: tuple[str, ...] = ("x",)
    parameters: tuple[GlobalParameter, ...] = ()
    data: DataInput | None = None
    targets: DataInput | None = None
    is_shared: bool = False


def global_layer(graph: LayerGraph, layer: Layer, strategy: Strategy, mesh: GraphMesh, read: Read) -> GlobalLayer:
    """Return a layer in global tensors.

    Args:
        graph: The layer graph.
        layer: A layer of the graph.
        strategy: Strategy of the layer.
        mesh: Mesh of the layer.
        read: Reads a property of the user's model.

    Raises:
        UserError: The graph executor cannot run the layer. The message names it.
    """
    if layer.kind not in _KINDS:
        raise UserError(
            f"{layer.describe()}: the graph executor runs {', '.join(_KINDS)}, not layers of kind {layer.kind!r}"
        )
    return _KINDS[layer.kind](_Context(graph, layer, strategy, False, "dense", False, (), False, mesh, read))


@dataclass(frozen=True)
class _Context(LayerContext):
    """A layer, from which its global form is built.

    Attributes:
        mesh: Mesh of the layer.
        read: Reads a property of the user's model.
    """

    mesh: GraphMesh
    read: Read

    def whole_parameters(self) -> tuple[GlobalParameter, ...]:
        """Return the parameters ``weight`` and ``bias`` of the only module, each the whole of one of the layer's."""
        return tuple(
            GlobalParameter(name, ((parameter.name, 0, parameter.shape[0]),))
            for name, parameter in zip(("weight", "bias"), self.layer.parameters)
        )

    @property
    def has_bias(self) -> bool:
        """Whether a layer of one module has a bias."""
        return len(self.layer.parameters) > 1

    def check_whole_samples(self) -> None:
        """Check that features are not split."""
        if self.mesh.size(FEATURES) > 1:
            raise UserError(f"{self.layer.describe()}: only its samples can be split, not {self.mesh}")


def _own(module: str = "") -> str:
    """Return the function of a statement that calls a module of the layer."""
    return f"self.{module}"


# ---- Epilogues -----------------------------------------------------------------------------------------------------------------


def _epilogue(context: _Context, names: Sequence[str]) -> tuple[dict[str, Call], list[Call], tuple[str, ...]]:
    """Return the modules and calls of the element-wise operations after a layer, and the names of their results.

    A gate (``mul``, ``mul_last``) multiplies its two sections; the operations before it apply to the gate.

    Args:
        context: The layer.
        names: Names of the layer's results.
    """
    modules: dict[str, Call] = {}
    calls: list[Call] = []
    operations = [operation for operation in context.layer.epilogue if operation not in LOSSES]
    # The names of the results are those of the two halves, in this order.
    halves = ("gate", "factor") if "mul" in operations else ("factor", "gate")
    if GATES & set(operations):
        assert len(names) == 2, names
        names = ("x",)
        calls.append(Call("", (Name(halves[0]),), result=("x",)))
    numbers: Iterator[int] = iter(range(len(operations)))
    for operation in operations:
        if operation in GATES:
            calls.append(Call("multiply", (X, Name(halves[1]))))
        elif operation == "dropout":
            number = next(numbers)
            dropout = context.read(context.fact("dropout", "dropout_of", context.layer.name, number))
            modules[f"dropout_{number}"] = Call("nn.Dropout", (dropout.probability,))
            calls += [Call(_own(f"dropout_{number}"), (Name(name),), result=(name,)) for name in names]
        elif function := epilogue_function(context.layer, operation):
            calls += [Call(function, (Name(name),), result=(name,)) for name in names]
    return modules, calls, tuple(names)


def _single_module(context: _Context, module: Call, data: tuple[int, ...], is_split: bool = False) -> GlobalLayer:
    """Return a layer of one module that reads ``x``, and the operations after it.

    Args:
        context: The layer.
        module: Makes the module.
        data: Shape of a sample of the model's input, for a layer that reads it.
        is_split: See `DataInput`.
    """
    modules, calls, results = _epilogue(context, ("x",))
    return GlobalLayer(
        {"": module, **modules},
        (Call(_own(), (X,), computes=True), *calls),
        ("x",),
        results,
        context.whole_parameters(),
        None if context.producers else DataInput(data, is_split),
    )


# ---- Kinds ---------------------------------------------------------------------------------------------------------------------


def _linear(context: _Context) -> GlobalLayer:
    layer, split = context.layer, weight_split(context.strategy)
    order = product_order(context.graph, layer)
    sections = order.section_widths
    parts = context.mesh.size(FEATURES)
    if any(width % parts for width in sections):
        raise UserError(f"{layer.describe()}: its sections are {sections} wide, should be multiples of {parts}")
    names = tuple(name or "x" for name in _SECTIONS[len(sections)])
    weights = [p for p in layer.parameters if len(p.shape) == 2]
    biases = [p for p in layer.parameters if len(p.shape) == 1]
    if len(biases) not in (0, len(weights)):
        raise UserError(f"{layer.describe()}: some of its modules have a bias and some do not; all or none should")
    if layer.attributes.get("transposed"):
        raise UserError(
            f"{layer.describe()}: the graph executor runs products whose weights are stored as (out, in); use the eager executor"
        )
    modules: dict[str, Call] = {}
    parameters = []
    calls: list[Call] = [Call("gather", (X, MESH), num_steps=1)] if context.producers and split == COLUMNS else []
    start = 0
    for section, name, width in zip(_SECTIONS[len(sections)], names, sections):
        options = {} if biases else {"bias": False}
        modules[section] = Call("Linear", (MESH, layer.attributes["in_features"], width, split), options)
        for kind, sources in (("weight", weights), ("bias", biases)):
            if sources:
                path = f"{section}.{kind}" if section else kind
                parameters.append(
                    GlobalParameter(path, _rows([(p.name, p.shape[0]) for p in sources], start, start + width))
                )
        calls.append(Call(_own(section), (X,), result=(name,), computes=name == names[0]))
        start += width
    more_modules, more_calls, names = _epilogue(context, names)
    targets = None
    if losses := LOSSES & set(layer.epilogue):
        more_calls.append(Call("mean_difference", (X, TARGETS, MESH), {"is_squared": "mse_loss" in losses}))
        targets = DataInput((layer.rows, layer.features), is_split=True)
    data = None
    if not context.producers:
        data = DataInput((prod(layer.input_shape[:-1]), layer.input_shape[-1]), is_split=split != COLUMNS)
    return GlobalLayer(
        {**modules, **more_modules}, (*calls, *more_calls), ("x",), names, tuple(parameters), data, targets
    )


def _rows(sources: Sequence[tuple[str, int]], start: int, stop: int) -> tuple[tuple[str, int, int], ...]:
    """Return the parts of rows ``start`` to ``stop`` of concatenated parameters, given as (name, number of rows).

    >>> _rows([("q", 4), ("k", 2)], 3, 6)
    (('q', 3, 4), ('k', 0, 2))
    """
    parts, offset = [], 0
    for name, rows in sources:
        first, last = max(start - offset, 0), min(stop - offset, rows)
        if first < last:
            parts.append((name, first, last))
        offset += rows
    return tuple(parts)


def _embedding(context: _Context) -> GlobalLayer:
    layer = context.layer
    context.read(context.fact("", "check_table"))
    size = (layer.attributes["vocabulary"], layer.attributes["features"])
    module = Call("Embedding", (MESH, *size, weight_split(context.strategy)))
    return _single_module(context, module, (layer.rows,))


def _position(context: _Context) -> GlobalLayer:
    layer = context.layer
    size = (layer.attributes["positions"], layer.rows, layer.attributes["features"])
    return GlobalLayer(
        {"": Call("Positions", (MESH, *size))},
        (Call(_own(), (), computes=True),),
        (),
        parameters=context.whole_parameters(),
        is_shared=True,
    )


def _norm(context: _Context) -> GlobalLayer:
    layer = context.layer
    features = layer.attributes["features"]
    eps = context.read(context.fact("eps", "eps_of")) if layer.eps is None else layer.eps
    if layer.attributes["statistics"] == 2:
        module = Call("LayerNorm", (MESH, features, eps), {} if context.has_bias else {"bias": False})
    elif context.has_bias:
        raise UserError(f"{layer.describe()}: an RMS norm with a bias is not supported by the graph executor")
    else:
        module = Call("RMSNorm", (MESH, features, eps))
    if not layer.parameters:
        raise UserError(f"{layer.describe()}: a norm without a weight is not supported by the graph executor")
    return _single_module(context, module, (prod(layer.input_shape[:-1]), features), is_split=True)


def _attention(context: _Context) -> GlobalLayer:
    layer, attributes, producers = context.layer, context.layer.attributes, context.producers
    if layer.scores is not None or "key_rows" in attributes:
        raise UserError(
            f"{layer.describe()}: the graph executor runs attention whose scores nothing but a causal mask changes; "
            "use the eager executor"
        )
    check_attention(layer)
    kinds = [kind_of(context.graph[name].kind) for name in producers]
    if len(producers) not in (1, 3) or (len(producers) == 1 and not kinds[0].follows_groups):
        raise UserError(
            f"{layer.describe()}: should read q, k and v of one or of three linear layers; it reads {producers}"
        )
    if attributes.keys() & {"rotary_features", "rotary_neighbours"}:
        raise UserError(
            f"{layer.describe()}: the graph executor turns the halves of all features of a head by their positions, and no other "
            "pairs; use the eager executor"
        )
    theta = attributes.get("rotary_base", None)
    theta = context.read(context.fact("theta", "rotary_base_of")) if theta is None else theta
    options: dict[str, Any] = {"theta": float(theta)} if theta else {}
    if kind_of(layer.kind).drops_elements(layer):
        dropout = context.read(context.fact("dropout", "dropout_of", layer.name, -1))
        options["dropout"] = dropout.probability
    kv_heads, _ = head_sections(layer)
    size = (attributes["heads"], kv_heads, layer.rows, attributes["head_dim"], bool(attributes["causal"]))
    inputs = _SECTIONS[3]
    call = Call(_own(), tuple(map(Name, inputs)), computes=True)
    return GlobalLayer({"": Call("Attention", (MESH, *size), options)}, (call,), inputs)


def _add(context: _Context) -> GlobalLayer:
    inputs = tuple(f"input_{i}" if i else "x" for i in range(len(context.producers)))
    if len(inputs) < 2:
        raise UserError(f"{context.layer.describe()}: it adds an input of the model, which cannot be run")
    modules, calls, results = _epilogue(context, ("x",))
    return GlobalLayer(modules, (Call("add", tuple(map(Name, inputs)), computes=True), *calls), inputs, results)


def _conv2d(context: _Context) -> GlobalLayer:
    context.check_whole_samples()
    layer = context.layer
    options = dict(context.read(context.fact("options", "convolution_options")))
    options = {"bias": context.has_bias, **options}
    return _single_module(context, Call("Convolution", (MESH, layer.parameters[0].shape), options), layer.input_shape)


def _pool(context: _Context) -> GlobalLayer:
    context.check_whole_samples()
    attributes = context.layer.attributes
    options = {name: attributes[name] for name in ("kernel_size", "stride", "padding")}
    module = Call("nn.MaxPool2d" if attributes["maximum"] else "nn.AvgPool2d", (), options)
    return _single_module(context, module, context.layer.input_shape)


def _loss(context: _Context) -> GlobalLayer:
    layer = context.layer
    call = Call(_own(), (X, TARGETS), num_steps=-1, computes=True)
    module = Call("CrossEntropy", (MESH,))
    return GlobalLayer({"": module}, (call,), targets=DataInput((layer.rows,)))


def _opaque(context: _Context) -> GlobalLayer:
    context.check_whole_samples()
    layer = context.layer
    if layer.parameters:
        raise UserError(
            f"{layer.describe()}: the graph executor runs modules of the user only if they have no parameters"
        )
    if layer.program is not None and (
        len(layer.modules) != 1 or layer.program.reads_data or any(layer.program.crossings)
    ):
        raise UserError(
            f"{layer.describe()}: the graph executor does not replay operators of traced models; use the eager executor"
        )
    if len(layer.modules) > 1 or len(context.producers) > 1:
        raise UserError(f"{layer.describe()}: the graph executor runs single modules with one input only")
    module = context.read(context.fact("module", "own_module", [], context.strategy.p0))
    return _single_module(context, Call("", (module,)), layer.input_shape)


_KINDS: Mapping[str, Callable[[_Context], GlobalLayer]] = {
    "linear": _linear,
    "embedding": _embedding,
    "position": _position,
    "norm": _norm,
    "attention": _attention,
    "add": _add,
    "conv2d": _conv2d,
    "pool": _pool,
    "loss": _loss,
    "opaque": _opaque,
}
