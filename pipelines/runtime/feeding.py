"""Determines which input of the model each input layer reads. An input layer is a layer without producers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds.registry import kind_of

__all__ = ["feeds_of", "inputs_of"]


def feeds_of(graph: LayerGraph, given: Mapping[str, int | None]) -> dict[str, int | None]:
    """Map each input layer without a program to the index of its model input: `given`, else the default.

    The default of the first input layer is input 0. Further embeddings (of token types) read zeros by default, which is None.

    Args:
        graph: The layer graph.
        given: The user's indices of inputs, by layer name. None: zeros.

    Raises:
        UserError: ``given`` names a layer that is not an input layer, or an input layer has no default.

    >>> from autoddl.zoo import resolve_model
    >>> feeds_of(resolve_model("mlp:8,8,4"), {})
    {'fc1': 0}
    """
    readers = graph.data_readers
    for name in given:
        if name not in {layer.name for layer in readers}:
            names = ", ".join(layer.name for layer in readers)
            raise UserError(f"layer {name!r} reads no input of the model; the layers that do are {names}")
    feeds: dict[str, int | None] = {}
    for number, layer in enumerate(readers):
        if layer.program is not None and layer.name not in given:
            continue  # its program says what it reads
        feeds[layer.name] = given.get(layer.name, 0 if number == 0 else None)
        if number and layer.name not in given and not kind_of(layer.kind).is_lookup:
            raise UserError(
                f"{layer.describe()}: the model input that it reads is ambiguous; give feeds={{{layer.name!r}: INDEX}}"
            )
    return feeds


def inputs_of(
    graph: LayerGraph, feeds: Mapping[str, int | None], arrays: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the array that each input layer reads.

    Args:
        graph: The layer graph.
        feeds: Index of the model input of each input layer, from `feeds_of`.
        arrays: The inputs of the model.

    Raises:
        UserError: An index is not less than the number of inputs.
    """
    inputs = {}
    for name, index in feeds.items():
        if index is None:
            inputs[name] = np.zeros((len(arrays[0]), *graph[name].input_shape), dtype=np.int64)
        elif index >= len(arrays):
            raise UserError(f"{graph[name].describe()}: reads input {index}, but there are {len(arrays)}")
        else:
            inputs[name] = arrays[index]
    return inputs
