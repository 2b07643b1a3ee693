"""The parameters of the user's model: whether they are those of the plan, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy

from .facts import find_module
from .load import load_oneflow
from .stepping import Stepper

flow = load_oneflow()

__all__ = ["UserParameter", "check_parameters", "values_of"]


@dataclass(frozen=True)
class UserParameter:
    """A parameter's value, the same on every rank, and whether it is trained."""

    value: np.ndarray
    requires_grad: bool


def check_parameters(module: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], num_ranks: int) -> None:
    """Whether a model's parameters are those of a graph, and the ranks those of its strategies.

    Raises:
        UserError: naming the first difference.
    """
    planned = next(iter(strategies.values())).num_devices
    if planned != num_ranks:
        raise UserError(f"the plan is for {planned} ranks, this job has {num_ranks}")
    unseen = {id(tensor): name for name, tensor in module.named_parameters()}
    for layer in graph.layers:
        if layer.name not in strategies:
            raise UserError(f"the plan has no strategy for {layer.describe()}")
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


def find_parameter(module: Any, path: str) -> Any:
    """The parameter at a path; None where there is none."""
    parent, _, name = path.rpartition(".")
    owner = find_module(module, parent)
    return None if owner is None else owner._parameters.get(name)


def values_of(module: Any, stepper: Stepper) -> dict[str, UserParameter]:
    """The parameters (shared ones by their first name), on every rank with the values of the first one.

    Models that each rank initialised by itself differ.  All ranks call; what is equal everywhere already is not sent.
    """
    parameters = dict(module.named_parameters())
    if not parameters:
        return {}
    values = {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in parameters.items()}
    if stepper.num_ranks > 1:
        own = flow.tensor(np.array([[crc32(value.tobytes()) for value in values.values()]], dtype=np.int64))
        everyones = stepper.gather(own, [Axis(stepper.num_ranks, 1)], 0).numpy()
        for i, name in enumerate(list(values)):
            if len(set(everyones[:, i])) > 1:
                tensor = flow.tensor(values[name])
                flow.comm.broadcast(tensor, stepper.first_rank)
                values[name] = tensor.numpy()
    return {name: UserParameter(values[name], bool(tensor.requires_grad)) for name, tensor in parameters.items()}
