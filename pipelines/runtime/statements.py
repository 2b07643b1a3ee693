"""What each kind of layer does on a rank, as statements: the runtime runs them (:mod:`layers`), exported files have them in print.

A statement calls one function on the result so far, ``x``, and gives the next ``x``.  A linear layer with a bias at (1,2,2):

    x = ranks.all_gather(x, axis=(2, stride 2), dim=2)          the first of the layer's priced steps
    x = matmul(x, weight)                                       its compute time
    x = ranks.reduce_scatter(x, axis=(2, stride 1), dim=2)      the second step
    x = add(x, bias)

Activations are local tensors (samples, rows, features) of the canonical layout; images are (samples, 1, all elements).  The steps
are those of :mod:`autoddl.costmodel.layerwork`, in its order.  The functions are those of :mod:`operations`, :mod:`attending`
and :mod:`losses`, methods of `Ranks` (``ranks.``) and OneFlow's own (``flow.``).  Needs no OneFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Union

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy

from .layouts import Layout, are_apart, attention_sections, layout_of, product_order

__all__ = ["ALL_STEPS", "LOSSES", "Call", "Fact", "LayerProgram", "Name", "Repeated", "Statement", "layer_program"]

#: As `Call.num_steps`: all that are left.
ALL_STEPS = -1
#: Element-wise losses that end a model.
LOSSES = frozenset({"mse_loss", "l1_loss"})
#: Element-wise operations behind a layer, by OneFlow's names of the operators and the usual ones; "" changes nothing.
EPILOGUES: Mapping[str, str] = {
    "relu": "flow.relu",
    "gelu": "functional.gelu",
    "fast_gelu": "tanh_gelu",
    "gelu_tanh": "tanh_gelu",
    "quick_gelu": "quick_gelu",
    "silu": "functional.silu",
    "sigmoid": "flow.sigmoid",
    "sigmoid_v2": "flow.sigmoid",
    "tanh": "flow.tanh",
    "elu": "functional.elu",
    "selu": "functional.selu",
    "mish": "functional.mish",
    "softplus": "functional.softplus",
    "square": "flow.square",
    "abs": "flow.abs",
    "exp": "flow.exp",
    "identity": "",
}


@dataclass(frozen=True)
class Name:
    """A variable.

    Beside what statements make and the layer's weights there are ``x`` and ``input_1``, ... (what the layer reads), ``data``
    (of a layer that reads none: its part of the model's input) and ``targets``, both whole arrays, ``num_samples`` (of all ranks),
    ``step`` (the number of the pass; None outside of training), ``training``, and ``ranks``.
    """

    text: str


@dataclass(frozen=True)
class Fact:
    """What the user's model says and the graph does not, looked up once: ``function(model, path, *arguments)`` of :mod:`facts`."""

    name: str
    function: str
    path: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Call:
    """``result = function(*arguments, **options)``.

    Attributes:
        function: a name, see the module's docstring.
        arguments, options: names, facts, mesh axes, layouts, numbers, and sequences of them.
        result: the variables that are given a value.
        num_steps: how many of the layer's priced steps run in it.
        computes: whether it is what the layer's compute time is of.
    """

    function: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    result: tuple[str, ...] = ("x",)
    num_steps: int = 0
    computes: bool = False


@dataclass(frozen=True)
class Repeated:
    """``x = body(tensors)``, of which only the tensors are kept: the backward pass runs it again."""

    tensors: tuple[str, ...]
    body: tuple[Call, ...]


Statement = Union[Call, Repeated]


@dataclass(frozen=True)
class LayerProgram:
    """What a layer does.

    Attributes:
        weights: the variables of its parameters, in the order of :func:`layouts.parameter_layouts`.
        statements: in order; they end with the layer's output in ``x``.
        checks: facts that are looked up to see that the layer can be run.
    """

    weights: tuple[str, ...]
    statements: tuple[Statement, ...]
    checks: tuple[Fact, ...] = ()


X, DATA, TARGETS, RANKS = Name("x"), Name("data"), Name("targets"), Name("ranks")


def layer_program(graph: LayerGraph, layer: Layer, strategy: Strategy, recompute: bool) -> LayerProgram:
    """A layer at its strategy.

    Args:
        recompute: whether only evenly split inputs are kept for the backward pass.

    Raises:
        UserError: the layer cannot be run; it is named.
    """
    return _BUILDERS[layer.kind](_Frame(graph, layer, strategy, recompute))


@dataclass(frozen=True)
class _Frame:
    graph: LayerGraph
    layer: Layer
    strategy: Strategy
    recompute: bool

    @property
    def layout(self) -> Layout:
        return layout_of(self.layer, self.strategy)

    @property
    def producers(self) -> tuple[str, ...]:
        return self.graph.inputs(self.layer.name)

    @property
    def path(self) -> str:
        """Of the module that the layer stands for; the first one, where it stands for several."""
        return self.layer.modules[0] if self.layer.modules else self.layer.name

    @property
    def weights(self) -> tuple[str, ...]:
        """Names for at most a weight and a bias."""
        return ("weight", "bias")[: len(self.layer.parameters)]

    def fact(self, name: str, function: str, *arguments: Any) -> Fact:
        return Fact(name, function, self.path, arguments)

    def fed(self, rows: int, is_gathered: bool = False) -> list[Call]:
        """The data, for a layer that reads it itself."""
        if self.producers:
            return []
        options = {"rows": rows, **({"is_gathered": True} if is_gathered else {})}
        return [Call("data", (DATA, self.layout, RANKS), options)]

    def kept(self, tensors: Sequence[str], body: Sequence[Call]) -> list[Statement]:
        """The body, repeated where the layer is recomputed."""
        return [Repeated(tuple(tensors), tuple(body))] if self.recompute else list(body)


# ---- Products --------------------------------------------------------------------------------------------------------------


def _linear(frame: _Frame) -> LayerProgram:
    layer, layout = frame.layer, frame.layout
    order = product_order(frame.graph, layer)
    count = len(order.widths) if are_apart(order, frame.strategy) else 1
    has_bias = any(len(p.shape) == 1 for p in layer.parameters)
    weights, biases = _numbered("weight", count), _numbered("bias", count) if has_bias else ()
    widths = [width // order.num_groups for width in order.section_widths]
    product = _side_by_side(weights, "weight", widths)
    if layout.summa:
        options = {"rows": layout.axes(0), "columns": layout.axes(1), "ranks": RANKS, "is_first": not frame.producers}
        product.append(Call("summa_product", (X, Name("weight")), options, num_steps=ALL_STEPS, computes=True))
    else:
        # The first layer reads what it needs.
        product += [_along("all_gather", axis) for axis in layout.axes(1)] if frame.producers else []
        product.append(Call("matmul", (X, Name("weight")), computes=True))
    rest = [] if layout.summa else [_along("reduce_scatter", axis) for axis in reversed(layout.axes(2))]
    if has_bias:
        rest += [*_side_by_side(biases, "bias", widths), Call("add", (X, Name("bias")))]
    rest += _epilogue(frame)
    statements: list[Statement] = [*frame.fed(prod(layer.input_shape[:-1]), is_gathered=not layout.summa)]
    if layer.kept_elements:
        # Something behind the product keeps its argument: all is repeated.
        statements += frame.kept(("x", *weights, *biases), [*product, *rest])
    elif layout.summa:
        statements += [*product, *rest]  # keeps no more than its operands' shards anyway
    else:
        statements += [*frame.kept(("x", *weights), product), *rest]
    if LOSSES & set(layer.epilogue):
        options = {"is_squared": "mse_loss" in layer.epilogue}
        statements += [
            Call("data", (TARGETS, layout, RANKS), {"rows": layer.rows}, ("expected",)),
            Call("mean_of_differences", (X, Name("expected"), RANKS), options),
        ]
    return LayerProgram((*weights, *biases), tuple(statements))


def _numbered(stem: str, count: int) -> tuple[str, ...]:
    return (stem,) if count == 1 else tuple(f"{stem}_{i}" for i in range(count))


def _side_by_side(parts: Sequence[str], result: str, widths: Sequence[int]) -> list[Call]:
    if len(parts) == 1:
        return []
    return [Call("side_by_side", (list(map(Name, parts)),), {"widths": list(widths)}, (result,))]


def _along(collective: str, axis: Any) -> Call:
    return Call(f"ranks.{collective}", (X,), {"axis": axis, "dim": 2}, num_steps=1)


def _embedding(frame: _Frame) -> LayerProgram:
    layer, layout = frame.layer, frame.layout
    options = {"vocabulary": layer.attributes["vocabulary"], "rows": layer.rows}
    body = [
        Call("lookup", (DATA, Name("weight"), layout, RANKS), options, computes=True),
        *(_along("reduce_scatter", axis) for axis in reversed(layout.axes(2))),
    ]
    statements = [*frame.kept(("weight",), body), *_epilogue(frame)]
    return LayerProgram(("weight",), tuple(statements), (frame.fact("", "check_table"),))


# ---- On the canonical layout -----------------------------------------------------------------------------------------------


def _position(frame: _Frame) -> LayerProgram:
    call = Call("positions", (Name("weight"), Name("num_samples"), frame.layout), {"rows": frame.layer.rows})
    return LayerProgram(frame.weights, (call,))


def _attention(frame: _Frame) -> LayerProgram:
    layer, attributes, producers = frame.layer, frame.layer.attributes, frame.producers
    groups, sections = attention_sections(layer)
    num_groups = groups // frame.layout.num_parts
    is_grouped = len(producers) == 1 and frame.graph[producers[0]].kind == "linear"
    if len(producers) not in (1, 3):  # 0: it reads the data
        raise UserError(
            f"{layer.describe()}: reads {len(producers)} tensors, should read q, k and v or all of them in one"
        )
    statements: list[Statement] = []
    if len(producers) == 3:
        statements.append(Call("heads_together", ([X, Name("input_1"), Name("input_2")],), {"groups": num_groups}))
    elif not is_grouped:
        if frame.layout.num_parts > 1:
            raise UserError(
                f"{layer.describe()}: it reads {producers[0]!r}, whose features cannot be split into heads; "
                "only a linear layer's can"
            )
        statements.append(Call("flow.split", (X, list(sections)), {"dim": 2}, ("parts",)))
        statements.append(Call("heads_together", (Name("parts"),), {"groups": num_groups}))
    options: dict[str, Any] = {
        "groups": num_groups,
        "group_heads": attributes["heads"] // groups,
        "head_dim": attributes["head_dim"],
        "causal": bool(attributes["causal"]),
        "angles": frame.fact("angles", "angles_of", layer.rows, attributes["head_dim"]),
    }
    if drops_probabilities(layer):
        dropout = frame.fact("dropout", "dropout_of", layer.name, -1)
        statements.append(Call("dropping", (dropout, Name("step"), RANKS), result=("drop",)))
        options["drop"] = Name("drop")
    statements += frame.kept(("x",), [Call("attend", (X,), options, computes=True)])
    return LayerProgram((), tuple(statements))


def drops_probabilities(layer: Layer) -> bool:
    """Whether attention drops probabilities: the backward pass then keeps more than these."""
    return layer.kind == "attention" and layer.kept_elements > layer.attributes["heads"] * layer.rows**2


def _norm(frame: _Frame) -> LayerProgram:
    layer, layout = frame.layer, frame.layout
    options = {
        "features": layer.attributes["features"],
        "is_centred": layer.attributes["statistics"] == 2,
        "eps": frame.fact("eps", "eps_of"),
        "axes": layout.axes(1),
        "ranks": RANKS,
    }
    body = [Call("normalised", (X,), options, num_steps=ALL_STEPS, computes=True)]
    body += [Call(name, (X, Name(weight))) for name, weight in zip(("multiply", "add"), frame.weights)]
    statements = [
        *frame.fed(prod(layer.input_shape[:-1])),
        *frame.kept(("x", *frame.weights), body),
        *_epilogue(frame),
    ]
    return LayerProgram(frame.weights, tuple(statements))


def _add(frame: _Frame) -> LayerProgram:
    count = len(frame.producers)
    if count < 2:
        raise UserError(f"{frame.layer.describe()}: it adds an input of the model, which cannot be run")
    call = Call("add", (X, *(Name(f"input_{i}") for i in range(1, count))))
    return LayerProgram((), (call, *_epilogue(frame)))


def _loss(frame: _Frame) -> LayerProgram:
    call = Call("cross_entropy", (X, TARGETS, frame.layout, RANKS), num_steps=ALL_STEPS, computes=True)
    return LayerProgram((), (call,))


# ---- On whole samples ------------------------------------------------------------------------------------------------------


def _conv2d(frame: _Frame) -> LayerProgram:
    bias = Name("bias") if len(frame.weights) > 1 else None
    options = {"options": frame.fact("options", "convolution_options")}
    body = [
        Call("convolve", (X, frame.layer.input_shape, Name("weight"), bias), options, computes=True),
        *_epilogue(frame),
    ]
    return LayerProgram(frame.weights, (*frame.fed(1), *frame.kept(("x", *frame.weights), body)))


def _opaque(frame: _Frame) -> LayerProgram:
    """The user's own module, on whole samples."""
    layer, graph = frame.layer, frame.graph
    if len(layer.modules) > 1:
        raise UserError(
            f"{layer.describe()}: it stands for {', '.join(layer.modules)}, should stand for one module of the model to be run"
        )
    for parameter in layer.parameters:
        if not parameter.name.startswith(f"{frame.path}."):
            raise UserError(
                f"{layer.describe()}: its parameter {parameter.name} does not belong to module {frame.path!r}"
            )
    names = [parameter.name[len(frame.path) + 1 :] for parameter in layer.parameters]
    weights = tuple(f"weight_{i}" for i in range(len(names)))
    inputs = ("x", *(f"input_{i}" for i in range(1, len(frame.producers))))
    shapes = [graph[producer].output_shape for producer in frame.producers]
    shapes = [layer.input_shape] if len(shapes) <= 1 else shapes
    # Outside of sequences the one row of a sample is the sample itself.
    shapes = [shape[1:] if len(shape) == 2 and shape[0] == 1 else shape for shape in shapes]
    own = frame.fact("module", "own_module", names, frame.strategy.p0)
    arguments = (own, list(map(Name, inputs)), shapes, list(map(Name, weights)))
    body = [
        Call("run_module", arguments, {"training": Name("training")}, computes=True),
        *_epilogue(frame),
    ]
    return LayerProgram(weights, (*frame.fed(1), *frame.kept((*inputs, *weights), body)))


# ---- Behind a layer --------------------------------------------------------------------------------------------------------


def _epilogue(frame: _Frame) -> list[Call]:
    """Element-wise operations on the evenly split output.

    A gate ("mul") halves the features: they alternate, and what comes before it is done to the first of each pair.
    """
    layer = frame.layer
    operations = [operation for operation in layer.epilogue if operation not in LOSSES]
    calls = [Call("gate_and_factor", (X,), result=("x", "factor"))] if "mul" in operations else []
    numbers: Iterator[int] = iter(range(len(operations)))
    for operation in operations:
        if operation == "mul":
            calls.append(Call("multiply", (X, Name("factor"))))
        elif operation == "dropout":
            number = next(numbers)
            dropout = frame.fact(f"dropout_{number}", "dropout_of", layer.name, number)
            calls.append(Call("dropped", (X, dropout, Name("step"), RANKS)))
        elif operation not in EPILOGUES:
            raise UserError(
                f"{layer.describe()}: {operation!r} behind it cannot be run, known are {', '.join(EPILOGUES)}, mul and dropout"
            )
        elif EPILOGUES[operation]:
            calls.append(Call(EPILOGUES[operation], (X,)))
    return calls


_BUILDERS: Mapping[str, Callable[[_Frame], LayerProgram]] = {
    "linear": _linear,
    "embedding": _embedding,
    "position": _position,
    "attention": _attention,
    "norm": _norm,
    "add": _add,
    "conv2d": _conv2d,
    "loss": _loss,
    "opaque": _opaque,
}
