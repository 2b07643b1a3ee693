"""The program of a layer on a rank, as statements. The runtime executes them (:mod:`layers`), exported files contain them as text.

A statement calls one function on the current result, ``x``, and assigns the next ``x``. A linear layer with a bias at (1,2,2):

    x = ranks.all_gather(x, axis=(2, stride 2), dim=2)          the first of the layer's priced steps
    x = matmul(x, weight)                                       its compute time
    x = ranks.reduce_scatter(x, axis=(2, stride 1), dim=2)      the second step
    x = add(x, bias)

Activations are local tensors (samples, rows, features) of the canonical layout; images are (samples, 1, all elements). The steps
are those of :mod:`autoddl.costmodel.layerwork`, in its order. The functions are those of :mod:`operations`, :mod:`attending`
and :mod:`losses`, methods of `Ranks` (``ranks.``) and OneFlow's own (``flow.``). Needs no OneFlow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.epilogue import GATES, LOSSES
from autoddl.costmodel.program import Scaled
from autoddl.costmodel.strategy import Strategy, shard_axes

from .comm.layouts import Layout, layout_of

__all__ = [
    "ALL_STEPS",
    "DATA",
    "RANKS",
    "TARGETS",
    "Call",
    "Fact",
    "LayerContext",
    "LayerProgram",
    "Name",
    "Repeated",
    "Size",
    "Statement",
    "X",
    "along",
    "epilogue",
    "keeping_gate",
]

#: Value of `Call.num_steps`: all remaining steps.
ALL_STEPS = -1
#: Functions of element-wise operations after a layer, by OneFlow's operator names and the usual names; "": no operation.
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
    "elu": "elu",
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

    Statements may use their results, the layer's weights, and these variables:

    - ``x``, ``input_1``, ...: the inputs of the layer.
    - ``data``: the array of the model's input that a layer without producers reads, with the samples of all ranks.
    - ``targets``: the array of targets, with the samples of all ranks.
    - ``argument_0``, ``argument_1``, ...: the arrays of all arguments of the model, with the samples of all ranks.
    - ``num_samples``: the number of samples of all ranks.
    - ``own_samples_count``: the number of samples of this rank.
    - ``step``: the number of the training pass; None in evaluation.
    - ``training``: whether the pass is a training pass.
    - ``ranks``: the `Ranks`.

    Attributes:
        text: The name of the variable.
    """

    text: str


@dataclass(frozen=True)
class Size:
    """A number that grows with the samples of a pass.

    Attributes:
        number: The number as a function of the number of samples.
        samples: The variable with the number of samples.
    """

    number: Scaled
    samples: Name


@dataclass(frozen=True)
class Fact:
    """A property of the user's model that the layer graph does not contain. It is read once, when the layer is built.

    Attributes:
        name: Name of the value in exported files.
        function: Name of a function of :mod:`facts`, called as ``function(model, path, *arguments)``.
        path: Path of the module.
        arguments: Further arguments of the function.
    """

    name: str
    function: str
    path: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Call:
    """``result = function(*arguments, **options)``.

    Attributes:
        function: Name of the function; see the module's docstring.
        arguments: Names, facts, mesh axes, layouts, numbers, and sequences of them.
        options: Keyword arguments, with the same kinds of values.
        result: Names of the variables that are assigned.
        num_steps: Number of the layer's priced steps that the call executes.
        computes: Whether the layer's compute time is the time of this call.
    """

    function: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    result: tuple[str, ...] = ("x",)
    num_steps: int = 0
    computes: bool = False


@dataclass(frozen=True)
class Repeated:
    """``x = body(tensors)`` with recomputation: only the tensors are kept, and the backward pass runs the body again.

    Attributes:
        tensors: Names of the variables that are kept.
        body: The calls, which assign ``x``.
    """

    tensors: tuple[str, ...]
    body: tuple[Call, ...]


Statement = Union[Call, Repeated]


@dataclass(frozen=True)
class LayerProgram:
    """The program of a layer.

    Attributes:
        weights: Names of the variables of its parameters, in the order of :func:`kinds.registry.parameter_layouts`.
        statements: The statements in order. They assign the layer's output to ``x``.
        checks: Facts that are read when the layer is built, to check that the layer can be run.
    """

    weights: tuple[str, ...]
    statements: tuple[Statement, ...]
    checks: tuple[Fact, ...] = ()


X, DATA, TARGETS, RANKS = Name("x"), Name("data"), Name("targets"), Name("ranks")


