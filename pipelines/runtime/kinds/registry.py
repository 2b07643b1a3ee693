"""What layers do on ranks, by the name of their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy

from ..statements import Frame, LayerProgram
from . import add, attention, conv2d, embedding, linear, loss, norm, opaque, position

__all__ = ["layer_program", "register", "registered_functions"]

Program = Callable[[Frame], LayerProgram]

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
    """Say what layers of a kind do on a rank.

    Args:
        kind: registered in :mod:`autoddl.costmodel.kinds`.
        program: makes the statements of a layer.
        functions: that statements call by name, beside those of the runtime; exported files contain their source.

    Raises:
        UserError: the kind is unknown, or another function has the name of one of these.
    """
    kind_of(kind)
    for function in functions:
        known = _FUNCTIONS.get(function.__name__, function)
        # A file that was loaded twice has two of one name.
        if (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise UserError(f"kind {kind!r}: another function is called {function.__name__!r}")
    _FUNCTIONS.update({function.__name__: function for function in functions})
    _PROGRAMS[kind] = program


def registered_functions() -> Mapping[str, Callable[..., object]]:
    """The functions of kinds from outside of the package, by name."""
    return _FUNCTIONS


def layer_program(graph: LayerGraph, layer: Layer, strategy: Strategy, recompute: bool) -> LayerProgram:
    """A layer at its strategy.

    Args:
        recompute: whether only evenly split inputs are kept for the backward pass.

    Raises:
        UserError: the layer cannot be run; it is named.
    """
    if layer.kind not in _PROGRAMS:
        raise UserError(f"{layer.describe()}: nothing is registered that runs layers of this kind on ranks")
    return _PROGRAMS[layer.kind](Frame(graph, layer, strategy, recompute))
