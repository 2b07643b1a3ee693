"""The programs of layers on ranks, by the name of their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.registry import kind_of, source_of
from autoddl.costmodel.strategy import Strategy

from ..statements import LayerContext, LayerProgram
from . import add, attention, conv2d, embedding, linear, loss, norm, opaque, position

__all__ = ["layer_program", "register", "registered_functions"]

Program = Callable[[LayerContext], LayerProgram]

_PROGRAMS: dict[str, Program] = {
    "linear": linear.program,
    "embedding": embedding.program,
    "position": position.program,
    "attention": attention.program,
    "norm": norm.program,
    "add": add.program,
    "conv2d": conv2d.program,
    "loss": loss.program,
    "opaque": opaque.program,
}
_FUNCTIONS: dict[str, Callable[..., object]] = {}


def register(kind: str, program: Program, functions: Sequence[Callable[..., object]] = ()) -> None:
    """Register the program of a kind of layer.

    Args:
        kind: registered in :mod:`autoddl.costmodel.kinds`.
        program: returns the statements of a layer.
        functions: that statements call by name, in addition to those of the runtime; exported files contain their source.

    Raises:
        UserError: the kind is unknown, or another function has the name of one of these.
    """
    kind_of(kind)
    for function in functions:
        if source_of(_FUNCTIONS.get(function.__name__, function)) != source_of(function):
            raise UserError(f"kind {kind!r}: another function is called {function.__name__!r}")
    _FUNCTIONS.update({function.__name__: function for function in functions})
    _PROGRAMS[kind] = program


def registered_functions() -> Mapping[str, Callable[..., object]]:
    """The functions of kinds that were registered with `register`, by name."""
    return _FUNCTIONS


def layer_program(graph: LayerGraph, layer: Layer, strategy: Strategy, recompute: bool) -> LayerProgram:
    """The program of a layer under its strategy.

    Args:
        graph: the layer's graph.
        layer: a layer of the graph.
        strategy: of the layer.
        recompute: whether only evenly split inputs are kept for the backward pass.

    Raises:
        UserError: the layer cannot be run; it is named.
    """
    if layer.kind not in _PROGRAMS:
        raise UserError(f"{layer.describe()}: no program is registered that runs layers of this kind on ranks")
    return _PROGRAMS[layer.kind](LayerContext(graph, layer, strategy, recompute))
