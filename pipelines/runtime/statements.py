"""What a layer does on a rank, as statements: the runtime runs them (:mod:`layers`), exported files have them in print.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy

from .layouts import Layout, layout_of

__all__ = [
    "ALL_STEPS",
    "DATA",
    "LOSSES",
    "RANKS",
    "TARGETS",
    "Call",
    "Fact",
    "Frame",
    "LayerProgram",
    "Name",
    "Repeated",
    "Statement",
    "X",
    "along",
    "epilogue",
]

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


@dataclass(frozen=True)
class Frame:
    """A layer at its strategy, of which a program is made.

    Attributes:
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


def along(collective: str, axis: Any) -> Call:
    """A collective that is one of the layer's priced steps."""
    return Call(f"ranks.{collective}", (X,), {"axis": axis, "dim": 2}, num_steps=1)


def epilogue(frame: Frame) -> list[Call]:
    """Element-wise operations behind a layer, on its evenly split output.

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
