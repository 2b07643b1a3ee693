"""Dropout on the ranks.

What is dropped is evenly split, so every rank draws for its own elements.  It draws from the layer, the rank and the number of
the pass, so that a repeated forward pass (recomputation) drops the same.

A layer graph says where something is dropped, not how much: that is the user's ``nn.Dropout``.  It is looked for in the module
that the layer stands for, then in the ones around it, nearest first; where all of one surrounding agree, that is it.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph

from .load import load_oneflow
from .setting import LayerSetting, find_module

flow = load_oneflow()

__all__ = ["Dropout", "check_dropouts", "dropout_of_attention", "dropouts_behind"]

Tensor = Any


class Dropout:
    """Drops elements with ``probability``, and scales up the others."""

    def __init__(self, probability: float, setting: LayerSetting, number: int):
        self.probability = probability
        self._seed = crc32(f"{setting.layer.name} {setting.stepper.rank} {number}".encode())
        self._generator = flow.Generator()

    def __call__(self, x: Tensor, step: int | None) -> Tensor:
        """``step``: the number of the pass; None outside of training."""
        if step is None or self.probability == 0:
            return x
        self._generator.manual_seed((self._seed + 1_000_003 * step) % 2**31)
        return flow._C.dropout(x, self.probability, True, False, self._generator, addend=None)


def dropouts_behind(setting: LayerSetting) -> list[Dropout]:
    """The dropouts of a layer's epilogue, in order.

    Raises:
        UserError: it is not clear which module of the model has their probability.
    """
    count = setting.layer.epilogue.count("dropout")
    return [Dropout(_probability(setting), setting, number) for number in range(count)]


def dropout_of_attention(setting: LayerSetting) -> Dropout | None:
    """The dropout of attention's probabilities: the backward pass then keeps more than the probabilities."""
    layer = setting.layer
    if not _drops_probabilities(layer):
        return None
    return Dropout(_probability(setting), setting, -1)


def check_dropouts(module: Any, graph: LayerGraph) -> None:
    """Whether the graph knows that the model drops something.

    Raises:
        UserError: the model does and the graph does not.
    """
    if any("dropout" in layer.epilogue or _drops_probabilities(layer) for layer in graph.layers):
        return
    opaque = tuple(path for layer in graph.layers if layer.kind == "opaque" for path in layer.modules)
    for path, part in module.named_modules():
        if isinstance(part, flow.nn.Dropout) and part.p > 0 and not path.startswith(opaque or ("\0",)):
            raise UserError(
                f"the plan's model drops nothing, this one's {path} drops with p = {part.p}: plan the model itself, or set p to 0"
            )


def _drops_probabilities(layer: Layer) -> bool:
    return layer.kind == "attention" and layer.kept_elements > layer.attributes["heads"] * layer.rows**2


def _probability(setting: LayerSetting) -> float:
    layer = setting.layer
    path = (layer.modules[0] if layer.modules else layer.name).split(".")
    for end in range(len(path), -1, -1):
        around = find_module(setting.module, ".".join(path[:end]))
        if around is None:
            continue
        found = {name: m.p for name, m in around.named_modules() if isinstance(m, flow.nn.Dropout)}
        if len(set(found.values())) == 1:
            return float(next(iter(found.values())))
        if found:
            several = ", ".join(f"{name} ({p:g})" for name, p in sorted(found.items()))
            raise UserError(
                f"{layer.describe()}: which of {several} drops behind it is not clear; they should be equal"
            )
    raise UserError(f"{layer.describe()}: it drops something, but no nn.Dropout of the model says how much")
