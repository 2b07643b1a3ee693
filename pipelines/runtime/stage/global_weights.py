"""The weights of a stage as OneFlow global tensors, for users who train it with autograd and an optimizer of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..comm.parameter_layouts import coarsest_mesh, common_mesh, split_dims
from ..load import load_oneflow
from ..parameters import StoredParameter, bucketed_groups
from .model import StoredWeight
from .stage import Stage

flow: Any = load_oneflow()

__all__ = ["GlobalWeights"]

Tensor = Any


class GlobalWeights:
    """The weights of a stage, as global tensors on all ranks of the stage.

    Args:
        stage: Stage that uses the weights.
        values: Initial values of the module's parameters, whole, by first name (`PlannedModel.first_name`).
        bucket_bytes: As in :class:`autoddl.costmodel.workload.Workload`.

    Attributes:
        stage: Stage that uses the weights.
        parameters: Parameters, by the name under which each is stored.
        groups: The parameters, grouped by the sums of their gradients.
    """

    def __init__(self, stage: Stage, values: Mapping[str, np.ndarray], bucket_bytes: int = 0) -> None:
        self.stage = stage
        # All parameters lie on one mesh if the layers' axes form a common one. Otherwise each has the coarsest mesh that fits it.
        self._mesh = common_mesh((ready.strategy for ready in stage.layers), stage.stepper.num_ranks)
        self.parameters: dict[str, StoredParameter] = {}
        own: dict[str, list[StoredParameter]] = {ready.name: [] for ready in stage.layers}
        for name, stored in stage.weights.stored.items():
            self.parameters[name] = self._parameter(stored)
            own[stored.layer].append(self.parameters[name])
        self.groups = bucketed_groups(own.values(), bucket_bytes, stage.stepper)
        self.assign(values)

    def _parameter(self, stored: StoredWeight) -> StoredParameter:
        layout, ranks = stored.layout, self.stage.stepper
        mesh = self._mesh
        if mesh is None:
            mesh = coarsest_mesh((axis for axes in layout.stored_axes for axis in axes), ranks.num_ranks)
            assert mesh is not None, "the axes of one parameter are a mesh"
        sbp = [
            flow.sbp.broadcast if dim is None else flow.sbp.split(dim) for dim in split_dims(layout.stored_axes, mesh)
        ]
        placement = ranks.mesh(*(axis.size for axis in mesh))
        return StoredParameter(layout, ranks, placement, sbp or [flow.sbp.broadcast], stored.is_trained)

    def local(self, is_summing: bool) -> list[Tensor]:
        """Return the local tensors that the layers compute with, in the order of ``parameters``.

        Args:
            is_summing: If True, the backward pass sums the gradients over the ranks. If False, each rank accumulates its own.
        """
        local_of: dict[int, Tensor] = {}
        for group in self.groups:
            tensors = group.summed() if is_summing else group.unsummed()
            local_of.update(zip(map(id, group.parameters), tensors))
        return [local_of[id(parameter)] for parameter in self.parameters.values()]

    def readable(self) -> list[Any]:
        """Return what `Stage.run` reads of the parameters, with leaves that accumulate this rank's gradients."""
        weight_of: dict[int, Any] = {}
        for group in self.groups:
            weight_of.update(zip(map(id, group.parameters), group.readable()))
        return [weight_of[id(parameter)] for parameter in self.parameters.values()]

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Set the parameters to whole values, given by the first names of the module's parameters."""
        for parameter in self.parameters.values():
            parameter.assign(parameter.layout.joined(values))
        for group in self.groups:
            group.renew()

    def values(self) -> dict[str, np.ndarray]:
        """Return the whole values by first name, on every rank; all ranks call."""
        return _whole_values((parameter, parameter.tensor) for parameter in self.parameters.values())

    def gradients(self) -> dict[str, np.ndarray]:
        """Return the whole gradients by first name, on every rank, without parameters that have none; all ranks call."""
        return _whole_values((parameter, parameter.tensor.grad) for parameter in self.parameters.values())


def _whole_values(tensors: Iterable[tuple[StoredParameter, Tensor | None]]) -> dict[str, np.ndarray]:
    values: dict[str, np.ndarray] = {}
    for parameter, tensor in tensors:
        if tensor is not None:
            values.update(parameter.parts(parameter.logical(tensor)))
    return values
