"""The weights of a stage as OneFlow global tensors, for whoever trains it by autograd and an optimizer of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..layouts import coarsest_mesh, common_mesh, split_dims
from ..load import load_oneflow
from ..parameters import StoredParameter, parameter_groups
from .model import Stored
from .stage import Stage

flow: Any = load_oneflow()

__all__ = ["GlobalWeights"]

Tensor = Any


class GlobalWeights:
    """The weights of a stage, as parameters of all ranks of the stage.

    Args:
        values: initial ones, of the module's parameters by their first names.

    Attributes:
        stage: whose they are.
        parameters: by the name under which they are stored.
        groups: of each layer its own parameters, by the ranks that their gradients are summed over.
    """

    def __init__(self, stage: Stage, values: Mapping[str, np.ndarray]) -> None:
        self.stage = stage
        # On the mesh of all parameters or, where they have none in common, each on as few axes as it needs.
        self._mesh = common_mesh((ready.strategy for ready in stage.layers), stage.stepper.num_ranks)
        self.parameters: dict[str, StoredParameter] = {}
        own: dict[str, list[StoredParameter]] = {ready.name: [] for ready in stage.layers}
        for name, stored in stage.weights.stored.items():
            dtype = flow.tensor(values[stored.sources[0][0]][:0]).dtype
            self.parameters[name] = self._parameter(stored, dtype)
            own[stored.layer].append(self.parameters[name])
        self.groups = {layer: parameter_groups(of_layer, stage.stepper) for layer, of_layer in own.items()}
        self.assign(values)

    def _parameter(self, stored: Stored, dtype: Any) -> StoredParameter:
        layout, ranks = stored.layout, self.stage.stepper
        mesh = self._mesh
        if mesh is None:
            mesh = coarsest_mesh((axis for axes in layout.axes for axis in axes), ranks.num_ranks)
            assert mesh is not None, "the axes of one parameter are a mesh"
        sbp = [flow.sbp.broadcast if dim is None else flow.sbp.split(dim) for dim in split_dims(layout.axes, mesh)]
        placement = ranks.mesh(*(axis.size for axis in mesh))
        return StoredParameter(layout, ranks, placement, sbp or [flow.sbp.broadcast], dtype, stored.is_trained)

    def local(self, is_summing: bool) -> list[Tensor]:
        """Local tensors to compute with, in the order of ``parameters``.

        Args:
            is_summing: whether gradients are to be summed over the ranks, or collected by each of them.
        """
        found: dict[int, Tensor] = {}
        for groups in self.groups.values():
            for group in groups:
                tensors = group.summed() if is_summing else group.unsummed()
                found.update(zip(map(id, group.parameters), tensors))
        return [found[id(parameter)] for parameter in self.parameters.values()]

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Take whole values, of the module's parameters by their first names."""
        for parameter in self.parameters.values():
            parameter.assign(parameter.layout.joined(values))

    def values(self) -> dict[str, np.ndarray]:
        """Whole values, named so, on every rank; all ranks call."""
        return _whole((parameter, parameter.tensor) for parameter in self.parameters.values())

    def gradients(self) -> dict[str, np.ndarray]:
        """Whole gradients, of the parameters that have one, on every rank; all ranks call."""
        return _whole((parameter, parameter.tensor.grad) for parameter in self.parameters.values())


def _whole(tensors: Iterable[tuple[StoredParameter, Tensor | None]]) -> dict[str, np.ndarray]:
    values: dict[str, np.ndarray] = {}
    for parameter, tensor in tensors:
        if tensor is not None:
            values.update(parameter.parts(parameter.logical(tensor)))
    return values
