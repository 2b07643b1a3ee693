"""Dropout on the ranks.

What is dropped is evenly split, so every rank draws for its own elements.  It draws from the layer, the rank and the number of
the pass, so that a repeated forward pass (recomputation) drops the same.

A layer graph says where something is dropped, not how much: that is the user's ``nn.Dropout``.  It is looked for in the module
that the layer stands for, then in the ones around it, nearest first; where all of one surrounding agree, that is it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from zlib import crc32

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

from .facts import find_module
from .kinds.attention import drops_probabilities
from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()

__all__ = ["Dropout", "check_dropouts", "dropout_of", "dropped", "dropping"]

Tensor = Any


class Dropout:
    """Drops elements with ``probability``, and scales up the others.

    Args:
        layer, number: the layer's name, and which of its dropouts this is; each draws for itself.
    """

    def __init__(self, probability: float, layer: str, number: int):
        self.probability = probability
        self._layer = layer
        self._number = number
        self._generator = flow.Generator()

    def __call__(self, x: Tensor, step: int | None, rank: int) -> Tensor:
        """``step``: the number of the pass; None outside of training."""
        if step is None or self.probability == 0:
            return x
        seed = crc32(f"{self._layer} {rank} {self._number}".encode())
        self._generator.manual_seed((seed + 1_000_003 * step) % 2**31)
        return flow._C.dropout(x, self.probability, True, False, self._generator, addend=None)


def dropped(x: Tensor, dropout: Dropout, step: int | None, ranks: Ranks) -> Tensor:
    """This rank's elements after a dropout."""
    return dropout(x, step, ranks.rank)


def dropping(dropout: Dropout, step: int | None, ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """The dropout as a function of a tensor alone."""
    return functools.partial(dropout, step=step, rank=ranks.rank)


def dropout_of(model: Any, path: str, layer: str, number: int) -> Dropout:
    """A dropout of a layer that stands for the module at a path.

    Raises:
        UserError: it is not clear which module of the model has its probability.
    """
    names = path.split(".")
    for end in range(len(names), -1, -1):
        around = find_module(model, ".".join(names[:end]))
        if around is None:
            continue
        found = {name: m.p for name, m in around.named_modules() if isinstance(m, flow.nn.Dropout)}
        if len(set(found.values())) == 1:
            return Dropout(float(next(iter(found.values()))), layer, number)
        if found:
            several = ", ".join(f"{name} ({p:g})" for name, p in sorted(found.items()))
            raise UserError(f"which of {several} drops behind it is not clear; they should be equal")
    raise UserError("it drops something, but no nn.Dropout of the model says how much")


def check_dropouts(module: Any, graph: LayerGraph) -> None:
    """Whether the graph knows that the model drops something.

    Raises:
        UserError: the model does and the graph does not.
    """
    if any("dropout" in layer.epilogue or drops_probabilities(layer) for layer in graph.layers):
        return
    opaque = tuple(path for layer in graph.layers if layer.kind == "opaque" for path in layer.modules)
    for path, part in module.named_modules():
        if isinstance(part, flow.nn.Dropout) and part.p > 0 and not path.startswith(opaque or ("\0",)):
            raise UserError(
                f"the plan's model drops nothing, this one's {path} drops with p = {part.p}: plan the model itself, or set p to 0"
            )