@dataclass(frozen=True)
class LayerContext:
    """A layer under its strategy, from which its program is built.

    Attributes:
        graph: The layer graph.
        layer: A layer of the graph.
        strategy: The strategy of the layer.
        recompute: Whether only evenly split inputs are kept for the backward pass.
        attention: How attention is computed, one of :data:`autoddl.costmodel.workload.ATTENTIONS`.
        is_rerun: Whether the backward pass runs the layer again, alone (``recompute``) or with its block.
        shapes: Shapes of the layer's stored parameters, as far as a rank computes with them; empty unless shards are gathered.
        is_mirrored: Whether the positions of all samples of the model are in mirrored order (:mod:`sequences`).
    """

    graph: LayerGraph
    layer: Layer
    strategy: Strategy
    recompute: bool
    attention: str
    is_rerun: bool
    shapes: tuple[tuple[int, ...], ...]
    is_mirrored: bool

    @property
    def order(self) -> Mapping[str, Any]:
        """The option ``is_mirrored`` of calls, if it is not the default."""
        return {"is_mirrored": True} if self.is_mirrored else {}

    @property
    def layout(self) -> Layout:
        return layout_of(self.layer, self.strategy)

    @property
    def producers(self) -> tuple[str, ...]:
        return self.graph.inputs(self.layer.name)

    @property
    def path(self) -> str:
        """Path of the layer's module, or of its first module if it has several."""
        return self.layer.modules[0] if self.layer.modules else self.layer.name

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the variables of a weight and a bias, as far as the layer has them."""
        return ("weight", "bias")[: len(self.layer.parameters)]

    @property
    def shards(self) -> tuple[Axis, ...]:
        """The mesh axes that divide the layer's weights of two or more dimensions, which each pass gathers."""
        return shard_axes(self.layout.copies, self.strategy.hybrid)[0] if self.strategy.zero == 3 else ()

    def gathering(self, weights: Sequence[str]) -> list[Call]:
        """Return the statement that gathers weights of two or more dimensions, the first ones of the layer, if they are divided."""
        if not self.shards:
            return []
        arguments = ([Name(weight) for weight in weights], list(self.shards), list(self.shapes[: len(weights)]), RANKS)
        return [Call("gather_weights", arguments, result=tuple(weights), num_steps=len(self.shards))]

    def fact(self, name: str, function: str, *arguments: Any) -> Fact:
        return Fact(name, function, self.path, arguments)

    def input_data(self, rows: int, is_gathered: bool = False) -> list[Call]:
        """Return the statement that loads the model's input if the layer has no producers, else no statement."""
        if self.producers:
            return []
        options = {"rows": rows, **({"is_gathered": True} if is_gathered else {}), **self.order}
        return [Call("data", (DATA, self.layout, RANKS), options)]

    def recomputable(self, tensors: Sequence[str], body: Sequence[Call]) -> list[Statement]:
        """Return the body, inside a `Repeated` if the layer is recomputed."""
        return [Repeated(tuple(tensors), tuple(body))] if self.recompute else list(body)


def along(collective: str, axis: Any) -> Call:
    """Return the call of a collective along the features, which is one of the layer's priced steps."""
    return Call(f"ranks.{collective}", (X,), {"axis": axis, "dim": 2}, num_steps=1)


def epilogue(context: LayerContext) -> list[Call]:
    """Return the calls of the element-wise operations after a layer, on its evenly split output.

    A gate (``mul``, ``mul_last``) halves the features. The two halves of the product alternate along the features. Operations
    before it apply to the gate.

    Raises:
        UserError: An operation is not supported.
    """
    layer = context.layer
    operations = [operation for operation in layer.epilogue if operation not in LOSSES]
    halves = {"mul": ("x", "factor"), "mul_last": ("factor", "x")}
    calls = [Call("split_gate", (X,), result=halves[gate]) for gate in GATES & set(operations)]
    numbers: Iterator[int] = iter(range(len(operations)))
    for operation in operations:
        if operation in GATES:
            calls.append(Call("multiply", (X, Name("factor"))))
        elif operation == "dropout":
            number = next(numbers)
            stream = layer.dropouts[number : number + 1]
            dropout = context.fact(f"dropout_{number}", "dropout_of", layer.name, number, *stream)
            arguments = (X, dropout, Name("step"), RANKS, context.layout, Name("num_samples"), layer.output_shape)
            calls.append(Call("apply_dropout", arguments, context.order))
        elif function := epilogue_function(layer, operation):
            calls.append(Call(function, (X,)))
    return calls


def keeping_gate(calls: Sequence[Call]) -> list[Statement]:
    """Return the statements of `epilogue` such that gate and factor alone are kept, and the gate's activation is computed again."""
    functions = [call.function for call in calls]
    if "split_gate" not in functions or functions.index("multiply") == functions.index("split_gate") + 1:
        return list(calls)
    first, end = functions.index("split_gate"), functions.index("multiply") + 1
    # The result of the product before is gate and factor.
    return [*calls[:first], Repeated((X.text,), tuple(calls[first:end])), *calls[end:]]


def epilogue_function(layer: Layer, operation: str) -> str:
    """Return the function of an element-wise operation after a layer; "" if there is nothing to do.

    Raises:
        UserError: The operation is not supported.
    """
    if operation not in EPILOGUES:
        raise UserError(
            f"{layer.describe()}: the operation {operation!r} after it is not supported; "
            f"supported are {', '.join(EPILOGUES)}, mul and dropout"
        )
    return EPILOGUES[operation]
