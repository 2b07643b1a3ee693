"""Dropout on the ranks.

The elements are evenly split, so every rank draws for its own. The seed is derived from the layer, the rank and the number of the
pass, so that a repeated forward pass (recomputation) drops the same elements.

A layer graph contains the positions of dropouts, not their probabilities, which are those of the user's ``nn.Dropout`` modules.
The probability of a dropout is searched for in the module of its layer, then in the enclosing modules, innermost first. If all
``nn.Dropout`` modules inside one of them agree, their probability is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from zlib import crc32

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds.registry import kind_of

from .facts import find_module
from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()

__all__ = ["Dropout", "apply_dropout", "bind_dropout", "check_dropouts", "dropout_of"]

Tensor = Any


class Dropout:
    """Sets elements to zero with ``probability``, and divides the others by ``1 - probability``.

    Args:
        probability: Probability of dropping an element.
        layer: Name of the layer.
        number: Index of the dropout in its layer. Each dropout of a layer has its own seed.
    """

    def __init__(self, probability: float, layer: str, number: int):
        self.probability = probability
        self._layer = layer
        self._number = number
        self._generators: dict[str, Any] = {}  # by type of device

    def __call__(self, x: Tensor, step: int | None, rank: int) -> Tensor:
        """Apply the dropout of training pass ``step``. Return ``x`` if ``step`` is None, which means evaluation."""
        if step is None or self.probability == 0:
            return x
        seed = crc32(f"{self._layer} {rank} {self._number}".encode())
        device = x.device.type
        if device not in self._generators:
            self._generators[device] = flow.Generator(device=device)
        self._generators[device].manual_seed((seed + 1_000_003 * step) % 2**31)
        return flow._C.dropout(x, self.probability, True, False, self._generators[device], addend=None)


def apply_dropout(x: Tensor, dropout: Dropout, step: int | None, ranks: Ranks) -> Tensor:
    """Apply a dropout to the elements of this rank."""
    return dropout(x, step, ranks.rank)


def bind_dropout(dropout: Dropout, step: int | None, ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """Return the dropout as a function of the tensor only."""
    return functools.partial(dropout, step=step, rank=ranks.rank)


def dropout_of(model: Any, path: str, layer: str, number: int) -> Dropout:
    """Make a dropout of a layer, with the probability that the model has for it.

    Args:
        model: The user's model.
        path: Path of the layer's module.
        layer: Name of the layer.
        number: Index of the dropout in the layer.

    Raises:
        UserError: The ``nn.Dropout`` modules of the model do not determine the probability.
    """
    names = path.split(".")
    for end in range(len(names), -1, -1):
        module = find_module(model, ".".join(names[:end]))
        if module is None:
            continue
        found = {name: m.p for name, m in module.named_modules() if isinstance(m, flow.nn.Dropout)}
        if len(set(found.values())) == 1:
            return Dropout(float(next(iter(found.values()))), layer, number)
        if found:
            probabilities = ", ".join(f"{name} ({p:g})" for name, p in sorted(found.items()))
            raise UserError(f"the probability of its dropout is ambiguous: {probabilities}; they should be equal")
    raise UserError("it has a dropout, but no nn.Dropout of the model gives its probability")


def check_dropouts(module: Any, graph: LayerGraph) -> None:
    """Check that the graph contains dropouts if the model does.

    Raises:
        UserError: The model has dropouts, and the graph has none.
    """
    if any("dropout" in layer.epilogue or kind_of(layer.kind).drops_elements(layer) for layer in graph.layers):
        return
    opaque = tuple(path for layer in graph.layers if kind_of(layer.kind).is_opaque for path in layer.modules)
    for path, part in module.named_modules():
        if isinstance(part, flow.nn.Dropout) and part.p > 0 and not path.startswith(opaque or ("\0",)):
            raise UserError(
                f"the plan was made without dropout, but {path} has p = {part.p}: plan this model again, or set p to 0"
            )
