"""Compares the parameters of the user's model with those of a plan, and reads their values."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

from .backend import HOST
from .facts import find_module
from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()

__all__ = ["check_parameters", "find_parameter", "first_names", "values_of"]


def check_parameters(module: Any, graph: LayerGraph) -> None:
    """Check that a model has the parameters of a graph: the same names, shapes and ties.

    Raises:
        UserError: The model and the graph differ. The message names the first parameter that differs.
    """
    unseen = first_names(module)
    for layer in graph.layers:
        for parameter in layer.parameters:
            tensor = find_parameter(module, parameter.name)
            if tensor is None:
                raise UserError(
                    f"the plan was made for another model: it contains parameter {parameter.name} of {layer.describe()}, "
                    "which the model does not have"
                )
            if tuple(tensor.shape) != parameter.shape:
                raise UserError(
                    f"the plan was made for another model: parameter {parameter.name} has shape {parameter.shape} "
                    f"in the plan, and {tuple(tensor.shape)} in the model"
                )
            if parameter.tied_to is None and id(tensor) not in unseen:
                raise UserError(
                    f"the plan was made for another model: parameter {parameter.name} is tied to no other parameter "
                    "in the plan, but shared in the model"
                )
            if parameter.tied_to is not None and id(tensor) in unseen:
                raise UserError(
                    f"the plan was made for another model: parameter {parameter.name} is tied to {parameter.tied_to} "
                    "in the plan, but not in the model"
                )
            unseen.pop(id(tensor), None)
    for name in unseen.values():
        if name in graph.unused:
            continue
        raise UserError(
            f"the plan was made for another model: the model has parameter {name}, which the plan does not contain"
        )


def first_names(model: Any) -> dict[int, str]:
    """Map the ``id`` of each parameter to its name in the model; a shared parameter has its first name."""
    return {id(tensor): name for name, tensor in model.named_parameters()}


def find_parameter(module: Any, path: str) -> Any:
    """Return the parameter at a path, or None if there is none."""
    parent, _, name = path.rpartition(".")
    owner = find_module(module, parent)
    return None if owner is None else owner._parameters.get(name)


def values_of(module: Any, ranks: Ranks) -> dict[str, np.ndarray]:
    """Return the values of all parameters on the first rank, by first name. All ranks must call.

    The values on the ranks differ if each rank has initialised its own model. Only parameters whose checksums differ are sent.
    """
    values = {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in module.named_parameters()}
    if ranks.num_ranks > 1 and values:
        own = HOST.tensor(np.array([[crc32(value.data) for value in values.values()]], dtype=np.int64))
        checksums = ranks.gather(own, [Axis(ranks.num_ranks, 1)], 0).numpy()
        for i, name in enumerate(list(values)):
            if len(set(checksums[:, i])) > 1:
                tensor = HOST.tensor(values[name])
                flow.comm.broadcast(tensor, ranks.first_rank)
                values[name] = tensor.numpy()
    return values
