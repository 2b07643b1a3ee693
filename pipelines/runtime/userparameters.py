"""The parameters of the user's model: whether they are those of the plan, and their values."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

from .facts import find_module
from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()

__all__ = ["check_parameters", "find_parameter", "first_names", "values_of"]


def check_parameters(module: Any, graph: LayerGraph) -> None:
    """Whether a model's parameters are those of a graph.

    Raises:
        UserError: naming the first difference.
    """
    unseen = first_names(module)
    for layer in graph.layers:
        for parameter in layer.parameters:
            tensor = find_parameter(module, parameter.name)
            if tensor is None:
                raise UserError(
                    f"the plan was made for another model: it has {parameter.name} of {layer.describe()}, the model has not"
                )
            if tuple(tensor.shape) != parameter.shape:
                raise UserError(
                    f"the plan was made for another model: its {parameter.name} has shape {parameter.shape}, "
                    f"the model's {tuple(tensor.shape)}"
                )
            if parameter.tied_to is None and id(tensor) not in unseen:
                raise UserError(
                    f"the plan was made for another model: in it {parameter.name} is a parameter of its own, "
                    "in the model it is shared"
                )
            if parameter.tied_to is not None and id(tensor) in unseen:
                raise UserError(
                    f"the plan was made for another model: in it {parameter.name} is that of {parameter.tied_to}, "
                    "in the model it is not"
                )
            unseen.pop(id(tensor), None)
    for name in unseen.values():
        raise UserError(f"the plan was made for another model: the model has {name}, which it has not")


def first_names(model: Any) -> dict[int, str]:
    """Per parameter, by its ``id``, the first name that the model has for it."""
    return {id(tensor): name for name, tensor in model.named_parameters()}


def find_parameter(module: Any, path: str) -> Any:
    """The parameter at a path; None where there is none."""
    parent, _, name = path.rpartition(".")
    owner = find_module(module, parent)
    return None if owner is None else owner._parameters.get(name)


def values_of(module: Any, ranks: Ranks) -> dict[str, np.ndarray]:
    """The parameters by their first names, on every rank with the values of the first one.

    Models that each rank initialised by itself differ.  All ranks call; what is equal everywhere already is not sent.
    """
    values = {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in module.named_parameters()}
    if ranks.num_ranks > 1 and values:
        own = flow.tensor(np.array([[crc32(value.data) for value in values.values()]], dtype=np.int64))
        everyones = ranks.gather(own, [Axis(ranks.num_ranks, 1)], 0).numpy()
        for i, name in enumerate(list(values)):
            if len(set(everyones[:, i])) > 1:
                tensor = flow.tensor(values[name])
                flow.comm.broadcast(tensor, ranks.first_rank)
                values[name] = tensor.numpy()
    return values
