"""Which of a model's inputs each of its layers reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds.registry import kind_of

__all__ = ["feeds_of", "inputs_of"]


def feeds_of(graph: LayerGraph, given: Mapping[str, int | None]) -> dict[str, int | None]:
    """Which input each layer that reads the data itself reads: what the user says, else in order.

    Tables that are looked up after the first one without an input of their own (token types) read zeros, as models do.

    Raises:
        UserError: a layer that is given an input reads none, or it is not clear which one a layer reads.
    """
    readers = graph.data_readers
    for name in given:
        if name not in {layer.name for layer in readers}:
            names = ", ".join(layer.name for layer in readers)
            raise UserError(f"layer {name!r} reads no input of the model; these do: {names}")
    feeds: dict[str, int | None] = {}
    for number, layer in enumerate(readers):
        feeds[layer.name] = given.get(layer.name, 0 if number == 0 else None)
        if number and layer.name not in given and not kind_of(layer.kind).is_lookup:
            raise UserError(
                f"{layer.describe()}: it is not clear which input it reads; give feeds={{{layer.name!r}: NUMBER}}"
            )
    return feeds


def inputs_of(
    graph: LayerGraph, feeds: Mapping[str, int | None], arrays: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """What each of these layers reads, of the model's inputs.

    Raises:
        UserError: there are not as many inputs.
    """
    inputs = {}
    for name, which in feeds.items():
        if which is None:
            inputs[name] = np.zeros((len(arrays[0]), *graph[name].input_shape), dtype=np.int64)
        elif which >= len(arrays):
            raise UserError(f"{graph[name].describe()}: reads input {which}, but there are {len(arrays)}")
        else:
            inputs[name] = arrays[which]
    return inputs
