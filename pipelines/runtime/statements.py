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

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.epilogue import LOSSES
from autoddl.costmodel.strategy import Strategy

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
    "Statement",
    "X",
    "along",
    "epilogue",
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

    In addition to the results of statements and the layer's weights there are ``x`` and ``input_1``, ... (the inputs of the layer),
    ``data`` (for a layer without producers: its array of the model's input) and ``targets``, both whole arrays, ``num_samples`` (of
    all ranks), ``step`` (the number of the pass; None: not training), ``training``, and ``ranks``.

    Attributes:
        text: its name.
    """

    text: str


@dataclass(frozen=True)
class Fact:
    """A property of the user's model that the graph lacks, looked up once.

    Attributes:
        name: of the value, for exported files.
        function: of :mod:`facts`, called as ``function(model, path, *arguments)``.
        path: of the module.
        arguments: further arguments.
    """

    name: str
    function: str
    path: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Call:
    """``result = function(*arguments, **options)``.

    Attributes:
        function: a name, see the module's docstring.
        arguments: names, facts, mesh axes, layouts, numbers, and sequences of them.
        options: keyword arguments, likewise.
        result: the variables that are assigned.
        num_steps: number of the layer's priced steps that it executes.
        computes: whether the layer's compute time is the time of this call.
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
        tensors: variables that are kept.
        body: calls that assign ``x``.
    """

    tensors: tuple[str, ...]
    body: tuple[Call, ...]


Statement = Union[Call, Repeated]


@dataclass(frozen=True)
class LayerProgram:
    """The program of a layer.

    Attributes:
        weights: the variables of its parameters, in the order of :func:`kinds.registry.parameter_layouts`.
        statements: in order; they assign the layer's output to ``x``.
        checks: facts that are looked up to check that the layer can be run.
    """

    weights: tuple[str, ...]
    statements: tuple[Statement, ...]
    checks: tuple[Fact, ...] = ()


X, DATA, TARGETS, RANKS = Name("x"), Name("data"), Name("targets"), Name("ranks")


@dataclass(frozen=True)
class LayerContext:
    """A layer under its strategy, from which its program is built.

    Attributes:
        graph: the layer's graph.
        layer: a layer of the graph.
        strategy: of the layer.
        recompute: whether only evenly split inputs are kept for the backward pass.
    """

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
        """Path of the layer's module; of the first one if it has several."""
        return self.layer.modules[0] if self.layer.modules else self.layer.name

    @property
    def weights(self) -> tuple[str, ...]:
        """Variables for at most a weight and a bias."""
        return ("weight", "bias")[: len(self.layer.parameters)]

    def fact(self, name: str, function: str, *arguments: Any) -> Fact:
        return Fact(name, function, self.path, arguments)

    def input_data(self, rows: int, is_gathered: bool = False) -> list[Call]:
        """The statement that loads the model's input, for a layer without producers."""
        if self.producers:
            return []
        options = {"rows": rows, **({"is_gathered": True} if is_gathered else {})}
        return [Call("data", (DATA, self.layout, RANKS), options)]

    def recomputable(self, tensors: Sequence[str], body: Sequence[Call]) -> list[Statement]:
        """The body, as a `Repeated` if the layer is recomputed."""
        return [Repeated(tuple(tensors), tuple(body))] if self.recompute else list(body)


def along(collective: str, axis: Any) -> Call:
    """A collective that is one of the layer's priced steps."""
    return Call(f"ranks.{collective}", (X,), {"axis": axis, "dim": 2}, num_steps=1)


def epilogue(context: LayerContext) -> list[Call]:
    """Element-wise operations after a layer, on its evenly split output.

    A gate ("mul") halves the features: gate and factor alternate, and operations before it apply to the gate.
    """
    layer = context.layer
    operations = [operation for operation in layer.epilogue if operation not in LOSSES]
    calls = [Call("split_gate", (X,), result=("x", "factor"))] if "mul" in operations else []
    numbers: Iterator[int] = iter(range(len(operations)))
    for operation in operations:
        if operation == "mul":
            calls.append(Call("multiply", (X, Name("factor"))))
        elif operation == "dropout":
            number = next(numbers)
            dropout = context.fact(f"dropout_{number}", "dropout_of", layer.name, number)
            calls.append(Call("apply_dropout", (X, dropout, Name("step"), RANKS)))
        elif operation not in EPILOGUES:
            raise UserError(
                f"{layer.describe()}: {operation!r} behind it cannot be run, known are {', '.join(EPILOGUES)}, mul and dropout"
            )
        elif EPILOGUES[operation]:
            calls.append(Call(EPILOGUES[operation], (X,)))
    return calls
